"""How the state of a step is shared between the device and the host. Pure arithmetic: no tensors, no device.

The device takes the units from the first on, up to a cut, which may lie within a unit; the host takes the rest. State
itself stays where it is: the next step may be cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from statestream.streaming.plan import Piece, Unit

__all__ = ["Cut", "cut_at", "device_units", "fraction_of_all", "host_chunks"]


@dataclass(frozen=True)
class Cut:
    """The host's share begins at this grain of this unit."""

    unit: int
    grain: int


def cut_at(units: Sequence[Unit], fraction: float) -> Cut:
    """Where the host's share is `fraction` of the bytes, to within half a grain."""
    left = (1.0 - fraction) * sum(unit.nbytes for unit in units)
    for index, unit in enumerate(units):
        if left < unit.nbytes:
            grain = round(left / unit.nbytes * unit.grains)
            return Cut(index, grain) if grain < unit.grains else Cut(index + 1, 0)
        left -= unit.nbytes
    return Cut(len(units), 0)


def fraction_of_all(units: Sequence[Unit], active: Collection[int], fraction: float) -> float:
    """The share of all bytes at which the host has `fraction` of the bytes of the `active` units."""
    if len(active) == len(units):
        return fraction
    left = (1.0 - fraction) * sum(units[index].nbytes for index in active)
    before = 0
    for index, unit in enumerate(units):
        if index in active:
            if left < unit.nbytes:
                return 1.0 - (before + left) / sum(each.nbytes for each in units)
            left -= unit.nbytes
        before += unit.nbytes
    return 0.0


def device_units(units: Sequence[Unit], cut: Cut) -> list[Unit]:
    """The units, or the first grains of one, that are left to the device; their indices are those in `units`."""
    kept = list(units[: cut.unit])
    if cut.grain:
        unit = units[cut.unit]
        kept.append(replace(unit, grains=cut.grain, sizes=tuple(s // unit.grains * cut.grain for s in unit.sizes)))
    return kept


def host_chunks(
    units: Sequence[Unit], cut: Cut, grain_bytes: Sequence[int], room: int
) -> list[tuple[tuple[Piece, int], ...]]:
    """The host's share as chunks: pieces, each with its offset in a slot of `room` bytes.

    `grain_bytes` are the bytes that one grain of each unit takes in a slot. A single grain may take more than `room`;
    then it is a chunk by itself.
    """
    chunks: list[list[tuple[Piece, int]]] = []
    end = room
    for index in range(cut.unit, len(units)):
        at, grain = (cut.grain if index == cut.unit else 0), grain_bytes[index]
        while at < units[index].grains:
            if not chunks or (end + grain > room and end):
                chunks.append([])
                end = 0
            count = units[index].grains - at
            if grain:
                count = min(count, max((room - end) // grain, 1))
            chunks[-1].append((Piece(index, at, at + count), end))
            at, end = at + count, end + count * grain
    return [tuple(chunk) for chunk in chunks]
