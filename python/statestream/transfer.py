"""State tensors to FP32 host memory and back, a slice at a time, through one small staging buffer.

Every slice of a state on an accelerator is decoded into one half of the buffer while the other half is
on its way to the host. State that is stored as it is exported (FP32, remainders) needs no staging.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from statestream import kernels
from statestream.tensors import flat, is_fake, same_layout

__all__ = ["Exporter", "Loader"]

_FP32_BYTES = 4
_BLOCK = 256
"""Elements of a scaled format's block: slices begin on its edges."""


class _Staging:
    """Two halves of `nbytes` on one device, with the stream that copies and the events that join it.

    On the CPU and for fake tensors there is nothing to overlap with, and no stream.
    """

    def __init__(self, device: torch.device, nbytes: int):
        half = max(nbytes // 2 // _FP32_BYTES // _BLOCK, 1) * _BLOCK
        self.half_elements = half
        self.buffer = torch.empty(2 * half, dtype=torch.float32, device=device)
        self.halves = (self.buffer[:half], self.buffer[half:])
        self.turn = 0
        self.asynchronous = device.type == "cuda" and not is_fake(self.buffer)
        if self.asynchronous:
            self.copier = torch.cuda.Stream(device)
            self.copied = (torch.cuda.Event(), torch.cuda.Event())
            self.converted = torch.cuda.Event()

    def next_half(self, n: int) -> tuple[int, Tensor]:
        self.turn ^= 1
        return self.turn, self.halves[self.turn][:n]


class Exporter:
    """Copies local state tensors to host tensors; `finish` waits for all of them, once."""

    def __init__(self, staging_bytes: int):
        self.staging_bytes = staging_bytes
        self._staging: dict[torch.device, _Staging] = {}
        self._touched: set[torch.device] = set()

    def copy(self, state: Tensor, host: Tensor) -> None:
        """`host` has the state's layout, and dtype float32, or int16 for remainders."""
        if state.numel() == 0:
            return
        source, target = flat(state), flat(host)
        if source.device.type == "cpu":
            if source.dtype is target.dtype:
                target.copy_(source)
            else:
                kernels.decode(source, target)
            return
        self._touched.add(source.device)
        if source.dtype is target.dtype:
            target.copy_(source, non_blocking=True)
            return
        self._through_staging(source, target)

    def _through_staging(self, source: Tensor, target: Tensor) -> None:
        staging = self._staging.get(source.device)
        if staging is None:
            staging = self._staging[source.device] = _Staging(source.device, self.staging_bytes)
        for begin, end in _slices(source.numel(), staging.half_elements):
            turn, half = staging.next_half(end - begin)
            if not staging.asynchronous:
                kernels.decode(source[begin:end], half)
                target[begin:end].copy_(half)
                continue
            stream = torch.cuda.current_stream(source.device)
            stream.wait_event(staging.copied[turn])
            kernels.decode(source[begin:end], half)
            staging.converted.record(stream)
            staging.copier.wait_event(staging.converted)
            with torch.cuda.stream(staging.copier):
                target[begin:end].copy_(half, non_blocking=True)
            staging.copied[turn].record(staging.copier)

    def finish(self) -> None:
        """Waits for the copies and frees the staging memory."""
        for staging in self._staging.values():
            if staging.asynchronous:
                staging.copier.synchronize()
        for device in self._touched:
            if device.type == "cuda" and torch.cuda.is_available():
                torch.cuda.current_stream(device).synchronize()
        self._staging.clear()
        self._touched.clear()


class Loader:
    """Writes values into local state tensors in place."""

    def __init__(self, staging_bytes: int):
        self.staging_bytes = staging_bytes
        self._staging: dict[torch.device, Tensor] = {}

    def copy(self, values: Tensor, state: Tensor) -> None:
        """`values` has the state's shape, any layout and device, and any real dtype (int16 for remainders)."""
        if state.numel() == 0:
            return
        if not same_layout(values, state):
            values = torch.empty_like(state, dtype=values.dtype, device=values.device).copy_(values)
        source, target = flat(values), flat(state)
        if source.dtype is target.dtype:
            target.copy_(source)
        elif source.device == target.device and source.dtype is torch.float32:
            kernels.encode(source, target)
        else:
            staging = self._buffer(target.device)
            for begin, end in _slices(source.numel(), staging.numel()):
                # By way of the source's device: a copy that also changes dtype makes a temporary of its own.
                part = source[begin:end].to(torch.float32)
                staged = staging[: end - begin].copy_(part)
                kernels.encode(staged, target[begin:end])

    def _buffer(self, device: torch.device) -> Tensor:
        if device not in self._staging:
            n = max(self.staging_bytes // _FP32_BYTES // _BLOCK, 1) * _BLOCK
            self._staging[device] = torch.empty(n, dtype=torch.float32, device=device)
        return self._staging[device]


def _slices(n: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, n, most):
        yield begin, min(begin + most, n)
