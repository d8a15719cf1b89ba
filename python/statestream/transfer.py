"""State tensors to FP32 host memory and back, a slice at a time, through one small staging buffer.

A slice of a state on an accelerator is decoded into one half of the buffer while the other half is on its way
to the host; a load goes the other way. State that is stored as it is exported (FP32, remainders) needs no
staging.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from statestream import kernels
from statestream.tensors import flat, is_fake, same_layout

__all__ = ["LEAST_STAGING_BYTES", "Exporter", "Loader"]

_FP32_BYTES = 4
_BLOCK = 256
"""Elements of a scaled format's block: slices begin on its edges."""
LEAST_STAGING_BYTES = 2 * _BLOCK * _FP32_BYTES
"""Two halves of one block."""


class _Staging:
    """Two halves of at most `nbytes` in all on one device, and on CUDA the stream that copies.

    For fake tensors, and between tensors in host memory, there is nothing to overlap with, and no stream.
    """

    def __init__(self, device: torch.device, nbytes: int):
        half = nbytes // 2 // _FP32_BYTES // _BLOCK * _BLOCK
        self.half_elements = half
        self.buffer = torch.empty(2 * half, dtype=torch.float32, device=device)
        self.halves = (self.buffer[:half], self.buffer[half:])
        self.device = device
        self.turn = 0
        self.copier = None
        if device.type == "cuda" and not is_fake(self.buffer):
            self.copier = torch.cuda.Stream(device)
            self.free = (torch.cuda.Event(), torch.cuda.Event())
            self.full = torch.cuda.Event()
            # The buffer's memory may still be in use by work that was queued before.
            self.copier.wait_stream(torch.cuda.current_stream(device))

    def next_half(self, n: int) -> tuple[int, Tensor]:
        self.turn ^= 1
        return self.turn, self.halves[self.turn][:n]


class _Transfer:
    """What export and load have in common: staging for each device, and waiting for every copy, once."""

    def __init__(self, staging_bytes: int):
        self.staging_bytes = staging_bytes
        self._stagings: dict[torch.device, _Staging] = {}
        self._devices: set[torch.device] = set()

    def staging(self, device: torch.device) -> _Staging:
        if device not in self._stagings:
            self._stagings[device] = _Staging(device, self.staging_bytes)
        return self._stagings[device]

    def queued_on(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda" and not is_fake(tensor):
            self._devices.add(tensor.device)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the copies and frees the staging memory, after an error too."""
        for staging in self._stagings.values():
            if staging.copier is not None:
                staging.copier.synchronize()
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._stagings.clear()
        self._devices.clear()


class Exporter(_Transfer):
    """Copies local state tensors to host tensors, which are filled when the context is left."""

    def copy(self, state: Tensor, host: Tensor) -> None:
        """`host` has the state's layout, and dtype float32, or the state's own."""
        if state.numel() == 0:
            return
        source, target = flat(state), flat(host)
        self.queued_on(source)
        if source.dtype is target.dtype:
            target.copy_(source, non_blocking=True)
        elif source.device == target.device:
            kernels.decode(source, target)
        else:
            self._through_staging(source, target)

    def _through_staging(self, source: Tensor, target: Tensor) -> None:
        staging = self.staging(source.device)
        for begin, end in _slices(source.numel(), staging.half_elements):
            turn, half = staging.next_half(end - begin)
            if staging.copier is None:
                kernels.decode(source[begin:end], half)
                target[begin:end].copy_(half)
                continue
            stream = torch.cuda.current_stream(source.device)
            stream.wait_event(staging.free[turn])
            kernels.decode(source[begin:end], half)
            staging.full.record(stream)
            staging.copier.wait_event(staging.full)
            with torch.cuda.stream(staging.copier):
                target[begin:end].copy_(half, non_blocking=True)
            staging.free[turn].record(staging.copier)


class Loader(_Transfer):
    """Writes values into local state tensors in place. The values must stay until the context is left."""

    def copy(self, values: Tensor, state: Tensor) -> None:
        """`values` has the state's shape, any strides and device, and any real dtype (int16 for remainders)."""
        if state.numel() == 0:
            return
        target = flat(state)
        self.queued_on(target)
        self.queued_on(values)
        if not same_layout(values, state):
            self._through_staging(_in_memory_order(values, state), target)
        elif values.dtype is state.dtype:
            target.copy_(flat(values), non_blocking=True)
        elif values.device == state.device and values.dtype is torch.float32:
            kernels.encode(flat(values), target)
        else:
            self._through_staging(flat(values), target)

    def _through_staging(self, source: Tensor, target: Tensor) -> None:
        """`source` holds the elements of the flat `target` in row-major order of its own shape."""
        if source.dtype is target.dtype:
            # Nothing to convert: no staging, and int16 could not go through FP32.
            for begin, end in _slices(target.numel(), self.staging_bytes // 2 // target.element_size()):
                _gather(source, begin, target[begin:end])
            return
        staging = self.staging(target.device)
        for begin, end in _slices(target.numel(), staging.half_elements):
            turn, half = staging.next_half(end - begin)
            if staging.copier is None or source.device == target.device:
                _gather(source, begin, half)
                kernels.encode(half, target[begin:end])
                continue
            stream = torch.cuda.current_stream(target.device)
            staging.copier.wait_event(staging.free[turn])
            with torch.cuda.stream(staging.copier):
                _gather(source, begin, half)
            staging.full.record(staging.copier)
            stream.wait_event(staging.full)
            kernels.encode(half, target[begin:end])
            staging.free[turn].record(stream)


def _gather(source: Tensor, begin: int, out: Tensor) -> None:
    """Elements `begin`... of `source`, counted row by row, into the contiguous 1-D `out`.

    At most `out`'s bytes are allocated at a time, on the source's device, where dtypes or strides differ.
    """
    for part, size in _boxes(source, begin, begin + out.numel()):
        if part.device != out.device and part.dtype is not out.dtype:
            # First on its own device: a copy that crosses devices and changes dtype makes its temporary on either.
            part = part.to(out.dtype)
        out[:size].view(part.shape).copy_(part, non_blocking=True)
        out = out[size:]


def _boxes(source: Tensor, begin: int, end: int) -> Iterator[tuple[Tensor, int]]:
    """Elements begin..end of a tensor, counted row by row, as views of it and their counts: at most two a dimension
    and one more."""
    if begin == end:
        return
    if source.dim() <= 1:
        yield source.reshape(-1)[begin:end], end - begin
        return
    row = source[0].numel()
    first, last = -(-begin // row), end // row
    if first > last:  # all within one row
        yield from _boxes(source[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _boxes(source[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield source[first:last], (last - first) * row
    if last * row < end:
        yield from _boxes(source[last], 0, end - last * row)


def _in_memory_order(values: Tensor, state: Tensor) -> Tensor:
    """A view of `values` whose row-major order is the order of the dense `state`'s elements in memory."""
    order = sorted(range(state.dim()), key=lambda d: (state.stride(d), state.shape[d]), reverse=True)
    return values.permute(order)


def _slices(n: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, n, most):
        yield begin, min(begin + most, n)
