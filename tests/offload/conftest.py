"""What the offload tests share: small models, gradients, comparisons bit by bit."""

from __future__ import annotations

import pytest
import torch
from helpers.devices import Beyond
from statestream import FusedAdam
from statestream.offload import optimizer as optimizer_module
from statestream.offload import strategy as units_module
from torch.nn import Parameter

SHAPES = [(100, 33), (13,), (64, 64), (7,), (1000,), (3, 5, 7)]


@pytest.fixture
def on_device(monkeypatch):
    """Puts another device under every CPUOffloadOptimizer that is built from here on."""

    def put(device):
        for module in (optimizer_module, units_module):
            monkeypatch.setattr(module, "device_for", lambda _: device)
        return device

    return put


def make_params(dtype: torch.dtype | str = torch.float32, shapes=SHAPES, seed: int = 0) -> list[Parameter]:
    """Random parameters; dtype "mixed" alternates BF16 and FP32."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.bfloat16, torch.float32) if dtype == "mixed" else (dtype, dtype)
    return [Parameter(torch.randn(s, generator=generator).to(dtypes[i % 2])) for i, s in enumerate(shapes)]


def params_of_odd_layouts() -> list[Parameter]:
    """channels_last, transposed, empty, and one that begins off its storage's start."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator) for shape in ((8, 3, 5, 5), (40, 30), (0,), (601,))]
    weight, matrix, empty, vector = values
    return [Parameter(v) for v in (weight.to(memory_format=torch.channels_last), matrix.t(), empty, vector[1:])]


def set_grads(params, step: int, missing=()) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if i in missing else grad


def train(optimizer, params, steps, missing=lambda step: ()) -> None:
    for step in steps:
        set_grads(params, step, missing(step))
        optimizer.step()


def bits(tensor):
    """Equal for equal bits: NaN equals itself, -0.0 is not 0.0."""
    tensor = tensor.detach().contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def assert_same_values(a, b, what=""):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        assert a.dtype is b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        assert torch.equal(bits(a), bits(b)), f"{what}: bits differ"
    else:
        assert a == b, f"{what}: {a} and {b}"


def assert_same_training(params, optimizer, other_params, other) -> None:
    """Parameters and all state, and the order of its keys."""
    for i, (p, q) in enumerate(zip(params, other_params, strict=True)):
        assert_same_values(p, q, f"parameter {i}")
        # FusedAdam makes state when it is asked for.
        promised = isinstance(getattr(optimizer, "inner", optimizer), FusedAdam)
        mine, theirs = (o.state[t] if promised else o.state.get(t, {}) for o, t in ((optimizer, p), (other, q)))
        assert list(mine) == list(theirs), f"state keys of parameter {i}"
        for name in mine:
            assert_same_values(mine[name], theirs[name], f"{name} of parameter {i}")
        if promised:
            mine, theirs = (getattr(o, "inner", o).backend.scales.get(t, {}) for o, t in ((optimizer, p), (other, q)))
            assert mine.keys() == theirs.keys(), f"scales of parameter {i}"
            for name in mine:
                assert_same_values(mine[name], theirs[name], f"scales of {name} of parameter {i}")


class Counting(Beyond):
    """Bytes that were copied each way."""

    load, store, down, up = "load", "store", "down", "up"

    def __init__(self):
        super().__init__()
        self.count_anew()

    def count_anew(self) -> None:
        self.moved = dict.fromkeys(("load", "store", "down", "up"), 0)

    def copy(self, queue, to, to_offset, source, offset, nbytes) -> None:
        self.moved[queue] += nbytes
        super().copy(queue, to, to_offset, source, offset, nbytes)


class Pinning:
    """Stands in for the driver: notes what is pinned, refuses from the n-th request on."""

    def __init__(self, refuse_from: int | None = None):
        self.refuse_from, self.requests, self.pinned = refuse_from, 0, {}

    def pin(self, address: int, nbytes: int) -> None:
        self.requests += 1
        if self.refuse_from is not None and self.requests > self.refuse_from:
            raise RuntimeError("cudaHostRegister failed with error 2")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]
