"""Memory that a kernel may touch, and who touched it: bounds, alignment, races, unwritten bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Access", "Fault", "Memory", "Region"]


class Fault(Exception):
    """The kernel did something that hardware may answer with an error or with any value."""


_NONE, _SEVERAL = -1, -2


@dataclass(frozen=True)
class Access:
    """Who asks: global thread numbers, one a lane, all of one block between two of its barriers."""

    threads: np.ndarray
    block: int
    epoch: int
    read_only_path: bool = False
    """ld.global.nc: the value is undefined if any thread of the launch writes it."""


class Region:
    """Bytes at an address, with what this launch did to each of them.

    Two threads that touch a byte, one of them writing, race unless a barrier of their common block
    came between. A write with the value that is already there counts as a write.
    """

    def __init__(self, data: np.ndarray, base: int, name: str, *, writable: bool = True, written: bool = True):
        self.data = data.reshape(-1).view(np.uint8)
        self.base, self.end = base, base + self.data.size
        self.name, self.writable = name, writable
        self._written = None if written else np.zeros(self.data.size, bool)
        self.forget()

    def forget(self) -> None:
        """What earlier launches did is in order with what the next one does."""
        if not self.writable:
            return
        size = self.data.size
        self._writer = np.full(size, _NONE, np.int64)
        self._writer_block = np.full(size, _NONE, np.int64)
        self._writer_epoch = np.zeros(size, np.int64)
        self._reader = np.full(size, _NONE, np.int64)
        self._reader_block = np.full(size, _NONE, np.int64)
        self._reader_epoch = np.zeros(size, np.int64)

    def load(self, addresses: np.ndarray, width: int, by: Access) -> np.ndarray:
        """uint8 of shape (lanes, width); the caller has checked bounds and alignment."""
        start = (addresses - np.uint64(self.base)).astype(np.int64)
        if not self.writable:
            return self.data[start[:, None] + np.arange(width)]
        where, threads, _, back = _bytes(start, width, by.threads)
        if self._written is not None and not self._written[where].all():
            raise Fault(f"reads bytes of {self.name} that nothing wrote")
        self._check_order(where, threads, by, self._writer, self._writer_block, self._writer_epoch, "wrote")
        if by.read_only_path and (self._writer[where] != _NONE).any():
            raise Fault(f"race: the read-only path reads bytes of {self.name} that this launch wrote")
        self._note_read(where, threads, by)
        values = self.data[where].reshape(-1, width)
        return values if back is None else values[back]

    def store(self, addresses: np.ndarray, values: np.ndarray, by: Access) -> None:
        """values: uint8 of shape (lanes, width)."""
        if not self.writable:
            raise Fault(f"writes to {self.name}, which is read only")
        start = (addresses - np.uint64(self.base)).astype(np.int64)
        where, threads, first, _ = _bytes(start, values.shape[1], by.threads)
        if (threads == _SEVERAL).any():
            raise Fault(f"race: two threads write the same bytes of {self.name}")
        self._check_order(where, threads, by, self._writer, self._writer_block, self._writer_epoch, "wrote")
        self._check_order(where, threads, by, self._reader, self._reader_block, self._reader_epoch, "read")
        self.data[where] = (values if first is None else values[first]).reshape(-1)
        self._writer[where] = threads
        self._writer_block[where] = by.block
        self._writer_epoch[where] = by.epoch
        if self._written is not None:
            self._written[where] = True

    def _check_order(self, where, threads, by: Access, who, block, epoch, did: str) -> None:
        earlier = who[where]
        other = (earlier != _NONE) & (earlier != threads)
        if not other.any():
            return
        unordered = other & ((block[where] != by.block) | (epoch[where] == by.epoch))
        if unordered.any():
            at = int(np.flatnonzero(unordered)[0])
            byte = where.start + at if isinstance(where, slice) else int(where[at])
            raise Fault(
                f"race: byte {byte} of {self.name}, which another thread {did} with no barrier since, "
                f"is touched by thread {int(threads[at])}"
            )

    def _note_read(self, where, threads, by: Access) -> None:
        reader, block, epoch = self._reader[where], self._reader_block[where], self._reader_epoch[where]
        fresh = (reader == _NONE) | ((block == by.block) & (epoch < by.epoch))
        self._reader[where] = np.where(fresh | (reader == threads), threads, _SEVERAL)
        same_block = fresh | (block == by.block)
        self._reader_block[where] = _SEVERAL if by.read_only_path else np.where(same_block, by.block, _SEVERAL)
        self._reader_epoch[where] = by.epoch
        if by.read_only_path:
            self._reader[where] = _SEVERAL


class Memory:
    """Global memory: the regions that a launch may touch, and nothing else."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(
        self,
        data: np.ndarray,
        name: str,
        *,
        base: int | None = None,
        writable: bool = True,
        written: bool = True,
    ) -> int:
        """Maps a contiguous array, at its own address unless another is given; the address.

        written=False: to read a byte before the kernel wrote it is a fault.
        """
        base = data.ctypes.data if base is None else base
        region = Region(data, base, name, writable=writable, written=written)
        for other in self.regions:
            if region.base < other.end and other.base < region.end:
                raise ValueError(f"{name} overlaps {other.name}")
        if data.size:
            self.regions.append(region)
            self.regions.sort(key=lambda r: r.base)
        return base

    def begin_launch(self) -> None:
        for region in self.regions:
            region.forget()

    def load(self, addresses: np.ndarray, width: int, by: Access) -> np.ndarray:
        """uint8 of shape (lanes, width)."""
        values = np.empty((addresses.size, width), np.uint8)
        for region, lanes in self._find(addresses, width, by, "load"):
            values[lanes] = region.load(addresses[lanes], width, _of_lanes(by, lanes))
        return values

    def store(self, addresses: np.ndarray, values: np.ndarray, by: Access) -> None:
        for region, lanes in self._find(addresses, values.shape[1], by, "store"):
            region.store(addresses[lanes], values[lanes], _of_lanes(by, lanes))

    def _find(self, addresses: np.ndarray, width: int, by: Access, what: str):
        _check_alignment(addresses, width, by, what)
        bases = np.array([r.base for r in self.regions], np.uint64)
        index = np.searchsorted(bases, addresses, "right") - 1
        if (index == index[0]).all():
            groups = [(int(index[0]), slice(None))]
        else:
            groups = [(int(k), np.flatnonzero(index == k)) for k in np.unique(index)]
        for k, lanes in groups:
            region = self.regions[k] if k >= 0 else None
            end = np.uint64(region.end) if region else np.uint64(0)
            outside = addresses[lanes] > end - np.uint64(width) if end >= width else np.ones(1, bool)
            if outside.any():
                at = int(np.flatnonzero(outside)[0])
                address, thread = int(addresses[lanes][at]), int(by.threads[lanes][at])
                raise Fault(f"{width}-byte {what} out of bounds by thread {thread}: {self._describe(address)}")
            yield region, lanes

    def _describe(self, address: int) -> str:
        if not self.regions:
            return f"{address:#x}, and no memory is mapped"
        near = min(self.regions, key=lambda r: min(abs(address - r.base), abs(address - r.end)))
        return f"byte {address - near.base} of {near.name}, which has {near.end - near.base}"


def _bytes(start: np.ndarray, width: int, threads: np.ndarray):
    """The bytes that lanes touch, each once, in order; the thread of each byte, or _SEVERAL; the lane
    that each group of `width` bytes comes from; and the group of each lane. The last two are None
    where lanes and groups are the same. Accesses are aligned, so two that overlap are at one place.
    """
    if (np.diff(start) == width).all():  # neighbours, the usual case
        return slice(start[0], start[-1] + width), np.repeat(threads, width), None, None
    start, first, back, count = np.unique(start, return_index=True, return_inverse=True, return_counts=True)
    where = (start[:, None] + np.arange(width)).reshape(-1)
    return where, np.repeat(np.where(count > 1, _SEVERAL, threads[first]), width), first, back


def _check_alignment(addresses: np.ndarray, width: int, by: Access, what: str) -> None:
    """Hardware faults unless an access is aligned to all of its bytes, those of a vector together."""
    off = addresses % np.uint64(width) != 0
    if off.any():
        at = int(np.flatnonzero(off)[0])
        raise Fault(
            f"misaligned {width}-byte {what} by thread {int(by.threads[at])} at address {int(addresses[at]):#x}"
        )


def _of_lanes(by: Access, lanes) -> Access:
    if isinstance(lanes, slice):
        return by
    return Access(by.threads[lanes], by.block, by.epoch, by.read_only_path)
