"""A run of 2n steps equals n steps, export, load, and n more, bit for bit, in every mode."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import statestream
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import FORMS, MODES, Mode
from helpers.stored import decoded
from helpers.training import build, train

STEPS = 3

every_mode = pytest.mark.parametrize("mode", MODES, ids=str)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def uninterrupted(mode):
    optimizer = build(mode)
    train(optimizer, range(2 * STEPS))
    return snapshot(optimizer)


def resumed(mode, carry, order="model first"):
    """`carry` takes the state dict from the one to the other optimizer."""
    old = build(mode)
    train(old, range(STEPS))
    new = build(mode, seed=99)
    saved = carry(old.state_dict())

    def load_weights():
        with torch.no_grad():
            for target, source in zip(params_of(new), params_of(old), strict=True):
                target.copy_(source)

    if order == "model first":
        load_weights()
        new.load_state_dict(saved)
    else:
        new.load_state_dict(saved)
        load_weights()
    train(new, range(STEPS, 2 * STEPS))
    return snapshot(new)


@every_mode
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resumed_run_is_bit_equal(mode, order):
    assert differences(uninterrupted(mode), resumed(mode, lambda sd: sd, order)) == []


@every_mode
def test_resumed_run_through_a_weights_only_file_is_bit_equal(mode):
    assert differences(uninterrupted(mode), resumed(mode, through_file)) == []


@every_mode
def test_every_state_keeps_its_dtype_and_bits_over_save_and_load(mode):
    old = build(mode)
    train(old, range(STEPS))
    new = build(mode)
    new.load_state_dict(through_file(old.state_dict()))
    for a, b in zip(params_of(old), params_of(new), strict=True):
        wanted = mode.stored(a)
        assert {k: v.dtype for k, v in new.state[b].items() if k != "step"} == wanted
        for name in wanted:
            # Of scaled states the values: one can be written with a scale and its double.
            assert same_bits(decoded(old, a, name), decoded(new, b, name)), name
            assert old.state[a][name].stride() == new.state[b][name].stride(), name
        assert old.state[a]["step"].item() == new.state[b]["step"].item() == STEPS


@pytest.mark.parametrize("options", [{"adam_w_mode": False}, {"maximize": True}, {"bias_correction": False}], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_resumed_run_is_bit_equal_whatever_the_variant(form, options):
    whole = build(form, **options)
    train(whole, range(2 * STEPS))
    part = build(form, **options)
    train(part, range(STEPS))
    new = build(form, seed=99, **options)
    new.load_state_dict(through_file(part.state_dict()))
    with torch.no_grad():
        for target, source in zip(params_of(new), params_of(part), strict=True):
            target.copy_(source)
    train(new, range(STEPS, 2 * STEPS))
    assert differences(snapshot(whole), snapshot(new)) == []


@pytest.mark.parametrize("first, second", [(False, True), (True, False)])
def test_a_host_export_loads_without_offload_and_the_reverse(first, second):
    mode = Mode(None, torch.bfloat16, torch.bfloat16, "fp32", offload=first)
    old = build(mode)
    train(old, range(STEPS))
    new = build(Mode(None, torch.bfloat16, torch.bfloat16, "fp32", offload=second))
    new.load_state_dict(old.state_dict())
    assert differences(snapshot(old), snapshot(new), ignoring=("0", "1", "2", "3")) == []


def test_resumed_run_in_a_new_process_is_bit_equal(tmp_path):
    for number, mode in enumerate(MODES):
        optimizer = build(mode)
        train(optimizer, range(STEPS))
        params = [param.detach() for param in params_of(optimizer)]
        torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / f"{number}.pt")
    tests, package = Path(__file__).parents[1], Path(statestream.__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(package), os.environ.get("PYTHONPATH", "")])
    worker = [sys.executable, "-m", "helpers.resume_worker", str(tmp_path), str(STEPS), str(2 * STEPS)]
    subprocess.run(worker, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=200)
    for number, mode in enumerate(MODES):
        found = torch.load(tmp_path / f"{number}.out", weights_only=True)
        assert differences(uninterrupted(mode), found) == [], str(mode)


# ---- controls: each of these must not pass for a resumed run ----


def flip_one_bit(state_dict):
    state_dict["state"][0]["exp_avg"].view(torch.int32).view(-1)[3] ^= 1 << 22
    return state_dict


def drop_steps(state_dict):
    for state in state_dict["state"].values():
        state["step"] = torch.zeros(())
    return state_dict


def drop_masters(state_dict):
    for state in state_dict["state"].values():
        state.pop("master_param", None)
    return state_dict


def holds_more_than_the_weight(mode):
    """Whether masters do: one of 11 bits has no more than a float16 weight, in another range."""
    return mode.param is not torch.float32 and not (mode.param is torch.float16 and mode.master == "fp16")


DAMAGES = [
    pytest.param(mode, damage, id=f"{mode},{damage.__name__}")
    for mode in MODES
    for damage in (flip_one_bit, drop_steps, drop_masters)
    if damage is not drop_masters or (mode.master is not None and holds_more_than_the_weight(mode))
]


@pytest.mark.parametrize("mode, damage", DAMAGES)
def test_control_a_damaged_checkpoint_is_noticed(mode, damage):
    found = differences(uninterrupted(mode), resumed(mode, lambda sd: damage(through_file(sd))))
    expected = {flip_one_bit: "group 0 param 0 exp_avg", drop_steps: "step", drop_masters: "master_param"}[damage]
    assert any(name.endswith(expected) for name in found)


def test_control_comparison_sees_what_it_should():
    optimizer = build(Mode(torch.bfloat16, master="fp32"))
    train(optimizer, range(1))
    before = snapshot(optimizer)
    assert differences(before, copy.deepcopy(before)) == []
    for name, value in before.items():
        changed = dict(before)
        if isinstance(value, torch.Tensor) and value.numel():
            changed[name] = value.clone(memory_format=torch.contiguous_format)
            changed[name].view(-1).view(torch.uint8)[0] ^= 1
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            changed[name] = value + 1
        else:
            del changed[name]
        assert differences(before, changed) == [name]
