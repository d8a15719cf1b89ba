"""A CUDA device or stream made current for a while, with no context opened on any other device; calls beside captures.

`torch.cuda.stream` sets the former device back with `cudaSetDevice`, which opens a context there if there is none. A
thread that has chosen no device is on GPU 0: each rank's helper threads would take hundreds of MiB of that one.
`torch.cuda.device` is as torch's guards in C++ are: the former device is set back only where it has a context, and
torch remembers it in any case. Calls of the runtime that take no device open a context on the current one, too.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["beside_captures", "on_device", "on_stream", "wait_for", "wait_for_all_devices"]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a CUDA device current; does nothing for others, and for fake tensors where no CUDA is used."""
    used = torch.backends.cuda.is_built() and torch.cuda.is_initialized()
    return torch.cuda.device(device) if device.type == "cuda" and used else nullcontext()


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """As `torch.cuda.stream`."""
    with on_device(stream.device):  # to set the stream of the current device sets no device
        former = torch.cuda.current_stream(stream.device)
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(former)


def wait_for(event: torch.cuda.Event) -> None:
    """The host waits for a recorded event."""
    with on_device(event.device):
        event.synchronize()


def wait_for_all_devices() -> None:
    """The host waits for all work that was queued on the devices that this process uses."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if torch._C._cuda_hasPrimaryContext(index):
            torch.cuda.synchronize(index)


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: no call of this thread is taken for a mistake in a capture."""


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """For calls that have to do with no capture, wherever they are made from: a finaliser runs in the middle of
    whatever this thread does. While a graph is captured, here or in another thread, CUDA otherwise fails calls that
    wait or free memory, and the capture with them."""
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Callable[..., Any]:
    """The driver's, as torch has no function for it; one that does nothing where there is no such driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return lambda mode: None
