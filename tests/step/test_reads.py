"""When the host reads what may be on a device: once, before anything is launched. Each read waits for the device."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import differences, snapshot
from statestream import CPUOffloadOptimizer, FusedAdam, kernels
from statestream.arguments import as_numbers
from torch.overrides import TorchFunctionMode

T = torch.Tensor
READS = {T.item, T.tolist, T.__bool__, T.__float__, T.__int__, T.__index__, T.numpy, T.cpu, T.is_nonzero}
WAYS = {
    "plain": lambda optimizer: optimizer,
    "streamed": lambda optimizer: CPUOffloadOptimizer(optimizer, 3_000),
    "shared": lambda optimizer: CPUOffloadOptimizer(optimizer, 3_000, cpu_fraction=0.5),
    "on the host": lambda optimizer: CPUOffloadOptimizer(optimizer, cpu_fraction=1),
}


class Log(TorchFunctionMode):
    """What happens in a step, in order: "read" and "launch"."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.events = []
        adam = kernels.adam

        def launch(*args, **kwargs):
            self.events.append("launch")
            with torch._C.DisableTorchFunction():  # on the CPU a capturable call reads what a GPU's kernel would
                adam(*args, **kwargs)

        monkeypatch.setattr(kernels, "adam", launch)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.events.append("read")
        return function(*args, **(kwargs or {}))


def tensor(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def make(as_tensor, **arguments):
    """Three groups, every setting of which is a tensor, or a number."""
    of = tensor if as_tensor else lambda value, dtype=None: tensor(value, dtype or torch.float32).item()
    groups = [
        {
            "params": [torch.nn.Parameter(torch.ones(700, 3))],
            "lr": of(0.1 / (i + 1)),
            "betas": (of(0.9, torch.float64), of(0.99)),
            "eps": of(1e-6),
            "weight_decay": of(0.1 * i, torch.bfloat16),
        }
        for i in range(3)
    ]
    optimizer = FusedAdam(groups, **arguments)
    for i, group in enumerate(groups):
        group["params"][0].grad = torch.full((700, 3), 4.0 + i)
    return optimizer


@pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)
def test_everything_is_read_at_once_before_the_first_launch(wrap, monkeypatch):
    optimizer, plain = wrap(make(True)), make(False)
    log = Log(monkeypatch)
    for step in range(2):
        optimizer.grad_scale, optimizer.found_inf = tensor(4.0), tensor(0.0)
        log.events.clear()
        with log:
            optimizer.step()
        assert log.events[0] == "read" and set(log.events[1:]) == {"launch"} and len(log.events) > 3
        for group in plain.param_groups:
            group["params"][0].grad /= 4.0
        plain.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert (
            step
            or differences(snapshot(plain), snapshot(optimizer), ignoring=("lr", "betas", "eps", "weight_decay")) == []
        )


@pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)
def test_a_skipped_step_reads_once_and_launches_nothing(wrap, monkeypatch):
    optimizer = wrap(make(True))
    log = Log(monkeypatch)
    optimizer.grad_scale, optimizer.found_inf = tensor(4.0), tensor(1.0)
    with log:
        optimizer.step()
    assert log.events == ["read"]


def test_a_capturable_step_reads_nothing(monkeypatch):
    optimizer = FusedAdam([{"params": [torch.nn.Parameter(torch.ones(9))]} for _ in range(3)], capturable=True)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(9)
    optimizer.grad_scale, optimizer.found_inf = tensor(4.0), tensor(0.0)
    log = Log(monkeypatch)
    monkeypatch.setattr(kernels, "advance_steps", lambda *_: None)  # which reads found_inf on the CPU
    with log:
        optimizer.step()
    assert log.events == ["launch"] * 3


def test_plain_numbers_are_read_nowhere(monkeypatch):
    optimizer = make(False)
    log = Log(monkeypatch)
    with log:
        optimizer.step()
    assert log.events == ["launch"] * 3


def test_numbers_read_together_are_those_read_one_by_one():
    values = [
        tensor(0.1),
        tensor([1e-8], torch.float64),
        3,
        tensor(0.999, torch.bfloat16),
        tensor(7, torch.int64),
        tensor(True, torch.bool),
        0.25,
        torch.nn.Parameter(tensor(5.0)),
    ]
    expected = [float(v.item()) if isinstance(v, torch.Tensor) else float(v) for v in values]
    found = as_numbers(values)
    assert found == expected and all(type(number) is float for number in found)
    assert as_numbers([]) == [] and as_numbers([values[0]]) == expected[:1]


def test_control_every_way_of_reading_is_seen(monkeypatch):
    log, value = Log(monkeypatch), tensor(1.0)
    with log:
        for read in (value.item, value.tolist, lambda: bool(value), lambda: float(value), lambda: int(value)):
            read()
    assert log.events == ["read"] * 5
