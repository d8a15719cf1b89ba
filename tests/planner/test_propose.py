"""The proposal is the first way, from the least intrusive on, that leaves the reserve free."""

from __future__ import annotations

import pytest
from statestream.planner.estimate import estimate
from statestream.planner.mesh import Mesh
from statestream.planner.model import model_of_size
from statestream.planner.plans import make_plan
from statestream.planner.settings import Settings

GiB = 1 << 30
SHARES = Mesh(shard=8).shares(model_of_size(8 * GiB, 32))
"""2^30 parameters a rank: an element's bytes are its GiB."""


def plan(gpu: float, reserve: float = 0.0, **options):
    settings = Settings.checked(**options)
    return make_plan(SHARES, settings, source="a test", ranks=8, gpu_memory=int(gpu * GiB), reserve=int(reserve * GiB))


# Weights and gradients take 4 bytes an element; moments and masters 12, 10 with remainders, 6 with BF16 moments too.
@pytest.mark.parametrize(
    ("gpu", "call"),
    [
        (16.01, "FusedAdam(params, master_weights=True)"),
        (
            14.01,
            "FusedAdam(params, master_weights=True, store_param_remainders=True, state_dict_cpu_offload=True)",
        ),
        (
            10.1,
            "FusedAdam(params, master_weights=True, store_param_remainders=True, "
            'exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", state_dict_cpu_offload=True)',
        ),
        (5.01, "CPUOffloadOptimizer(FusedAdam(params, master_weights=True), step_chunk_bytes=1073741824)"),
        (
            4.9,
            "CPUOffloadOptimizer(FusedAdam(params, master_weights=True), step_chunk_bytes=1073741824, "
            "offload_gradients=True)",
        ),
        (2.9, None),
    ],
)
def test_each_memory_has_its_way(gpu, call):
    found = plan(gpu).proposal
    assert (None if found is None else found.settings.call()) == call


def test_an_export_to_the_host_is_the_first_change():
    """BF16 moments export 8 bytes an element more on the device: 20 in all, 12 without."""
    tight = plan(12.1, moments="bf16")
    assert [p.changes for p in tight.proposals] == ["as asked", "export to the host"]
    assert plan(20.1, moments="bf16").proposal.changes == "as asked"


@pytest.mark.parametrize("gpu", [5.5, 8, 11, 14.5, 17, 24])
@pytest.mark.parametrize("reserve", [0.0, 0.5, 4.0])
def test_what_is_proposed_leaves_the_reserve_and_what_came_before_does_not(gpu, reserve):
    made = plan(gpu, reserve)
    for proposal in made.proposals:
        own = estimate(SHARES, proposal.settings)
        free = gpu * GiB - own.resident
        assert proposal.fits == (free >= reserve * GiB and gpu * GiB >= own.device_peak)
    assert [p.fits for p in made.proposals[:-1]] == [False] * (len(made.proposals) - 1)


def test_the_default_reserve_is_a_fifth():
    settings = Settings.checked()
    made = make_plan(SHARES, settings, source="a test", ranks=8, gpu_memory=20 * GiB)
    assert made.reserve == 4 * GiB
    assert made.proposal.changes == "as asked"
    tighter = make_plan(SHARES, settings, source="a test", ranks=8, gpu_memory=int(19.9 * GiB))
    assert tighter.proposal.changes != "as asked"
    assert make_plan(SHARES, settings, source="a test", ranks=8).reserve == 0  # of nothing


def test_what_is_asked_for_is_only_added_to():
    for proposal in plan(5.2, moments="bf16", masters="fp16").proposals:
        assert proposal.settings.exp_avg.name == "bf16" and proposal.settings.master.name == "fp16"
    offloaded = plan(4.9, offload=True)
    assert [p.settings.offload for p in offloaded.proposals] == [True, True, True]
    assert [p.settings.chunk for p in offloaded.proposals] == [None, GiB, GiB]
    assert [p.settings.offload_gradients for p in offloaded.proposals] == [False, False, True]
    small = plan(3.5, offload_gradients=True, chunk="16MiB")
    assert [p.settings.chunk for p in small.proposals] == [16 << 20]


def test_gradients_leave_the_device_last_and_keep_the_chunk_that_was_asked_for():
    made = plan(3.1, chunk="64MiB")
    assert [p.changes for p in made.proposals] == ["as asked", "state and gradients in host memory"]
    assert made.proposal.settings.chunk == 64 << 20
    assert "nothing fits: weights and gradients alone take" in str(plan(1.5))


def test_fp32_weights_are_not_offered_remainders():
    settings = Settings.checked(weights="fp32")
    made = make_plan(SHARES, settings, source="a test", ranks=8, gpu_memory=9 * GiB, reserve=0)
    assert not any("remainders" in p.changes for p in made.proposals)
