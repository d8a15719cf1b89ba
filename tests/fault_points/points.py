"""Every point at which a call can fail: each operation of torch (allocations, copies, conversions), each native call,
each block of host memory, each user hook, counted in the order in which they come; the n-th raises."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from statestream import kernels
from statestream.device.host_memory import HostMemory
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Injected", "Points", "live_bytes", "points"]


class Injected(RuntimeError):
    """What a point raises: of the kind of torch's own errors for memory."""


class Points:
    """Counts points, and raises Injected at number `fail_at` (from 0), once; None: never."""

    def __init__(self, fail_at: int | None = None):
        self.fail_at, self.passed = fail_at, []

    def reached(self, what: str) -> None:
        self.passed.append(what)
        if len(self.passed) - 1 == self.fail_at:
            raise Injected(f"point {self.fail_at}: {what}")

    def hook(self, *_: Any) -> None:
        self.reached("hook")


class _Operations(TorchDispatchMode):
    def __init__(self, points: Points):
        super().__init__()
        self.points = points

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # A view takes no memory, moves nothing and cannot fail.
        if not func.is_view:
            self.points.reached(str(func))
        return func(*args, **(kwargs or {}))


class _Native:
    """The compiled module, each of its calls a point."""

    def __init__(self, module: Any, points: Points):
        self._module, self._points = module, points

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found) or name == "has_adam":
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._points.reached(f"native {name}")
            return found(*args, **kwargs)

        return call


@contextlib.contextmanager
def points(fail_at: int | None = None) -> Iterator[Points]:
    """Points inside the context are counted, and number `fail_at` raises."""
    found, block = Points(fail_at), HostMemory.block

    def counted(memory: HostMemory, nbytes: int) -> torch.Tensor:
        found.reached("host memory")
        return block(memory, nbytes)

    with (
        mock.patch.object(kernels, "_cpu", _Native(kernels._cpu, found)),
        mock.patch.object(HostMemory, "block", counted),
        _Operations(found),
    ):
        yield found


def live_bytes() -> int:
    """Bytes of memory that tensors hold which were made since the tests were collected (tests/conftest.py)."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def count(work: Callable[[], Any]) -> list[str]:
    """The points that `work` passes."""
    with points() as found:
        work()
    return found.passed
