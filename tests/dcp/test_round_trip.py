"""torch.distributed.checkpoint in one process: a run resumed through it equals the uninterrupted one by bits."""

import copy
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.bits import differences, same_bits, snapshot
from helpers.models import Net, grouped, train_model
from helpers.modes import MODES, Mode
from statestream import FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 3

DCP_MODES = [mode for mode in MODES if mode.param is not None]
FILE_MODES = [
    Mode(FP32),
    Mode(FP32, BF16, BF16, None, offload=True),
    Mode(BF16, BF16, BF16, "fp32", offload=True),
    Mode(BF16, BF16, FP32, "remainders", offload=True),
    Mode(BF16, BF16, BF16, "fp32", offload=False),
]

either_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


def run(mode, steps=(), seed=0):
    torch.manual_seed(seed)
    model = Net(mode.param)
    optimizer = FusedAdam(grouped(model), **mode.arguments)
    train_model(model, optimizer, steps)
    return model, optimizer


def uninterrupted(mode):
    _, optimizer = run(mode, range(2 * STEPS))
    optimizer.state_dict()  # brings the unused layer's state into being, as a save does
    return snapshot(optimizer)


def finish(model, optimizer):
    optimizer.zero_grad()
    train_model(model, optimizer, range(STEPS, 2 * STEPS))
    return snapshot(optimizer)


@pytest.mark.parametrize("live_grads", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
@either_form
@pytest.mark.parametrize("mode", DCP_MODES, ids=str)
def test_a_run_through_get_and_set_is_bit_equal(mode, flat, cpu_offload, live_grads):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=cpu_offload)
    model, optimizer = run(mode, range(STEPS))
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    new_model, new_optimizer = run(mode, seed=7)
    if live_grads:
        for param in new_model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
    set_state_dict(new_model, new_optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    assert differences(uninterrupted(mode), finish(new_model, new_optimizer)) == []


def save_and_load(folder, mode, flat, save):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=mode.offload)
    model, optimizer = run(mode, range(STEPS))
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    save(state, folder)
    new_model, new_optimizer = run(mode, seed=7)
    state = {
        "model": get_model_state_dict(new_model, options=options),
        "optimizer": get_optimizer_state_dict(new_model, new_optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(new_model, state["model"], options=options)
    set_optimizer_state_dict(new_model, new_optimizer, state["optimizer"], options=options)
    return new_model, new_optimizer


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
@either_form
@pytest.mark.parametrize("mode", FILE_MODES, ids=str)
def test_a_run_through_files_is_bit_equal(mode, flat, asynchronous, tmp_path):
    def save(state, folder):
        if asynchronous:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)

    new_model, new_optimizer = save_and_load(tmp_path, mode, flat, save)
    assert differences(uninterrupted(mode), finish(new_model, new_optimizer)) == []


@pytest.mark.parametrize("damage", ["one bit", "steps", "masters"])
def test_control_damage_in_a_file_is_noticed(damage, tmp_path):
    mode = Mode(BF16, BF16, FP32, "fp32", offload=True)

    def save(state, folder):
        state = copy.deepcopy(state)
        for name, value in state["optimizer"].items():
            if damage == "one bit" and name == "state.first.weight.exp_avg":
                value.view(torch.int32).view(-1)[3] ^= 1 << 22
            if damage == "steps" and name.endswith(".step") and name.startswith("state"):
                value.zero_()
            if damage == "masters" and name.endswith("master_param"):
                value.copy_(value.to(BF16))
        dcp.save(state, checkpoint_id=folder)

    new_model, new_optimizer = save_and_load(tmp_path, mode, True, save)
    assert differences(uninterrupted(mode), finish(new_model, new_optimizer)) != []


@pytest.mark.parametrize("mode", [Mode(FP32, offload=True), Mode(BF16, BF16, BF16, "fp32", offload=True)], ids=str)
def test_an_async_save_holds_the_values_of_the_save(mode, tmp_path):
    """Steps go on at once while a slow writer has not yet written a byte."""
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    model, optimizer = run(mode, range(STEPS))
    go_on = threading.Event()

    class SlowWriter(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            assert go_on.wait(60)
            return super().write_data(plan, planner)

    state = get_optimizer_state_dict(model, optimizer, options=options)
    at_save = copy.deepcopy(state)
    done = dcp.async_save(state, storage_writer=SlowWriter(tmp_path))
    train_model(model, optimizer, range(STEPS, STEPS + 3))
    go_on.set()
    done.result()
    loaded = get_optimizer_state_dict(*run(mode, seed=7), options=options)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert set(loaded) == set(at_save)
    assert [k for k, v in at_save.items() if isinstance(v, torch.Tensor) and not same_bits(v, loaded[k])] == []
    now = get_optimizer_state_dict(model, optimizer, options=options)
    assert not same_bits(now["state.first.weight.exp_avg"], at_save["state.first.weight.exp_avg"])


def test_cpu_offload_makes_no_second_copy_of_a_host_export():
    model, optimizer = run(Mode(FP32, BF16, BF16, offload=True), range(1))
    made = []
    optimizer.register_state_dict_post_hook(lambda _, sd: made.append(sd))
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    given = get_optimizer_state_dict(model, optimizer, options=options)
    exported = {v.data_ptr() for state in made[-1]["state"].values() for v in state.values()}
    assert {v.data_ptr() for v in given.values() if isinstance(v, torch.Tensor)} <= exported


@either_form
def test_a_full_gather_in_one_process_is_the_same_dict(flat):
    model, optimizer = run(Mode(BF16, BF16, FP32, "fp32"), range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    full = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=True, cpu_offload=True)
    a = get_optimizer_state_dict(model, optimizer, options=options)
    b = get_optimizer_state_dict(model, optimizer, options=full)
    assert set(a) == set(b)
    if flat:
        assert all(same_bits(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())
    else:
        new_model, new_optimizer = run(Mode(BF16, BF16, FP32, "fp32"), seed=3)
        set_optimizer_state_dict(new_model, new_optimizer, b, options=full)
        ours, theirs = snapshot(new_optimizer), snapshot(optimizer)
        keys = ("exp_avg", "exp_avg_sq", "step", "master_param", "lr", "betas")
        assert [k for k in differences(ours, theirs) if k.rsplit(" ", 1)[-1] in keys] == []
