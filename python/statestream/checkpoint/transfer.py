"""State tensors to FP32 host memory and back, a slice at a time, through one small staging buffer.

A slice of a state on an accelerator is decoded into one half of the buffer while the other half is on its way
to the host; a load goes the other way. State that is stored as it is exported (FP32, remainders) needs no
staging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from statestream.device.guards import on_stream
from statestream.formats import SCALE_BLOCK
from statestream.state.stored import Stored
from statestream.tensors.local import flat, is_fake, same_layout

__all__ = ["LEAST_STAGING_BYTES", "Exporter", "Loader"]

_FP32_BYTES = 4
LEAST_STAGING_BYTES = 2 * SCALE_BLOCK * _FP32_BYTES
"""Two halves of one block: slices begin on the edges of the blocks that share a scale."""


COMPUTE, COPY = "compute", "copy"
"""The caller's queue of work, where kernels run, and the one that copies between device and host."""


class _AtOnce:
    """Queues for fake tensors and for tensors in host memory: there is nothing to overlap with."""

    def take(self, buffer: Tensor) -> None:
        pass

    def run(self, queue: str, work: Callable[[], object]) -> None:
        work()

    def record(self, queue: str) -> None:
        return None

    def wait(self, queue: str, event: None) -> None:
        pass

    def finish(self) -> None:
        pass


class _CudaQueues:
    """The current stream of a device, and one of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copier = torch.cuda.Stream(device)
        # Work that was queued before may still write the states that are copied, or read those that are written.
        self.copier.wait_stream(self._stream(COMPUTE))

    def take(self, buffer: Tensor) -> None:
        """Before `buffer`, which is new, is used: work that was queued before may still use its memory."""
        self.copier.wait_stream(self._stream(COMPUTE))

    def run(self, queue: str, work: Callable[[], object]) -> None:
        with on_stream(self._stream(queue)):
            work()

    def record(self, queue: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: str, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self._stream(queue).wait_event(event)

    def finish(self) -> None:
        self.copier.synchronize()
        self._stream(COMPUTE).synchronize()

    def _stream(self, queue: str) -> torch.cuda.Stream:
        return self.copier if queue == COPY else torch.cuda.current_stream(self.device)


def _queues_for(tensor: Tensor) -> _AtOnce | _CudaQueues:
    return _CudaQueues(tensor.device) if tensor.device.type == "cuda" and not is_fake(tensor) else _AtOnce()


def _queue_between(source: Tensor, target: Tensor) -> str:
    """Where a copy is queued: beside the kernels if it crosses between devices."""
    return COMPUTE if source.device == target.device else COPY


class _Staging:
    """Two halves of at most `nbytes` in all on one device, each free again after an event."""

    def __init__(self, device: torch.device, nbytes: int, queues: Any):
        self.half_elements = half = nbytes // 2 // _FP32_BYTES // SCALE_BLOCK * SCALE_BLOCK
        buffer = torch.empty(2 * half, dtype=torch.float32, device=device)
        self.halves = (buffer[:half], buffer[half:])
        self.nbytes = 2 * half * _FP32_BYTES
        self.free: list[Any] = [None, None]
        self.turn = 0
        self.queues = queues
        queues.take(buffer)

    def pass_through(
        self,
        n: int,
        fill: tuple[str, Callable[[int, int, Tensor], object]],
        empty: tuple[str, Callable[[int, int, Tensor], object]],
    ) -> None:
        """Fills a half with elements begin..end, then empties it, while the other half is at the other stage.

        Each stage is a queue and what to do there with (begin, end, the part of a half that holds them).
        """
        queues = self.queues
        for begin in range(0, n, self.half_elements):
            end = min(begin + self.half_elements, n)
            self.turn ^= 1
            half = self.halves[self.turn][: end - begin]
            queues.wait(fill[0], self.free[self.turn])
            queues.run(fill[0], partial(fill[1], begin, end, half))
            queues.wait(empty[0], queues.record(fill[0]))
            queues.run(empty[0], partial(empty[1], begin, end, half))
            self.free[self.turn] = queues.record(empty[0])


class _Transfer:
    """What export and load have in common: queues and staging for each device, and waiting for all of it, once."""

    def __init__(self, staging_bytes: int):
        self.staging_bytes = staging_bytes
        self._queues: dict[torch.device, Any] = {}
        self._stagings: dict[torch.device, _Staging] = {}
        self.staging_taken = 0
        """Bytes of device memory."""

    def queues(self, tensor: Tensor) -> Any:
        """Those of the tensor's device."""
        if tensor.device not in self._queues:
            self._queues[tensor.device] = _queues_for(tensor)
        return self._queues[tensor.device]

    def staging(self, tensor: Tensor) -> _Staging:
        """That of the tensor's device."""
        device = tensor.device
        if device not in self._stagings:
            self._stagings[device] = _Staging(device, self.staging_bytes, self.queues(tensor))
            self.staging_taken += self._stagings[device].nbytes
        return self._stagings[device]

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for all that was queued and frees the staging memory, after an error too."""
        for queues in self._queues.values():
            queues.finish()
        self._queues.clear()
        self._stagings.clear()


class Exporter(_Transfer):
    """Copies local states to host tensors, which are filled when the context is left.

    What is copied as it is has nothing to wait for but the work before the export: it goes to the copy queue at once,
    beside decodes of other states.
    """

    def copy(self, state: Stored, host: Tensor) -> None:
        """`host` has the state's layout, and dtype float32, or the state's own where that is how it is exported."""
        source, target = state.local, flat(host)
        if source.numel() == 0:
            return
        queue, queues = _queue_between(source, target), self.queues(source)
        if state.written is not None:
            state.decode(target)  # in host memory, of slices: the device has no memory for it
        elif source.dtype is target.dtype:
            queues.run(queue, lambda: target.copy_(flat(source), non_blocking=True))
        elif queue == COMPUTE:
            state.decode(target)
        else:
            self._through_staging(state, target)

    def _through_staging(self, state: Stored, target: Tensor) -> None:
        def decode(begin: int, end: int, half: Tensor) -> None:
            state.decode(half, begin)

        def send(begin: int, end: int, half: Tensor) -> None:
            target[begin:end].copy_(half, non_blocking=True)

        self.staging(state.local).pass_through(target.numel(), (COMPUTE, decode), (COPY, send))


class Loader(_Transfer):
    """Writes values into local states in place. The values must stay until the context is left."""

    def prepare(self, values: Tensor, state: Stored) -> None:
        """Takes the memory that `copy` of these will use."""
        local = state.local
        if local.numel() == 0:
            return
        converted = values.dtype is not local.dtype or state.scale is not None
        if converted and not self._is_encoded_at_once(values, state):
            self.staging(local)

    @staticmethod
    def _is_encoded_at_once(values: Tensor, state: Stored) -> bool:
        same_place = _queue_between(values, state.local) == COMPUTE and same_layout(values, state.local)
        return same_place and values.dtype is torch.float32

    def copy(self, values: Tensor, state: Stored) -> None:
        """`values` has the state's shape, any strides and device, and any real dtype (int16 for remainders)."""
        local = state.local
        if local.numel() == 0:
            return
        queues = self.queues(local)
        self.queues(values)  # a device that is read from is waited for as well
        if not same_layout(values, local):
            self._through_staging(_in_memory_order(values, local), state)
        elif values.dtype is local.dtype and state.scale is None:
            # The states' own memory: nothing of this load has to be done with it before.
            queues.run(_queue_between(values, local), lambda: flat(local).copy_(flat(values), non_blocking=True))
        elif self._is_encoded_at_once(values, state):
            state.encode(flat(values))
        else:
            self._through_staging(flat(values), state)

    def _through_staging(self, source: Tensor, state: Stored) -> None:
        """`source` holds the elements of the state, in its memory's order, in row-major order of its own shape."""
        target = flat(state.local)
        if source.dtype is target.dtype and state.scale is None:
            # Nothing to convert: no staging, and int16 could not go through FP32.
            most = self.staging_bytes // 2 // target.element_size()
            for begin in range(0, target.numel(), most):
                _gather(source, begin, target[begin : begin + most])
            return

        def fetch(begin: int, end: int, half: Tensor) -> None:
            _gather(source, begin, half)

        def encode(begin: int, end: int, half: Tensor) -> None:
            state.encode(half, begin)

        crosses = _queue_between(source, target)
        self.staging(target).pass_through(target.numel(), (crosses, fetch), (COMPUTE, encode))


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
