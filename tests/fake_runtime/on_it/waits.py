"""Every place where the package makes a stream or the host wait, programs that need them, and one place left out."""

from __future__ import annotations

import ast
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from unittest import mock

import statestream
import torch
from helpers.training import with_gradients
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.checkpoint import pinned, transfer
from statestream.device.queues import CudaDevice
from statestream.device.worker import Worker
from statestream.offload.adam import host_share
from statestream.offload.gradients import staging
from torch import Tensor

__all__ = ["PROGRAMS", "Place", "left_out", "places"]

PACKAGE = Path(statestream.__file__).parent
FILES = {
    "offload/inner_hooks.py": {"synchronize"},
    "device/queues.py": {"synchronize"},
    "offload/gradients/staging.py": {"wait", "synchronize", "result", "keep"},
    "offload/gradients/accumulate.py": {"synchronize"},
    "streaming/host_pipeline.py": {"wait", "yield"},
    "streaming/pipeline.py": {"wait", "result"},
    "checkpoint/pinned.py": {"wait_for_all_devices"},
    "checkpoint/transfer.py": {"wait", "wait_stream", "synchronize"},
}
"""Where a stream or the host is made to wait, and by what. A storage that is kept until a copy is done waits too."""
AFTER_ERRORS = {"settle", "drain"}
"""Functions that set things right after an error: tests/simulated_device leaves out their waits."""


@dataclass(frozen=True)
class Place:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.text}"


def places() -> list[Place]:
    found: dict[Place, None] = {}
    for file, names in FILES.items():
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef) or function.name in AFTER_ERRORS:
                continue
            handlers = [n for n in ast.walk(function) if isinstance(n, ast.ExceptHandler)]
            rare = {id(n) for handler in handlers for n in ast.walk(handler)}
            for node in ast.walk(function):
                if id(node) not in rare and _waits(node) in names - {function.name}:
                    found[Place(file, node.lineno, ast.get_source_segment(source, node) or "")] = None
    return list(found)


def _waits(node: ast.AST) -> str:
    if isinstance(node, ast.Yield):
        return "yield" if isinstance(node.value, (ast.Name, ast.Subscript)) else ""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


@contextlib.contextmanager
def left_out(place: Place | None) -> Iterator[set[tuple[str, int]]]:
    """What waits at that place waits for nothing there. Gives the files and lines of all waits, as they come."""
    seen: set[tuple[str, int]] = set()

    def skips(at: set[tuple[str, int]]) -> bool:
        seen.update(at)
        return place is not None and (place.file, place.line) in at

    with contextlib.ExitStack() as stack:
        if place is not None:
            stack.enter_context(mock.patch.object(Worker, "_drive", _late(Worker._drive, "worker" in place.text)))
            for name in ("result", "stop"):
                stack.enter_context(mock.patch.object(Worker, name, _asked(getattr(Worker, name))))
        for owner, name in (
            (CudaDevice, "wait"),
            (CudaDevice, "synchronize"),
            (transfer._CudaQueues, "wait"),
            (torch.cuda.Stream, "wait_stream"),
            (torch.cuda.Stream, "synchronize"),
            (staging._Slot, "keep"),
            (Worker, "result"),
            (pinned, "wait_for_all_devices"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _unless(skips, getattr(owner, name))))
        yield seen


def _unless(skips: Callable[[set[tuple[str, int]]], bool], call: Callable[..., object]) -> Callable[..., object]:
    def instead(*args: object, **kwargs: object) -> object:
        frame = sys._getframe(1)
        flow = getattr(getattr(frame.f_locals.get("self"), "_flow", None), "gi_frame", None)  # which a worker drives
        return None if skips({_place_of(f) for f in (frame, flow) if f is not None}) else call(*args, **kwargs)

    return instead


def _place_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"), frame.f_lineno


def _late(drive: Callable[[Worker], None], nobody_waits: bool) -> Callable[[Worker], None]:
    """A thread that begins when another waits for it; where nobody does, when others are sure to be first."""

    def instead(self: Worker) -> None:
        self.__dict__.setdefault("asked", threading.Event()).wait(0.01 if nobody_waits else None)
        drive(self)

    return instead


def _asked(wait: Callable[[Worker], None]) -> Callable[[Worker], None]:
    def instead(self: Worker) -> None:
        self.__dict__.setdefault("asked", threading.Event()).set()
        wait(self)

    return instead


# ---- programs ----

SIZES = (20_000, 7, 5_000, 30_001)
SLOT_BYTES = 1 << 14
"""So small that every slot is used several times."""


def _params() -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, generator=random).bfloat16().cuda()) for n in SIZES]


def _grad(step: int, i: int) -> Tensor:
    """Made on the device, by work that is queued and late."""
    random = torch.Generator().manual_seed(100 * step + i)
    return torch.randn(SIZES[i], generator=random).bfloat16().cuda().mul_(2)


def _others_work(soon: bool = False) -> None:
    """Takes memory that was just given back, and writes to it: `soon`, before what other streams have still to do."""
    for n in (*SIZES, 1 << 11, 1 << 13, 1 << 15, 1 << 16):
        torch.empty(n, dtype=torch.bfloat16, device="cuda").fill_(7)
    if soon:
        torch.cuda.current_stream().synchronize()


def _outcome(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()  # before anything else waits for the device
    values = [t.cpu().clone() for state in states for t in state.values() if isinstance(t, Tensor)]
    return values + [p.detach().cpu() for p in params]


def _fused(params: list[torch.nn.Parameter]) -> FusedAdam:
    return FusedAdam(params, lr=0.1, master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")


def _offloaded(fraction: float, chunk: int = 60_000) -> list[Tensor]:
    params = _params()
    with mock.patch.object(host_share, "SLOT_BYTES", SLOT_BYTES):
        optimizer = CPUOffloadOptimizer(_fused(params), chunk, cpu_fraction=fraction)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = _grad(step, i)
            optimizer.step()
            _others_work()
    return _outcome(params, optimizer)


def _offloaded_gradients(fraction: float) -> list[Tensor]:
    params = _params()
    with (
        mock.patch.object(staging, "SLOT_BYTES", SLOT_BYTES),
        mock.patch.object(host_share, "SLOT_BYTES", SLOT_BYTES),
    ):
        optimizer = CPUOffloadOptimizer(_fused(params), 60_000, cpu_fraction=fraction, offload_gradients=True)
        for step in range(2):
            for micro_batch in range(3):
                grads = [_grad(10 * step + micro_batch, i) for i in range(len(params))]
                sum((p * g).sum().float() for p, g in zip(params, grads, strict=True)).backward()
                del grads
                _others_work(soon=True)
            optimizer.step()
            _others_work()
    return _outcome(params, optimizer)


def _few_gradients_held() -> list[Tensor]:
    with mock.patch.object(staging, "HELD_BYTES", 1 << 10):
        return _offloaded_gradients(0)


def _exported(make: Callable[[list[torch.nn.Parameter]], FusedAdam]) -> list[Tensor]:
    params = _params()
    optimizer = make(params)
    optimizer.state_dict_cpu_offload, optimizer.export_staging_bytes = True, 1 << 14
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = _grad(step, i)
        optimizer.step()
        _others_work()
        exported = optimizer.state_dict()
    with torch.cuda.stream(torch.cuda.Stream()):  # whoever loads on one stream and steps on another finds it loaded
        optimizer.load_state_dict(exported)
    _others_work()
    for i, p in enumerate(params):
        p.grad = _grad(7, i)
    optimizer.step()
    first = [t.clone() for state in exported["state"].values() for t in state.values() if isinstance(t, Tensor)]
    return first + _outcome(params, optimizer)


def _dropped() -> list[Tensor]:
    """Right after its step: stores are on their way to memory that goes with it."""
    params = _params()
    for i, p in enumerate(params):
        p.grad = _grad(0, i)
    CPUOffloadOptimizer(_fused(params), 60_000).step()
    return [p.detach().cpu() for p in params]


def _dropped_while_it_is_uploaded() -> list[Tensor]:
    params, arrived = _params(), []
    torch._C._host_emptyCache()  # so that the next export gets this one's blocks, and none that others have left
    optimizer = FusedAdam(params, lr=0.1, exp_avg_dtype="bf16", state_dict_cpu_offload=True)
    for step in range(6):
        for i, p in enumerate(params):
            p.grad = _grad(step, i)
        optimizer.step()
        exported = [t for state in optimizer.state_dict()["state"].values() for t in state.values()]
        # A copy of memory that is not pinned waits for the others; of one that begins where its block does torch knows.
        exported = [t for t in exported if t.is_pinned() and t.data_ptr() % 4096]
        with torch.cuda.stream(torch.cuda.Stream()):
            busy = torch.zeros(8, device="cuda")
            for _ in range(100):
                busy.add_(1)
            arrived += [t.to("cuda", non_blocking=True) for t in exported]
        del exported
    assert len(arrived) >= 3
    torch.cuda.synchronize()
    return [t.cpu() for t in arrived]


def _from_the_device(number: int) -> list[Tensor]:
    """As FSDP2 with CPUOffloadPolicy: they are copied to pinned memory, and nobody has waited."""
    grads = []
    for i, n in enumerate(SIZES):
        grads.append(torch.empty(n, dtype=torch.bfloat16, device="cpu", pin_memory=True))
        grads[-1].copy_(_grad(number, i), non_blocking=True)
    return grads


def _on_the_host() -> list[Tensor]:
    params = [torch.nn.Parameter(p.detach().cpu()) for p in _params()]
    optimizer = CPUOffloadOptimizer(_fused(params), offload_gradients=True, cpu_fraction=1)
    for step in range(2):
        for micro_batch in range(2):
            with_gradients(partial(_from_the_device, 10 * step + micro_batch), *params).backward()
        optimizer.step()
    return [p.detach().clone() for p in params]


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "streamed": lambda: _offloaded(0),
    "shared": lambda: _offloaded(0.5),
    "host alone": lambda: _offloaded(1),
    "gradients": lambda: _offloaded_gradients(0),
    "gradients shared": lambda: _offloaded_gradients(0.5),
    "few gradients held": _few_gradients_held,
    "dropped": _dropped,
    "dropped while it is uploaded": _dropped_while_it_is_uploaded,
    "parameters on the host": _on_the_host,
    "exported": lambda: _exported(_fused),
    "exported as it is": lambda: _exported(lambda params: FusedAdam(params, lr=0.1)),
}
