"""Units -> chunks: every grain once, the budget kept, the ring's places right. No tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statestream.streaming import plan as planning
from statestream.streaming.plan import Unit, make_plan, padded_bytes

unit_lists = st.lists(
    st.tuples(st.integers(1, 40), st.tuples(*[st.sampled_from((0, 256, 512, 1024))] * 3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=12,
)


def units_of(drawn):
    bank, units = 0, []
    for grains, grain_sizes, whole, new_bank in drawn:
        bank += new_bank
        sizes = tuple(size * grains for size in grain_sizes)
        units.append(Unit(sizes, 1 if whole else grains, bank))
    return units


@settings(max_examples=300, deadline=None)
@given(unit_lists, st.one_of(st.none(), st.integers(1, 400_000)))
def test_every_grain_is_in_one_chunk_and_the_budget_holds(drawn, budget):
    units = units_of(drawn)
    plan = make_plan(units, budget)
    seen = [0] * len(units)
    order = -1
    for chunk in plan.chunks:
        assert chunk.pieces
        for piece in chunk.pieces:
            assert units[piece.unit].bank == chunk.bank
            assert piece.first == seen[piece.unit] < piece.last
            assert piece.unit >= order
            order, seen[piece.unit] = piece.unit, piece.last
    assert seen == [unit.grains for unit in units]
    smallest = max(unit.nbytes // unit.grains for unit in units)
    allowed = sum(u.nbytes for u in units) if budget is None else max(budget, smallest)
    assert plan.ring_bytes <= allowed
    if budget is None:
        assert len(plan.chunks) == len({unit.bank for unit in units})


@settings(max_examples=300, deadline=None)
@given(unit_lists, st.integers(1, 400_000))
def test_no_chunk_overwrites_one_that_it_does_not_wait_for(drawn, budget):
    """Against a replay of the ring, byte range by byte range: stores are in order, so waiting for `after` means
    that every chunk up to it has left."""
    plan = make_plan(units_of(drawn), budget)
    for k, chunk in enumerate(plan.chunks):
        assert -1 <= chunk.after < k
        still_there = plan.chunks[chunk.after + 1 : k]
        for other in still_there:
            assert chunk.offset >= other.offset + other.nbytes or other.offset >= chunk.offset + chunk.nbytes
        assert chunk.offset + chunk.nbytes <= plan.ring_bytes


def test_a_budget_below_the_smallest_piece_means_the_smallest_piece_at_a_time():
    plan = make_plan([Unit((2560,), 10)], 1)
    assert [c.nbytes for c in plan.chunks] == [256] * 10
    assert plan.ring_bytes == 256
    assert plan.oversize == (0,)


def test_a_parameter_larger_than_the_budget_is_cut_where_it_may_be_and_runs_alone_where_not():
    cut = make_plan([Unit((100 * 256,), 100), Unit((256,), 1)], 30 * 256)
    assert max(c.nbytes for c in cut.chunks) == 10 * 256
    assert cut.ring_bytes <= 30 * 256 and not cut.oversize
    whole = make_plan([Unit((256,)), Unit((100 * 256,)), Unit((256,))], 30 * 256)
    assert whole.oversize == (1,)
    alone = next(c for c in whole.chunks if c.pieces[0].unit == 1)
    number = whole.chunks.index(alone)
    assert len(alone.pieces) == 1 and alone.after == number - 1
    assert whole.chunks[number + 1].after == number


def test_three_chunks_fit_the_ring_at_once():
    plan = make_plan([Unit((256 * 1000,), 1000)], 30 * 256)
    assert [c.after for c in plan.chunks[:6]] == [-1, -1, -1, 0, 1, 2]


@pytest.mark.parametrize("budget", range((1 << 20) - 300, (1 << 20) + 300, 37))
def test_three_chunks_fit_though_scales_make_them_end_anywhere(budget):
    """Grains of 2,056 bytes, as of FP16 moments and FP32 masters: a chunk begins at the next 256 bytes."""
    made = make_plan([Unit((2056 * 2000,), 2000)], budget)
    assert made.ring_bytes <= budget
    assert all(later.after <= max(i - 3, -1) for i, later in enumerate(made.chunks))


def test_a_large_budget_is_not_used_in_full():
    gib = 1 << 30
    plan = make_plan([Unit((gib,), gib // 256) for _ in range(12)], 8 * gib)
    assert plan.ring_bytes <= 3 * 12 * gib // planning.MOST_CHUNKS + 3 * 256


def test_units_without_state_are_stepped_too():
    plan = make_plan([Unit((0,)), Unit((256,)), Unit((0,))], 1)
    assert sorted(p.unit for c in plan.chunks for p in c.pieces) == [0, 1, 2]


@pytest.mark.parametrize("budget", [0, -5, True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget):
    with pytest.raises(ValueError, match="step_chunk_bytes"):
        make_plan([Unit((256,))], budget)


def test_units_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="grains"):
        Unit((300,), 7)


def test_padding_goes_to_the_next_256_elements():
    assert [padded_bytes(n, 2) for n in (0, 1, 256, 257)] == [0, 512, 512, 1024]


@pytest.mark.parametrize("budget", [6000, 9000, 20_000])
def test_every_chunk_begins_where_vectors_may(budget):
    """Scales are 4 bytes a grain, so that chunks end anywhere."""
    units = [Unit((grains * 256, grains * 256, grains * 4, grains * 4), grains) for grains in (3, 5, 7, 1, 9) * 5]
    plan = make_plan(units, budget)
    assert len(plan.chunks) > 3
    assert [chunk.offset for chunk in plan.chunks if chunk.offset % planning.ALIGNMENT_BYTES] == []


@pytest.mark.parametrize("budget", [3 * 256 * 10, 3 * 256 * 10 + 100, 3 * 256 * 10 + 600])
def test_three_chunks_have_room_beside_each_other(budget):
    plan = make_plan([Unit((256 * 90,), 90)], budget)
    assert [chunk.after for chunk in plan.chunks[:4]] == [-1, -1, -1, 0]


def test_joined_units_are_one_chunk_whatever_the_budget():
    units = [Unit((256,)), Unit((512,)), Unit((512,), joined=True), Unit((256,), joined=True), Unit((256,))]
    for budget in (1, 300, 768, 1300, 4000, 100_000):
        plan = make_plan(units, budget)
        chunk = next(c for c in plan.chunks if any(p.unit == 1 for p in c.pieces))
        assert {1, 2, 3} <= {p.unit for p in chunk.pieces}
        assert plan.oversize == ((1,) if 300 <= budget < 1280 else (0, 1, 4) if budget < 256 else ())
        assert plan.ring_bytes <= max(budget, 1280)
    with pytest.raises(ValueError, match="joined"):
        make_plan([Unit((256,), joined=True)], 1)
    with pytest.raises(ValueError, match="joined"):
        make_plan([Unit((256,)), Unit((256,), bank=1, joined=True)], 1)
