"""Units -> chunks under a byte budget. Pure arithmetic: no tensors, no device.

A *unit* is what can be stepped by itself; a *chunk* is a run of consecutive units, or parts of them, that
travels together. Each arena (kind of state) holds the units in this same order, so a chunk is one range of
each arena. All chunks share one block of device memory, the *ring*: the plan says where in it each chunk lies
and which earlier chunk must have left before its bytes may be overwritten.

Sizes here are those of the largest shard (strategy.py), never of the local one, so every rank makes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statestream.formats import SCALE_BLOCK

__all__ = ["GRAIN_ELEMENTS", "Chunk", "Piece", "Plan", "Unit", "make_plan", "padded_bytes"]

GRAIN_ELEMENTS = SCALE_BLOCK
"""Where a parameter may be cut: the block of a scaled format, and enough for any vector alignment."""

ALIGNMENT_BYTES = 256
"""Where a chunk may begin in the ring. Scales, which lie behind all else, are 4 bytes a grain."""

PHASES = 3
"""A ring holds a chunk that loads, one that steps and one that stores: with fewer, one of them waits."""

MOST_CHUNKS = 32
"""More would not shorten the fill and the drain by anything that shows."""

SMALL_CHUNK_BYTES = 16 << 20
"""Chunks are not made smaller than this for the sake of the fill: a copy's fixed cost would show."""


@dataclass(frozen=True)
class Unit:
    """One unit: `sizes` in bytes in each arena of its bank, padding included (0: it has no such state);
    `grains`, the number of equal parts that it may be cut into (1: it is stepped whole); `joined`, whether it can
    only be stepped in one chunk with the unit before it (neither is cut then)."""

    sizes: tuple[int, ...]
    grains: int = 1
    bank: int = 0
    joined: bool = False

    def __post_init__(self) -> None:
        if self.grains < 1 or any(size < 0 or size % self.grains for size in self.sizes):
            raise ValueError(f"sizes {self.sizes} do not divide into {self.grains} grains")
        if self.joined and self.grains > 1:
            raise ValueError(f"a joined unit is stepped whole; {self.grains} grains were given")

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Piece:
    """Grains [first, last) of one unit, by its index in the list that was planned."""

    unit: int
    first: int
    last: int


@dataclass(frozen=True)
class Chunk:
    """Pieces that travel together.

    `sizes` are its bytes in each arena, `offset` is its place in the ring in bytes, and `after` is the latest
    earlier chunk that used any of the same bytes (-1: none): its store comes before this chunk's load.
    """

    bank: int
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]
    offset: int
    after: int

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Plan:
    """`ring_bytes` is all the device memory that the chunks need; `oversize` are the units that alone, or with those
    joined to them, exceed the budget (each is a chunk by itself, and nothing else is on the device with it)."""

    chunks: tuple[Chunk, ...]
    ring_bytes: int
    oversize: tuple[int, ...]


def padded_bytes(numel: int, itemsize: int) -> int:
    """Bytes of `numel` elements up to the next 256-element boundary."""
    return -(-numel // GRAIN_ELEMENTS) * GRAIN_ELEMENTS * itemsize


def make_plan(units: Sequence[Unit], budget: int | None, *, most_chunks: int = MOST_CHUNKS) -> Plan:
    """Cuts units, in order, into chunks that together never hold more than `budget` bytes.

    None is one chunk a bank and room for all. A budget below the smallest piece means the smallest piece at a
    time. Units of one bank are consecutive; a chunk never spans banks. Every grain of every unit is in exactly
    one chunk. Chunks are no larger than `most_chunks` of them need, so a large budget is not used in full.
    """
    if budget is not None and (isinstance(budget, bool) or budget < 1):
        raise ValueError(f"step_chunk_bytes is {budget!r}; it must be a positive number of bytes, or None")
    _check_joined(units)
    total = sum(unit.nbytes for unit in units)
    if budget is None:
        return _place(_cut(units, total), units, total)
    third = budget // PHASES
    third = third // ALIGNMENT_BYTES * ALIGNMENT_BYTES or third  # or three would not find room beside each other
    target = min(third, max(-(-total // most_chunks), SMALL_CHUNK_BYTES))
    return _place(_cut(units, target), units, budget)


def _cut(units: Sequence[Unit], target: int) -> list[list[Piece]]:
    """Runs of pieces of at most `target` bytes, or of a single grain, or of units joined, where that is more."""
    runs: list[list[Piece]] = []
    room, bank = 0, None
    for index, unit in enumerate(units):
        if unit.joined:
            runs[-1].append(Piece(index, 0, 1))
            continue  # its room was taken with the first of them
        grain = _whole(units, index)
        at = 0
        while at < unit.grains:
            if unit.bank != bank or grain > room:
                runs.append([])
                room, bank = max(target, grain), unit.bank
            count = min(unit.grains - at, room // grain) if grain else unit.grains
            runs[-1].append(Piece(index, at, at + count))
            room -= count * grain
            at += count
    return runs


def _check_joined(units: Sequence[Unit]) -> None:
    for index, unit in enumerate(units):
        before = units[index - 1] if index else None
        if unit.joined and (before is None or before.bank != unit.bank or before.grains > 1):
            raise ValueError(f"unit {index} is joined to the one before it, which is cut, in another bank, or missing")


def _whole(units: Sequence[Unit], index: int) -> int:
    """Bytes of the smallest piece of a unit: a grain, or all of it and of what is joined to it."""
    nbytes = units[index].nbytes // units[index].grains
    while index + 1 < len(units) and units[index + 1].joined:
        index += 1
        nbytes += units[index].nbytes
    return nbytes


def _place(runs: list[list[Piece]], units: Sequence[Unit], budget: int) -> Plan:
    """Gives every run its place in the ring, first in first out, wrapping where the next would not fit."""
    sizes = [_sizes(run, units) for run in runs]
    room = min(budget, PHASES * _aligned(max(map(sum, sizes), default=0)))
    chunks: list[Chunk] = []
    end = 0
    for run, size in zip(runs, sizes, strict=True):
        nbytes = sum(size)
        offset = _aligned(end) if _aligned(end) + nbytes <= room else 0
        end = offset + nbytes
        after = next((k for k in range(len(chunks) - 1, -1, -1) if _overlaps(chunks[k], offset, end)), -1)
        chunks.append(Chunk(units[run[0].unit].bank, tuple(run), size, offset, after))
    ring = max((chunk.offset + chunk.nbytes for chunk in chunks), default=0)
    oversize = tuple(i for i, unit in enumerate(units) if not unit.joined and _whole(units, i) > budget)
    return Plan(tuple(chunks), ring, oversize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _sizes(run: list[Piece], units: Sequence[Unit]) -> tuple[int, ...]:
    kinds = len(units[run[0].unit].sizes)
    return tuple(
        sum(units[p.unit].sizes[i] // units[p.unit].grains * (p.last - p.first) for p in run) for i in range(kinds)
    )


def _overlaps(chunk: Chunk, start: int, end: int) -> bool:
    return chunk.offset < end and start < chunk.offset + chunk.nbytes
