"""Which bytes travel: one range a kind for a chunk, little that nobody needs, and never over a chunk still there."""

from __future__ import annotations

import random

import pytest
from statestream.device.host_memory import HostMemory
from statestream.offload.host.arena import GRADS, Arena, Bank
from statestream.offload.host.layout import SMALL_GAP_BYTES, Layout
from statestream.streaming.plan import Unit, make_plan

KINDS = ("exp_avg", "exp_avg_sq", "master_param")


def layout_of(units, budget):
    memory = HostMemory()
    arenas = [
        Arena(kind, [u.sizes[k] for u in units], [u.sizes[k] // u.grains for u in units], memory)
        for k, kind in enumerate(KINDS)
    ]
    return Layout(make_plan(units, budget), units, [Bank(0, list(units), arenas)])


def adam_unit(grains):
    return Unit((512 * grains, 512 * grains, 1024 * grains), grains)


def test_a_chunk_moves_in_one_copy_a_kind():
    layout = layout_of([adam_unit(n) for n in (1, 40, 1, 7, 300, 2)], 60_000)
    stages = layout.stages()
    assert len(stages) > 5
    for stage in stages:
        assert len(stage.transfers) == len(KINDS)
        assert sum(t.nbytes for t in stage.transfers) == stage.chunk.nbytes
    moved = {}
    for stage in stages:
        for t in stage.transfers:
            key = t.host.data_ptr()
            assert t.host_offset == moved.get(key, 0), "ranges of an arena follow each other"
            moved[key] = t.host_offset + t.nbytes
    assert list(moved.values()) == [a.nbytes for a in layout.banks[0].arenas]


def test_large_state_without_a_gradient_stays_where_it_is_and_small_state_travels_along():
    large, small = adam_unit(SMALL_GAP_BYTES // 2048 + 1), adam_unit(2)
    units = [small, large, small, small, small, large]
    layout = layout_of(units, None)
    (stage,) = layout.stages({0, 2, 4})
    moved = sum(t.nbytes for t in stage.transfers)
    assert moved == sum(units[i].nbytes for i in (0, 2, 3, 4))
    assert len(stage.transfers) == 2 * len(KINDS)
    assert layout.stages(set()) == []


@pytest.mark.parametrize("seed", range(200))
def test_no_stage_overwrites_one_that_it_does_not_wait_for(seed):
    """With chunks left out: replayed range by range."""
    r = random.Random(seed)
    units = [adam_unit(r.randrange(1, 30)) for _ in range(r.randrange(2, 12))]
    layout = layout_of(units, r.randrange(1, 60_000))
    active = {i for i in range(len(units)) if r.random() < 0.6}
    stages = layout.stages(active)
    chunks = [c for c in layout.plan.chunks if any(p.unit in active for p in c.pieces)]
    assert [s.chunk for s in stages] == chunks
    for k, stage in enumerate(stages):
        assert -1 <= stage.after < k
        for other in stages[stage.after + 1 : k]:
            a, b = stage.chunk, other.chunk
            assert a.offset >= b.offset + b.nbytes or b.offset >= a.offset + a.nbytes


def test_a_piece_lies_in_the_ring_as_it_lies_in_its_arena():
    layout = layout_of([adam_unit(n) for n in (3, 5, 2)], 25_000)
    for stage in layout.stages():
        for kind in range(len(KINDS)):
            transfer = stage.transfers[kind]
            for piece in stage.chunk.pieces:
                in_ring = layout.place(stage.chunk, piece, kind) - transfer.ring_offset
                in_arena = layout.banks[0].start(kind, piece) - transfer.host_offset
                assert in_ring == in_arena


def test_gradients_travel_to_the_device_and_not_back():
    memory, units = HostMemory(), [Unit((256, 1024))] * 2
    arenas = [Arena(kind, [n, n], [n, n], memory) for kind, n in (("exp_avg", 256), (GRADS, 1024))]
    (stage,) = Layout(make_plan(units, None), units, [Bank(0, units, arenas)]).stages()
    assert [(t.nbytes, t.stored) for t in stage.transfers] == [(512, True), (2048, False)]


def test_gaps_that_are_small_by_themselves_are_not_added_up():
    half = adam_unit(SMALL_GAP_BYTES // 2048 // 2 + 1)
    small = adam_unit(1)
    layout = layout_of([small, half, small, half, small, half, small], None)
    (stage,) = layout.stages({0, 2, 4, 6})
    assert len(stage.transfers) == len(KINDS)
