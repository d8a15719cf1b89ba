"""What a program may have set up before it calls this package. To add a world, add an entry to WORLDS."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NOT_THERE", "WORLDS", "in_world"]

NOT_THERE = "xla"
"""A device of which no test machine has a backend: whatever is made there by default raises."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    """Memory that was not written is full of NaN, or of the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class PassesOn(TorchDispatchMode):
    """A user's own mode, as profilers and counters of operations are."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


class PassesFunctionsOn(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def modes_of_a_user() -> Iterator[None]:
    with PassesFunctionsOn(), PassesOn():
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's own remarks, on what users ask it for
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


WORLDS: dict[str, Callable[[], Any]] = {
    "default dtype bfloat16": partial(default_dtype, torch.bfloat16),
    "default dtype float16": partial(default_dtype, torch.float16),
    "default dtype float64": partial(default_dtype, torch.float64),
    "default device meta": partial(default_device, "meta"),
    "default device that is not there": partial(default_device, NOT_THERE),
    "deterministic, memory filled": deterministic,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "anomaly mode": partial(torch.autograd.set_detect_anomaly, True),
    "modes of a user's": modes_of_a_user,
    "no garbage collector": without_collector,
    "warnings are errors": warnings_are_errors,
    "a fresh thread": ExitStack,
}
"""Context managers in which a claim runs whole: building, stepping, saving. "a fresh thread" is one by itself."""


def in_world(name: str, claim: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the claim finds in that world."""
    if name != "a fresh thread":
        with WORLDS[name]():
            return claim()
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(claim()))
    thread.start()
    thread.join()
    return found[0]  # where the claim raised there is nothing, and the thread has printed why
