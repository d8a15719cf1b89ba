"""A CUDA device or stream made current for a while, with no context opened on any other device.

`torch.cuda.stream` sets the former device back with `cudaSetDevice`, which opens a context there if there is none. A
thread that has chosen no device is on GPU 0: each rank's helper threads would take hundreds of MiB of that one.
`torch.cuda.device` is as torch's guards in C++ are: the former device is set back only where it has a context, and
torch remembers it in any case. Calls of the runtime that take no device open a context on the current one, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["on_device", "on_stream", "wait_for"]

on_device = torch.cuda.device


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
