"""Every place where the package makes a stream or the host wait, programs that need them, and one place left out."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

import statestream
import torch
from statestream import CPUOffloadOptimizer, FusedAdam, transfer
from statestream.offload import gradient_staging
from statestream.offload.device import CudaDevice
from statestream.offload.worker import Worker
from torch import Tensor

__all__ = ["PROGRAMS", "Place", "left_out", "places"]

PACKAGE = Path(statestream.__file__).parent
FILES = ("offload/stream.py", "offload/host_stream.py", "offload/gradient_staging.py", "transfer.py")
WAITS = {"wait", "wait_stream", "synchronize", "drain", "result"}
AFTER_ERRORS = {"settle"}
"""Functions that set things right after an error: tests/simulated_device leaves out their waits."""


@dataclass(frozen=True)
class Place:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.text}"

    def is_of(self, frame: FrameType) -> bool:
        return frame.f_lineno == self.line and frame.f_code.co_filename == str(PACKAGE / self.file)


def places() -> list[Place]:
    found = []
    for file in FILES:
        source = (PACKAGE / file).read_text()
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef) or function.name in AFTER_ERRORS:
                continue
            handlers = [n for n in ast.walk(function) if isinstance(n, ast.ExceptHandler)]
            rare = {id(n) for handler in handlers for n in ast.walk(handler)}
            for node in ast.walk(function):
                called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
                yielded = isinstance(node, ast.Yield) and isinstance(node.value, (ast.Name, ast.Subscript))
                kept = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "keep"
                if (called or yielded or kept) and id(node) not in rare:
                    place = Place(file, node.lineno, ast.get_source_segment(source, node) or "")
                    found += [] if "." not in place.text and called else [place]
    return [p for p in dict.fromkeys(found) if not p.text.startswith(("work", "device.clock"))]


@contextlib.contextmanager
def left_out(place: Place | None) -> Iterator[None]:
    """What waits at that place waits for nothing there."""
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (CudaDevice, "wait"),
            (CudaDevice, "synchronize"),
            (CudaDevice, "drain"),
            (transfer._CudaQueues, "wait"),
            (torch.cuda.Stream, "wait_stream"),
            (torch.cuda.Stream, "synchronize"),
            (gradient_staging._Slot, "keep"),
            (Worker, "result"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _unless_at(place, getattr(owner, name))))
        yield


def _unless_at(place: Place | None, call: Callable[..., object]) -> Callable[..., object]:
    def instead(*args: object, **kwargs: object) -> object:
        frame = sys._getframe(1)
        flow = getattr(frame.f_locals.get("self"), "_flow", None) if isinstance(frame, FrameType) else None
        waits_for_flow = flow is not None and getattr(flow, "gi_frame", None) is not None
        if place is not None and (place.is_of(frame) or (waits_for_flow and place.is_of(flow.gi_frame))):
            return None
        return call(*args, **kwargs)

    return instead


# ---- programs ----

SIZES = (20_000, 7, 5_000, 30_001)


def _params() -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, generator=random).bfloat16().cuda()) for n in SIZES]


def _grad(step: int, i: int) -> Tensor:
    """Made on the device, by work that is queued and late."""
    random = torch.Generator().manual_seed(100 * step + i)
    return torch.randn(SIZES[i], generator=random).bfloat16().cuda().mul_(2)


def _others_work() -> None:
    """Takes memory that was just given back, and writes to it."""
    for n in (1 << 12, 1 << 14, 1 << 16, 1 << 17):
        torch.empty(n, dtype=torch.uint8, device="cuda").fill_(7)


def _outcome(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = [p.detach().cpu() for p in params]
    states = optimizer.state_dict()["state"].values()
    return weights + [t.cpu().clone() for state in states for t in state.values() if isinstance(t, Tensor)]


def _fused(params: list[torch.nn.Parameter]) -> FusedAdam:
    return FusedAdam(params, lr=0.1, master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")


def _offloaded(fraction: float, chunk: int = 60_000) -> list[Tensor]:
    params = _params()
    optimizer = CPUOffloadOptimizer(_fused(params), chunk, cpu_fraction=fraction)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = _grad(step, i)
        optimizer.step()
        _others_work()
    return _outcome(params, optimizer)


def _offloaded_gradients(fraction: float) -> list[Tensor]:
    params = _params()
    optimizer = CPUOffloadOptimizer(_fused(params), 60_000, cpu_fraction=fraction, offload_gradients=True)
    with mock.patch.object(gradient_staging, "SLOT_BYTES", 1 << 14):
        for step in range(2):
            for micro_batch in range(3):
                grads = [_grad(10 * step + micro_batch, i) for i in range(len(params))]
                sum((p * g).sum().float() for p, g in zip(params, grads, strict=True)).backward()
                del grads
                _others_work()
            optimizer.step()
            _others_work()
    return _outcome(params, optimizer)


def _few_gradients_held() -> list[Tensor]:
    with mock.patch.object(gradient_staging, "HELD_BYTES", 1 << 10):
        return _offloaded_gradients(0)


def _exported() -> list[Tensor]:
    params = _params()
    optimizer = _fused(params)
    optimizer.state_dict_cpu_offload, optimizer.export_staging_bytes = True, 1 << 14
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = _grad(step, i)
        optimizer.step()
        _others_work()
        exported = optimizer.state_dict()
    optimizer.load_state_dict(exported)
    _others_work()
    for i, p in enumerate(params):
        p.grad = _grad(7, i)
    optimizer.step()
    first = [t.clone() for state in exported["state"].values() for t in state.values() if isinstance(t, Tensor)]
    return first + _outcome(params, optimizer)


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "streamed": lambda: _offloaded(0),
    "shared": lambda: _offloaded(0.5),
    "host alone": lambda: _offloaded(1),
    "gradients": lambda: _offloaded_gradients(0),
    "gradients shared": lambda: _offloaded_gradients(0.5),
    "few gradients held": _few_gradients_held,
    "exported": _exported,
}
