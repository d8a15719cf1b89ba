"""Loads, updates and stores overlap: a step takes as long as the slowest of them, plus one fill and one drain."""

import pytest

from benchmarks.simulated.bandwidth import MEMORY, adam_units, time_step

GB = 10**9


def layers(total_bytes, count=24):
    """A model of a large embedding, equal layers and biases of 13 elements, with 8 bytes of state an element."""
    elements = total_bytes // 8
    embedding = elements // 6
    layer = (elements - embedding) // count
    return adam_units([embedding, *[n for _ in range(count) for n in (layer - 13, 13)]])


@pytest.mark.parametrize("chunks", [8, 16, 32, 64])
@pytest.mark.parametrize("state", [1 * GB, 3 * GB, 12 * GB])
def test_a_step_takes_the_slowest_of_its_three_phases(state, chunks):
    units = layers(state)
    budget = 3 * -(-sum(u.nbytes for u in units) // chunks)
    timing = time_step(units, budget, most_chunks=chunks)
    assert chunks <= timing.chunks <= chunks + 2
    assert timing.peak_bytes <= budget
    assert timing.total <= timing.bound


@pytest.mark.parametrize("state", [1 * GB, 3 * GB, 12 * GB])
def test_one_pass_pays_for_the_phases_one_after_another(state):
    units = layers(state)
    one_pass = time_step(units, None)
    streamed = time_step(units, state // 4)
    assert one_pass.chunks == 1
    assert one_pass.total == pytest.approx(one_pass.loads + one_pass.updates + one_pass.stores)
    assert streamed.total < 0.6 * one_pass.total
    assert streamed.peak_bytes < 0.3 * one_pass.peak_bytes


@pytest.mark.parametrize("memory", [MEMORY, 100e9, 20e9])
def test_it_holds_whichever_phase_is_the_slowest(memory):
    timing = time_step(layers(3 * GB), 3 * GB // 8, memory=memory)
    fill_of_the_slowest = max(timing.updates / timing.chunks, timing.fill)
    assert timing.total <= 1.05 * max(timing.loads, timing.updates, timing.stores) + 2 * fill_of_the_slowest


def test_with_room_for_one_chunk_nothing_overlaps():
    """The control: the bound above is not met by a ring that cannot hold what it overlaps."""
    units = adam_units([256] * 64)
    timing = time_step(units, 256 * 8, most_chunks=64)
    assert timing.peak_bytes == 256 * 8
    assert timing.total > timing.bound
