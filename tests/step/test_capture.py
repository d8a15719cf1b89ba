"""What cannot be captured in a CUDA graph is refused by name, before anything changes. Whether one is being captured is
what torch says; a real capture is in tests/cuda."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import BF16, Mode
from helpers.training import build, gradient, train
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.device.capture import is_capturing

MODE = Mode(BF16, BF16, BF16, "fp32")
STREAMED = {
    "FusedAdam": lambda: CPUOffloadOptimizer(build(MODE), 5_000),
    "gradients": lambda: CPUOffloadOptimizer(build(MODE), 5_000, offload_gradients=True),
    "AdamW": lambda: CPUOffloadOptimizer(torch.optim.AdamW(build(MODE).param_groups, foreach=False)),
    "one pass": lambda: CPUOffloadOptimizer(
        torch.optim.SGD(build(MODE).param_groups, momentum=0.9), per_parameter=False
    ),
    "Muon": lambda: CPUOffloadOptimizer(torch.optim.Muon([torch.nn.Parameter(torch.ones(6, 5))], ns_steps=1)),
}


@pytest.fixture
def capture(monkeypatch):
    """From its call on a CUDA graph is being captured."""

    def begin():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True, raising=False)

    return begin


def give_gradients(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        param.grad = gradient(param, index, 7)
    return params


def test_a_step_that_is_not_capturable_is_refused_and_changes_nothing(capture):
    optimizer = build(MODE)
    train(optimizer, range(2))
    give_gradients(optimizer)
    before = snapshot(optimizer)
    capture()
    called = []
    with pytest.raises(RuntimeError, match=r"FusedAdam with capturable=False cannot be captured in a CUDA graph"):
        optimizer.step(lambda: called.append(1))
    assert differences(before, snapshot(optimizer)) == [] and not called


def test_a_capturable_step_is_captured(capture):
    optimizers = [build(MODE, capturable=True) for _ in range(2)]
    train(optimizers[0], range(3))
    capture()
    train(optimizers[1], range(3))
    assert differences(*map(snapshot, optimizers)) == []


def test_settings_that_a_captured_step_would_read_from_the_device_are_refused(capture):
    optimizer = build(MODE, capturable=True)
    give_gradients(optimizer)
    before = snapshot(optimizer)
    capture()
    group = optimizer.param_groups[1]
    for name, value, of in (
        ("lr", 0.1, "0.1 is a number, which a CUDA graph would keep"),
        ("betas", (0.9, torch.ones((), device="meta")), "a tensor on meta cannot be read"),
        ("eps", torch.ones((), device="meta"), "a tensor on meta cannot be read"),
        ("weight_decay", torch.ones((), device="meta"), "a tensor on meta cannot be read"),
    ):
        kept, group[name] = group[name], value
        with pytest.raises(RuntimeError, match=f"{name} of group 1: {of}"):
            optimizer.step()
        group[name] = kept
    assert differences(before, snapshot(optimizer)) == []


def test_what_waits_for_copies_is_refused(capture):
    optimizer = build(MODE, capturable=True, state_dict_cpu_offload=True)
    train(optimizer, range(2))
    saved, before = optimizer.state_dict(), snapshot(optimizer)
    param = optimizer.param_groups[0]["params"][0]
    values = optimizer.get_unscaled_state(param, "exp_avg")
    capture()
    for what, call in (
        (r"state_dict\(\) with state_dict_cpu_offload=True", optimizer.state_dict),
        (r"load_state_dict\(\)", lambda: optimizer.load_state_dict(saved)),
        (r"set_scaled_state\(\)", lambda: optimizer.set_scaled_state(param, "exp_avg", values)),
    ):
        with pytest.raises(RuntimeError, match=f"^{what} cannot be captured in a CUDA graph: the host waits"):
            call()
    assert differences(before, snapshot(optimizer)) == []


def test_a_state_dict_on_the_device_waits_for_nothing(capture):
    optimizer = build(MODE, capturable=True)
    train(optimizer, range(2))
    before = optimizer.state_dict()
    capture()
    assert torch.equal(before["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("make", STREAMED.values(), ids=STREAMED)
def test_everything_of_a_streamed_optimizer_is_refused_and_changes_nothing(make, capture):
    optimizer = make()
    train(optimizer, range(2))
    saved, before = optimizer.state_dict(), snapshot(optimizer)
    added = torch.nn.Parameter(torch.ones(3, 3))
    capture()
    for what, call in (
        ("step", optimizer.step),
        ("state_dict", optimizer.state_dict),
        ("load_state_dict", lambda: optimizer.load_state_dict(saved)),
        ("add_param_group", lambda: optimizer.add_param_group({"params": [added]})),
    ):
        with pytest.raises(RuntimeError, match=rf"^{what}\(\) of a CPUOffloadOptimizer cannot be captured"):
            call()
    assert differences(before, snapshot(optimizer)) == []


def test_gradients_are_not_offloaded_in_a_captured_backward_nor_clipped(capture):
    param = torch.nn.Parameter(torch.ones(300))
    optimizer = CPUOffloadOptimizer(FusedAdam([param]), offload_gradients=True)
    param.sum().backward()
    capture()
    with pytest.raises(RuntimeError, match=r"^the gradient of parameter 0 of group 0, which is offloaded, cannot be"):
        param.sum().backward()
    with pytest.raises(RuntimeError, match=r"^clip_grad_norm_\(\) of a CPUOffloadOptimizer cannot be captured"):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("initialized, context", [(False, True), (True, False)], ids=["CUDA", "the device"])
def test_what_was_not_used_is_not_asked(monkeypatch, capture, initialized, context):
    """To ask would open a context, which takes hundreds of MiB."""
    capture()
    assert is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: context, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("a context is opened"))
    assert not is_capturing()
