"""State dicts of a streamed Muon in one process: counts, lr, and what a state dict lacks."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from . import dion_megabatched
from .cases import ADAMW, CASES, EMPTY, STAND_INS, Case, Group, check_same, offloaded, train
from .dion_common import Common


def without(state_dict, key):
    state = {p: {k: v for k, v in of.items() if k != key} for p, of in state_dict["state"].items()}
    return {"state": state, "param_groups": state_dict["param_groups"]}


ADAMW_ONLY = Case("megabatched", [EMPTY, ADAMW, Group([(8, 8)] * 3)])


def test_counts_that_a_state_dict_lacks_are_those_of_the_group():
    """Versions of dion before `step_dev` counted in the group alone."""
    saved = without(copy.deepcopy(train(ADAMW_ONLY.run(), range(2)).optimizer.state_dict()), "step_dev")
    weights = [p.detach().clone() for p in train(ADAMW_ONLY.run(), range(2)).params]
    runs = [ADAMW_ONLY.run(), offloaded(ADAMW_ONLY.run(), 1)]
    for run in runs:
        for param, weight in zip(run.params, weights, strict=True):
            param.data.copy_(weight)
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        assert all(run.optimizer.state[p]["step_dev"] == 2 for p in run.params[:3])
    plain, mine = (train(run, range(2, 4)) for run in runs)
    check_same(mine, plain)
    check_same(mine, train(ADAMW_ONLY.run()))


class Muon(dion_megabatched.Muon):
    """As dion's was until its AdamW counted on the device."""

    def _state_of(self, param, algorithm):
        return Common._state_of(self, param, algorithm)

    def _adamw_step(self, state, group):
        return group["step"]

    def load_state_dict(self, state_dict):
        Common.load_state_dict(self, state_dict)
        self._sync_hyperparam_tensors()


def test_a_version_without_counts_of_its_own_gets_none(monkeypatch):
    monkeypatch.setitem(STAND_INS, "megabatched", Muon)
    runs = [ADAMW_ONLY.run(), offloaded(ADAMW_ONLY.run(), 1)]
    for run in runs:
        train(run, range(2))
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        assert list(run.optimizer.state[run.params[0]]) == ["momentum", "variance"]
        train(run, range(2, 4))
    check_same(runs[1], runs[0])


def test_counts_are_never_cast_to_the_parameters_dtype():
    """As torch does when it loads: BF16 would stop counting at 256."""
    case = replace(ADAMW_ONLY, dtype=torch.bfloat16)
    run = train(offloaded(case.run(), 1), range(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        if "step_dev" in state:
            state["step_dev"] = torch.tensor(1000.0)
    run.optimizer.load_state_dict(saved)
    train(run, range(2, 4))
    count = run.optimizer.state[run.params[0]]["step_dev"]
    assert count.dtype is torch.float32 and count == 1002


def test_a_load_fills_the_lr_that_the_optimizer_keeps():
    """dion's graphs and a caller's schedule hold that tensor."""
    run = train(offloaded(CASES["megabatched, no matrices"].run(), 1), range(1))
    group = run.optimizer.param_groups[1]
    kept = group["lr"]
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["param_groups"][1]["lr"] = 0.125
    run.optimizer.load_state_dict(saved)
    assert run.optimizer.param_groups[1]["lr"] is kept and kept == 0.125


def test_parameters_that_a_state_dict_lacks_start_anew():
    for layout in ("megabatched", "batched", "torch"):
        case = Case(layout, [Group([(16, 16)] * 3)])
        run = train(offloaded(case.run(), 1), range(2))
        saved = copy.deepcopy(run.optimizer.state_dict())
        del saved["state"][1]
        run.optimizer.load_state_dict(saved)
        momenta = [next(iter(run.optimizer.state[p].values())) for p in run.params]
        assert [bool(m.any()) for m in momenta] == [True, False, True]
