"""A plan's seconds, against a clock that runs the real plan, layout and stream at the same bandwidths."""

from __future__ import annotations

import pytest
from statestream.planner.estimate import estimate
from statestream.planner.mesh import Mesh
from statestream.planner.model import Model, Parameter
from statestream.planner.settings import Settings
from statestream.planner.times import Rates, times

from benchmarks.simulated.bandwidth import TRAFFIC, adam_units, time_step

GB = 10**9
ELEMENTS = [60_000_000, *[20_000_000, 13] * 12]
FEW = [n // 25 for n in ELEMENTS]
"""Of which a large budget makes a handful of chunks."""


def model_of(elements: list[int]) -> Model:
    return Model("a test", tuple(Parameter(f"w{i}", (n,), "bf16") for i, n in enumerate(elements)))


MODEL = model_of(ELEMENTS)


@pytest.mark.parametrize("link", [25 * GB, 400 * GB, 4000 * GB])
@pytest.mark.parametrize("chunk", [None, 10 << 20, 150 << 20, 2 << 30])
@pytest.mark.parametrize("elements", [ELEMENTS, FEW], ids=["many", "few"])
def test_a_streamed_step_takes_as_long_as_its_schedule(elements, chunk, link):
    """From links that are slower than the kernels to one that is faster."""
    memory = 4000 * GB
    clock = time_step(adam_units(elements), chunk, link=link, memory=memory)
    made = estimate(Mesh().shares(model_of(elements)), Settings.checked(moments="bf16", offload=True, chunk=chunk))
    assert times(made, Rates(link=link, device=memory), ranks=1).step == pytest.approx(clock.total, rel=0.05)


def test_a_step_of_three_equal_chunks_ends_with_the_last_store_where_kernels_take_longest():
    elements, chunk = [2 << 20] * 3, 3 * (16 << 20)
    clock = time_step(adam_units(elements), chunk, link=1000 * GB, memory=1000 * GB)
    made = estimate(Mesh().shares(model_of(elements)), Settings.checked(moments="bf16", offload=True, chunk=chunk))
    assert len(made.chunks) == 3
    assert times(made, Rates(link=1000 * GB, device=1000 * GB), 1).step == pytest.approx(clock.total, rel=0.03)


def test_a_resident_step_moves_what_the_kernels_move():
    made = estimate(Mesh().shares(MODEL), Settings.checked(moments="bf16"))
    state = 8 * sum(ELEMENTS)
    assert made.traffic == pytest.approx(TRAFFIC * state, rel=0.001)
    assert times(made, Rates(device=4000 * GB), 1).step == pytest.approx(TRAFFIC * state / (4000 * GB), rel=0.001)


def test_without_a_bandwidth_there_is_no_time():
    resident, streamed = Settings.checked(), Settings.checked(offload=True)
    for settings, rates in [(resident, Rates(link=GB)), (streamed, Rates(device=GB))]:
        assert times(estimate(Mesh().shares(MODEL), settings), rates, 1).step is None


def test_an_export_takes_its_bytes_over_the_link_and_a_save_its_share_of_the_disk():
    made = estimate(Mesh().shares(MODEL), Settings.checked(export="host"))
    found = times(made, Rates(link=10 * GB, disk=GB), ranks=4)
    n = sum(ELEMENTS)
    assert found.export == pytest.approx(12 * n / (10 * GB))
    assert found.save == pytest.approx(14 * n / 4 / GB)
