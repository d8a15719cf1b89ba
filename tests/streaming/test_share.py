"""How a step is shared: every grain on one side, in order, the host's part as large as was asked. No tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statestream.streaming.plan import Unit, make_plan
from statestream.streaming.share import Cut, cut_at, device_units, host_chunks

unit_lists = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from((0, 256, 512)), st.sampled_from((256, 1024))), min_size=1, max_size=12
)


def units_of(drawn):
    return [Unit((a * grains, b * grains), grains) for grains, a, b in drawn]


@settings(max_examples=300, deadline=None)
@given(unit_lists, st.floats(0, 1), st.integers(1, 40_000), st.integers(1, 100_000))
def test_each_grain_is_on_one_side_and_the_host_has_its_share(drawn, fraction, room, budget):
    units = units_of(drawn)
    cut = cut_at(units, fraction)
    plan = make_plan(device_units(units, cut), budget)
    grain_bytes = [2048 if unit.sizes[0] else 1024 for unit in units]
    chunks = host_chunks(units, cut, grain_bytes, room)
    pieces = [p for chunk in plan.chunks for p in chunk.pieces] + [p for chunk in chunks for p, _ in chunk]
    seen = {}
    for piece in pieces:
        assert piece.first == seen.get(piece.unit, 0) < piece.last
        seen[piece.unit] = piece.last
    assert seen == {i: unit.grains for i, unit in enumerate(units)}
    total = sum(unit.nbytes for unit in units)
    on_host = sum(
        units[p.unit].nbytes // units[p.unit].grains * (p.last - p.first) for chunk in chunks for p, _ in chunk
    )
    largest_grain = max(unit.nbytes // unit.grains for unit in units)
    assert abs(on_host - fraction * total) <= largest_grain / 2 + 1
    for chunk in chunks:
        end = 0
        for piece, offset in chunk:
            assert offset == end
            end += grain_bytes[piece.unit] * (piece.last - piece.first)
        assert end <= room or (len(chunk) == 1 and chunk[0][0].last - chunk[0][0].first == 1)


def test_none_and_all():
    units = [Unit((512 * 3,), 3), Unit((512,))]
    assert cut_at(units, 0.0) == Cut(2, 0) and device_units(units, Cut(2, 0)) == units
    assert not host_chunks(units, Cut(2, 0), [1, 1], 10)
    assert cut_at(units, 1.0) == Cut(0, 0) and not device_units(units, Cut(0, 0))


def test_a_large_unit_is_cut_within():
    units = [Unit((256 * 100,), 100), Unit((256 * 4,), 4)]
    assert cut_at(units, 0.5) == Cut(0, 52)
    assert device_units(units, Cut(0, 52)) == [Unit((256 * 52,), 52)]


@pytest.mark.parametrize("room", [1, 100, 250])
def test_chunks_fill_their_slot(room):
    (first, *_) = chunks = host_chunks([Unit((256 * 10,), 10), Unit((256 * 10,), 10)], Cut(0, 0), [100, 100], room)
    assert sum(p.last - p.first for p, _ in first) == max(room // 100, 1)
    assert len(chunks) == -(-20 // max(room // 100, 1))
