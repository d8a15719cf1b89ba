"""Gradients on their way from a device to the sums in host memory: through slots, added up by threads beside backward.

Why each wait is there, and there are no others:

* the down queue waits for the queue that made a gradient (the one current where it was taken). That comes after the
  last step, whose weights the gradient was made with: so do the copies, and the sums are not read any more;
* whoever adds a slot up waits for its copies;
* a slot is filled again when it was added up;
* all are added up before a second gradient of a parameter is taken: threads must not meet in a sum;
* whoever lets gradients go (`release`) waits for all copies.

A gradient's memory is kept until its copies are done. A small gradient may keep much: FSDP2's are views of one buffer,
which holds the gradients of all parameters that it reduces together. So what is kept is counted by storage. Before a
gradient of another storage is taken, and when backward ends, at most HELD_BYTES are kept on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from statestream.streaming.host_pipeline import SLOT_BYTES, SLOTS

__all__ = ["GradientStaging", "add_up"]

HELD_BYTES = SLOTS * SLOT_BYTES
"""Device memory that gradients on their way may keep, beside the storage that one is being taken from."""

_ALIGNMENT = 64

_BLOCK = 1 << 16
"""Elements, for each of torch's threads."""


def add_up(total: Tensor, grad: Tensor, first: bool) -> None:
    """The first gradient is the sum; others are added to it in FP32. Both are flat."""
    if first:
        total.copy_(grad)
        return
    # torch makes FP32 of all of another dtype before it adds: a block of it stays in the cache.
    block = max(grad.numel(), 1) if grad.dtype is total.dtype else _BLOCK * torch.get_num_threads()
    for begin in range(0, grad.numel(), block):
        total[begin : begin + block].add_(grad[begin : begin + block])


@dataclass(frozen=True)
class _Row:
    """Elements of one gradient in a slot, and their place in the sum."""

    total: Tensor
    staged: Tensor
    first: bool

    def add_part(self, part: int, parts: int) -> None:
        n = self.total.numel()
        begin, end = part * n // parts, (part + 1) * n // parts
        add_up(self.total[begin:end], self.staged[begin:end], self.first)


@dataclass
class _Slot:
    block: Tensor
    end: int = 0
    rows: list[_Row] = field(default_factory=list)
    params: set[int] = field(default_factory=set)
    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Memory on the device, by its identity, of gradients whose copies may not be done."""
    kept_bytes: int = 0
    workers: list[Any] = field(default_factory=list)

    def keep(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = storage
            self.kept_bytes += storage.nbytes()

    def release(self) -> None:
        self.kept.clear()
        self.kept_bytes = 0

    def empty(self) -> None:
        self.end = 0
        self.release()
        for held in (self.rows, self.params, self.workers):
            held.clear()


class GradientStaging:
    """`parts()` is the number of threads that add one slot up."""

    def __init__(self, parts: Callable[[], int]):
        self._parts = parts
        self._slots: list[_Slot] = []
        self._filling = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the slots."""
        return sum(slot.block.numel() for slot in self._slots)

    def prepare(self, device: Any, gradient_bytes: int) -> None:
        """Takes slots, for gradients of so many bytes in all: before any is taken, and when there are to be more."""
        room = max(min(-(-gradient_bytes // _ALIGNMENT) * _ALIGNMENT, SLOT_BYTES), _ALIGNMENT)
        if not self._slots or self._slots[0].block.numel() < room:
            self.finish(device)
            self._slots = [_Slot(device.memory.block(room)) for _ in range(SLOTS)]

    def take(self, device: Any, param: int, total: Tensor, grad: Tensor, first: bool) -> None:
        """Queues the way of a gradient into `total`, both flat. `param` tells parameters apart."""
        if any(param in slot.params for slot in self._slots):
            self.finish(device)
        storage = grad.untyped_storage()
        if all(storage._cdata not in slot.kept for slot in self._slots):
            self.release(device)
        device.wait(device.down, device.record(device.compute))
        at, size = 0, grad.element_size()
        while at < grad.numel():
            slot = self._slot_with_room(device)
            n = min(grad.numel() - at, (slot.block.numel() - slot.end) // size)
            slot.keep(storage)
            device.copy(device.down, slot.block, slot.end, grad.view(torch.uint8), at * size, n * size)
            staged = slot.block[slot.end : slot.end + n * size].view(grad.dtype)
            slot.rows.append(_Row(total[at : at + n], staged, first))
            slot.params.add(param)
            slot.end += -(-n * size // _ALIGNMENT) * _ALIGNMENT
            at += n

    def release(self, device: Any) -> None:
        """Where gradients keep more than HELD_BYTES of the device: waits for their copies, and lets them go."""
        if self.held_bytes > HELD_BYTES:
            device.synchronize(device.record(device.down))
            for slot in self._slots:
                slot.release()

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory that are kept, each storage once."""
        if (most := sum(slot.kept_bytes for slot in self._slots)) <= HELD_BYTES:
            return most  # not more than this: a storage that is in several slots was counted in each
        kept = {key: storage for slot in self._slots for key, storage in list(slot.kept.items())}
        return sum(storage.nbytes() for storage in kept.values())

    def finish(self, device: Any) -> None:
        """Waits until every gradient that was taken is in its sum; raises what kept one from it."""
        try:
            if self._slots:
                self._start(device, self._slots[self._filling])
            self._join(self._slots)
        except BaseException:
            with contextlib.suppress(Exception):
                device.drain()  # copies may be on their way out of gradients that are let go here
            with contextlib.suppress(Exception):
                self._join(self._slots)
            for slot in self._slots:
                slot.empty()
            raise

    def _slot_with_room(self, device: Any) -> _Slot:
        slot = self._slots[self._filling]
        if slot.end >= slot.block.numel():
            self._start(device, slot)
            self._filling = (self._filling + 1) % len(self._slots)
            slot = self._slots[self._filling]
            self._join([slot])
        return slot

    def _start(self, device: Any, slot: _Slot) -> None:
        if slot.rows and not slot.workers:
            arrived, parts = device.record(device.down), self._parts()
            for part in range(parts):
                slot.workers.append(device.start(_adding(slot, arrived, part, parts)))

    @staticmethod
    def _join(slots: Sequence[_Slot]) -> None:
        workers = [worker for slot in slots for worker in slot.workers]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            for worker in workers:  # every thread is joined, whatever one of them raises
                worker.stop()
            raise
        for slot in slots:
            slot.empty()


def _adding(slot: _Slot, arrived: Any, part: int, parts: int) -> Iterator[Any]:
    """The flow of one thread: its part of each row."""
    yield arrived
    slot.release()
    for row in slot.rows:
        row.add_part(part, parts)
        yield None
