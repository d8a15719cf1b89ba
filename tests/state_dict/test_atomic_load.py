"""A load that fails is one error that names the place, and nothing has changed."""

import copy
import math
import re

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import Mode
from helpers.training import build, train

BF16, FP32 = torch.bfloat16, torch.float32

MODES = {
    "fp32": Mode(FP32),
    "bf16 with masters": Mode(BF16, BF16, BF16, "fp32"),
    "bf16 with remainders, to the host": Mode(BF16, BF16, FP32, "remainders", offload=True),
}


def set_state(number, name, value):
    def change(sd):
        state = sd["state"][number]
        state[name] = value(state[name]) if callable(value) else value

    return change


def drop_state(number, name):
    def change(sd):
        del sd["state"][number][name]

    return change


def set_group(number, key, value):
    def change(sd):
        sd["param_groups"][number][key] = value

    return change


def change_all(sd, **values):
    for state in sd["state"].values():
        state.update(values)


def drop_every_step(sd):
    for state in sd["state"].values():
        del state["step"]
    for group in sd["param_groups"]:
        del group["step"]


# A change to the last parameter's or group's part, so that an eager load would have written all others;
# then what the error must name. `6` is the number of the last parameter.
BAD = {
    "a moment missing": (drop_state(6, "exp_avg_sq"), "exp_avg_sq of parameter 6"),
    "the first moment missing": (drop_state(6, "exp_avg"), "exp_avg of parameter 6"),
    "a moment of the empty tensor missing": (drop_state(3, "exp_avg"), "exp_avg of parameter 3"),
    "another shape": (set_state(6, "exp_avg", torch.zeros(33, 3)), r"exp_avg of parameter 6.*\(33, 3\).*\(33, 2\)"),
    "the transposed shape": (set_state(6, "exp_avg_sq", lambda v: v.t()), r"exp_avg_sq of parameter 6.*\(2, 33\)"),
    "the shape of all elements in a row": (set_state(6, "exp_avg", lambda v: v.reshape(-1)), "exp_avg of parameter 6"),
    "one dimension more": (set_state(6, "exp_avg", lambda v: v[None]), "exp_avg of parameter 6"),
    "a moment of integers": (set_state(6, "exp_avg", lambda v: v.to(torch.int64)), "exp_avg of parameter 6.*int64"),
    "a moment of int16": (set_state(6, "exp_avg", lambda v: v.to(torch.int16)), "exp_avg of parameter 6.*int16"),
    "a moment of booleans": (set_state(6, "exp_avg", lambda v: v.bool()), "exp_avg of parameter 6.*bool"),
    "a complex moment": (set_state(6, "exp_avg", lambda v: v + 0j), "exp_avg of parameter 6.*complex"),
    "a sparse moment": (set_state(6, "exp_avg", lambda v: v.to_sparse()), "exp_avg of parameter 6.*sparse"),
    "a moment without data": (set_state(6, "exp_avg_sq", lambda v: v.to("meta")), "exp_avg_sq of parameter 6.*meta"),
    "a number for a moment": (set_state(6, "exp_avg", 0.5), "exp_avg of parameter 6.*float"),
    "a list for a moment": (set_state(6, "exp_avg", lambda v: v.tolist()), "exp_avg of parameter 6.*list"),
    "a NaN step": (set_state(6, "step", torch.tensor(math.nan)), "step of parameter 6.*nan"),
    "an infinite step": (set_state(6, "step", math.inf), "step of parameter 6.*inf"),
    "a negative step": (set_state(6, "step", torch.tensor(-1.0)), "step of parameter 6.*-1"),
    "half a step": (set_state(6, "step", 2.5), "step of parameter 6.*2.5"),
    "steps of several elements": (set_state(6, "step", torch.ones(2)), "step of parameter 6"),
    "a step without data": (set_state(6, "step", torch.ones((), device="meta")), "step of parameter 6"),
    "a complex step": (set_state(6, "step", torch.tensor(1 + 1j)), "step of parameter 6"),
    "text for a step": (set_state(6, "step", "three"), "step of parameter 6.*three"),
    "no step anywhere": (drop_every_step, "step of parameter 0"),
    "a state that is no state of Adam": (
        set_state(6, "momentum_buffer", torch.zeros(33, 2)),
        "parameter 6.*momentum_buffer",
    ),
    "a state of AMSGrad": (set_state(6, "max_exp_avg_sq", torch.zeros(33, 2)), "parameter 6.*max_exp_avg_sq"),
    "a list for a parameter's state": (lambda sd: sd["state"].update({6: [1, 2]}), "parameter 6.*list"),
    "AMSGrad": (set_group(1, "amsgrad", True), "amsgrad of group 1"),
    "a newer format": (set_group(1, "format_version", 2), "group 1.*format_version 2"),
    "a format that is no number": (set_group(1, "format_version", "x"), "format_version of group 1"),
    "a NaN lr": (set_group(1, "lr", math.nan), "lr of group 1.*nan"),
    "a NaN lr in a tensor": (set_group(1, "lr", torch.tensor(math.nan)), "lr of group 1.*nan"),
    "several lrs": (set_group(1, "lr", torch.ones(2)), "lr of group 1"),
    "no lr": (set_group(1, "lr", None), "lr of group 1"),
    "a negative lr": (set_group(1, "lr", -1e-3), "lr of group 1.*-0.001"),
    "NaN betas": (set_group(1, "betas", (0.9, math.nan)), "betas of group 1.*nan"),
    "a beta of 1": (set_group(1, "betas", (1.0, 0.9)), "betas of group 1"),
    "one beta": (set_group(1, "betas", (0.9,)), "betas of group 1"),
    "a NaN eps": (set_group(1, "eps", math.nan), "eps of group 1.*nan"),
    "an infinite weight decay": (set_group(1, "weight_decay", math.inf), "weight_decay of group 1.*inf"),
    "a NaN count in a group": (set_group(1, "step", math.nan), "step of group 1.*nan"),
    "a group too few": (lambda sd: sd["param_groups"].pop(), "1 parameter groups.* 2"),
    "a group too many": (lambda sd: sd["param_groups"].append({"params": []}), "3 parameter groups.* 2"),
    "a parameter too few": (lambda sd: sd["param_groups"][1]["params"].pop(), "group 1.* 3 parameters.* 4"),
    "a group without parameters": (lambda sd: sd["param_groups"][1].pop("params"), "group 1.*'params'"),
    "no groups": (lambda sd: sd.pop("param_groups"), "'param_groups'"),
    "no state": (lambda sd: sd.pop("state"), "'state'"),
    "names of other number": (set_group(1, "param_names", ["a"]), "group 1.*param_names"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_failed_load_names_the_place_and_changes_nothing(mode, bad):
    change, named = BAD[bad]
    optimizer, undisturbed = build(MODES[mode]), build(MODES[mode])
    for each in (optimizer, undisturbed):
        train(each, range(3))
    other = build(MODES[mode], seed=5, lr=0.7)
    train(other, range(20, 25))
    state_dict = copy.deepcopy(other.state_dict())
    change(state_dict)
    before = snapshot(optimizer)
    addresses = {k: v.data_ptr() for state in optimizer.state.values() for k, v in state.items()}
    with pytest.raises((ValueError, RuntimeError), match=re.compile(named, re.S)) as error:
        optimizer.load_state_dict(state_dict)
    assert "nothing was loaded" in str(error.value)
    assert differences(before, snapshot(optimizer)) == []
    assert addresses == {k: v.data_ptr() for state in optimizer.state.values() for k, v in state.items()}
    train(optimizer, range(3, 5))
    train(undisturbed, range(3, 5))
    assert differences(snapshot(optimizer), snapshot(undisturbed)) == []


@pytest.mark.parametrize("mode", MODES)
def test_control_the_same_dict_unchanged_does_load(mode):
    optimizer, other = build(MODES[mode]), build(MODES[mode], seed=5, lr=0.7)
    train(optimizer, range(3))
    train(other, range(20, 25))
    before = snapshot(optimizer)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert differences(before, snapshot(optimizer)) != []


@pytest.mark.parametrize("mode", [m for m, form in MODES.items() if form.master])
@pytest.mark.parametrize("wrong", ["other kind", "other shape"])
def test_a_master_that_does_not_fit_is_refused(mode, wrong):
    optimizer = build(MODES[mode])
    train(optimizer, range(2))
    state_dict = copy.deepcopy(optimizer.state_dict())
    master = state_dict["state"][6]["master_param"]
    swap = torch.int16 if master.dtype is FP32 else FP32
    state_dict["state"][6]["master_param"] = master.to(swap) if wrong == "other kind" else master[:1]
    state_dict["state"][0]["exp_avg"] += 1
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="master_param of parameter 6"):
        optimizer.load_state_dict(state_dict)
    assert differences(before, snapshot(optimizer)) == []


def test_names_are_used_where_there_are_names():
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    from statestream import FusedAdam

    optimizer = FusedAdam([("first.weight", params[0]), ("second.weight", params[1])])
    state_dict = copy.deepcopy(optimizer.state_dict())
    del state_dict["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"exp_avg of 'second\.weight' is missing"):
        optimizer.load_state_dict(state_dict)


def test_a_load_hook_that_raises_leaves_everything():
    optimizer = build(Mode(FP32))
    train(optimizer, range(2))
    before = snapshot(optimizer)

    def refuse(optimizer, state_dict):
        raise KeyError("refused")

    handle = optimizer.register_load_state_dict_pre_hook(refuse)
    other = build(Mode(FP32), seed=3)
    with pytest.raises(KeyError, match="refused"):
        optimizer.load_state_dict(other.state_dict())
    assert differences(before, snapshot(optimizer)) == []
    handle.remove()
    optimizer.load_state_dict(other.state_dict())
    assert differences(before, snapshot(optimizer)) != []


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_load_that_fails_at_its_second_parameter_is_remembered(mode, monkeypatch):
    optimizer = build(mode)
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    real, done = optimizer._load_param, []

    def failing(load, other):
        if done:
            raise MemoryError("no more")
        done.append(real(load, other))

    monkeypatch.setattr(optimizer, "_load_param", failing)
    with pytest.raises(MemoryError):
        optimizer.load_state_dict(saved)
    param = optimizer.param_groups[0]["params"][0]
    for refused in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.get_unscaled_state(param, "exp_avg"),
        lambda: copy.deepcopy(optimizer),
    ):
        with pytest.raises(RuntimeError, match="earlier load_state_dict"):
            refused()
    monkeypatch.undo()
    optimizer.load_state_dict(saved)
    train(optimizer, range(2, 3))
