"""dion's own Muon, where it is installed: whichever layout it has. It is not on the package index.

The stand-ins are compared with it too, in what statestream goes by: groups, states, and the order of collectives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.processes import Claim, run_claims
from statestream.offload.muon.variants import BatchedMuon, MegabatchedMuon, muon_layout

from .cases import CASES, CHECKPOINTED, Case, check_same, dion_muon, offloaded, train
from .claims import mesh_of_all, of_cases, of_checkpoints, sent_in_a_step

try:
    MUON = dion_muon()
except ImportError:
    pytest.skip("dion is not installed (github.com/microsoft/dion)", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)  # the first test of ranks waits for all

LAYOUT = "megabatched" if hasattr(MUON, "_create_ortho_tasks") else "batched"
REAL = {name: replace(case, real=True) for name, case in CASES.items() if case.layout == LAYOUT}
STOOD_FOR = LAYOUT == "batched" or hasattr(MUON, "_sync_hyperparam_tensors")
"""Whether this is the version that the stand-in was written after; megabatched ones differ in lr and counts."""


def test_it_is_recognised():
    layout = muon_layout(REAL[next(iter(REAL))].run().optimizer)
    assert type(layout) is {"megabatched": MegabatchedMuon, "batched": BatchedMuon}[LAYOUT]


@pytest.mark.parametrize("budget", [None, 300_000, 1])
@pytest.mark.parametrize("name", REAL)
def test_bits_are_those_of_dion(name, budget):
    case = REAL[name]
    check_same(train(offloaded(case.run(), budget)), train(case.run()))


# ---- ranks ----


def the_stand_in_sends_what_dion_sends(case: Case, folder: Path) -> None:
    real, stand_in = (sent_in_a_step(c.run(mesh_of_all())) for c in (case, replace(case, real=False)))
    assert stand_in == real and (real or dist.get_world_size() == 1)


ALIKE: dict[str, Claim] = {
    f"the same is sent: {name}": partial(the_stand_in_sends_what_dion_sends, case)
    for name, case in REAL.items()
    if not any("partitions" in group.options for group in case.groups)  # which dion does not know
    and any(group.shapes and group.options.get("algorithm", "muon") == "muon" for group in case.groups)
}
CLAIMS = {
    **of_cases(REAL),
    **of_checkpoints({LAYOUT: replace(CHECKPOINTED[LAYOUT], real=True)}),
    **(ALIKE if STOOD_FOR else {}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[int, str], str]:
    folder = tmp_path_factory.mktemp("dion")
    return {
        (ranks, name): problem for ranks in (1, 2, 4) for name, problem in run_claims(ranks, CLAIMS, folder).items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("claim", CLAIMS)
def test_ranks_find_that(found, ranks, claim):
    assert not found[ranks, claim]


# ---- the stand-in ----


def _described(optimizer):
    """Groups and states, by key, type, dtype and shape."""

    def kind(value):
        return (type(value), value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)

    groups = [{k: kind(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    states = [
        {k: kind(v) for k, v in optimizer.state.get(p, {}).items()} for g in optimizer.param_groups for p in g["params"]
    ]
    saved = [{k: kind(v) for k, v in g.items() if k != "params"} for g in optimizer.state_dict()["param_groups"]]
    return groups, [list(s.items()) for s in states], saved


@pytest.mark.skipif(not STOOD_FOR, reason="another version of this layout")
@pytest.mark.parametrize("name", REAL)
def test_the_stand_in_has_dions_groups_states_and_attributes(name):
    runs = [REAL[name].run(), CASES[name].run()]
    for _ in range(2):
        real, stand_in = (run.optimizer for run in runs)
        assert _described(real) == _described(stand_in)
        for attribute in ("_world_size", "_process_group", "_device_rank", "_distributed_mesh"):
            assert getattr(real, attribute) == getattr(stand_in, attribute)
        for run in runs:
            train(run)
    if REAL[name].dtype is not torch.float32:
        return  # mu is rounded to BF16 there
    real, stand_in = runs
    for p, q in zip(real.params, stand_in.params, strict=True):
        for key, value in real.optimizer.state.get(p, {}).items():
            # Of the same gradients; dion's fused AdamW rounds elsewhere.
            torch.testing.assert_close(stand_in.optimizer.state[q][key], value)
