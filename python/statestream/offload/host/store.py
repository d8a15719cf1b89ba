"""All host state of one optimizer: banks of arenas, and the plan that streams them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from statestream.offload.host.arena import Arena, Bank
from statestream.offload.host.layout import Layout
from statestream.streaming.plan import Piece, Plan, Unit, make_plan
from statestream.streaming.share import cut_at, device_units, host_chunks
from statestream.tensors.local import is_dtensor, local_of

__all__ = ["ARENA_BYTES", "Entry", "Location", "StateStore", "compact_copy", "largest_shard"]


ARENA_BYTES = 2 << 30
"""An arena is pinned at once. A system that refuses one has pinned those before it, and drivers refuse hundreds of GiB
at once that they take in parts. It is cut between units: CUDA refuses a copy of what lies in two pinned blocks, and a
program may copy any tensor of the state."""


@dataclass(frozen=True)
class Entry:
    """One parameter's demand: `unit` of the largest shard, and the bytes of each kind of its local shard.

    `unit` may have more sizes than there are kinds: room on the device without a place on the host.
    """

    param: Tensor
    unit: Unit
    local_sizes: tuple[int, ...]


@dataclass
class Location:
    """Where one parameter's state lies: the `index`-th unit of a bank."""

    param: Tensor
    bank: Bank
    index: int

    @property
    def unit(self) -> int:
        """Its index in the plan."""
        return self.bank.first + self.index

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes in each of the bank's arenas."""
        return tuple(arena.sizes[self.index] for arena in self.bank.arenas)


class StateStore:
    """Banks of host memory under one budget of device memory (bytes, or None: one pass)."""

    def __init__(self, memory: Any, budget: int | None):
        self.memory, self.budget = memory, budget
        self.fraction = 0.0
        self.banks: list[Bank] = []
        self.locations: dict[int, Location] = {}
        self._units: list[list[Unit]] = []
        self._layout: Layout | None = None
        make_plan((), budget)  # refuses a bad budget before any memory is taken

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(bank.nbytes for bank in self.banks)

    def share(self, fraction: float) -> None:
        """From the next step on the host updates `fraction` of the state itself."""
        if fraction != self.fraction:
            self.fraction, self._layout = fraction, None

    @property
    def units(self) -> list[Unit]:
        """All units, in the order of the plan."""
        return [replace(unit, bank=number) for number, bank in enumerate(self._units) for unit in bank]

    @property
    def layout(self) -> Layout:
        """How the device's share is streamed."""
        if self._layout is None:
            units = self.units
            shared = device_units(units, cut_at(units, self.fraction))
            self._layout = Layout(make_plan(shared, self.budget), units, self.banks)
        return self._layout

    def host_chunks(self, grain_bytes: Sequence[int], room: int) -> list[tuple[tuple[Piece, int], ...]]:
        """The host's share, in slots of `room` bytes of which a grain of each unit takes `grain_bytes`."""
        units = self.layout.units
        return host_chunks(units, cut_at(units, self.fraction), grain_bytes, room)

    @property
    def plan(self) -> Plan:
        return self.layout.plan

    def add(self, kinds: Sequence[str], entries: Sequence[Entry]) -> None:
        """Banks more, each with an arena for each kind. All of them or, after an error, none."""
        banks, first = [], sum(map(len, self._units))
        for run in _runs(kinds, entries):
            grains = [[e.unit.sizes[k] // e.unit.grains for e in run] for k in range(len(kinds))]
            arenas = [
                Arena(kind, [e.local_sizes[k] for e in run], grains[k], self.memory) for k, kind in enumerate(kinds)
            ]
            banks.append((Bank(first, [e.param for e in run], arenas), run))
            first += len(run)
        for bank, run in banks:
            self.banks.append(bank)
            self._units.append([e.unit for e in run])
            self.locations.update((id(e.param), Location(e.param, bank, index)) for index, e in enumerate(run))
        self._layout = None

    def location(self, param: Tensor) -> Location | None:
        location = self.locations.get(id(param))
        return location if location is not None and location.param is param else None

    def leave(self, param: Tensor) -> None:
        """The parameter's state is to lie elsewhere. Its unit stays in the plan as no one's: it is never stepped."""
        location = self.locations.pop(id(param), None)
        if location is not None:
            location.bank.units[location.index] = None

    def keep(self, params: Sequence[Tensor]) -> None:
        """Gives back the banks that hold state of none of these."""
        wanted = {id(param) for param in params}
        self.locations = {key: location for key, location in self.locations.items() if key in wanted}
        used = {id(location.bank) for location in self.locations.values()}
        if len(used) == len(self.banks):
            return
        kept = [(bank, units) for bank, units in zip(self.banks, self._units, strict=True) if id(bank) in used]
        self.banks = [bank for bank, _ in kept]
        self._units = [units for _, units in kept]
        first = 0
        for bank, units in kept:
            bank.first = first
            first += len(units)
        self._layout = None


def _runs(kinds: Sequence[str], entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    """Entries in runs, in order, of which no arena takes more than ARENA_BYTES, if it is of more than one unit. The
    largest shards decide, so that all ranks have the same banks."""
    runs: list[list[Entry]] = []
    held = [0] * len(kinds)
    for entry in entries:
        sizes = entry.unit.sizes[: len(kinds)]
        held = [a + b for a, b in zip(held, sizes, strict=True)]
        if not runs or (max(held, default=0) > ARENA_BYTES and not entry.unit.joined):
            runs.append([])
            held = list(sizes)
        runs[-1].append(entry)
    return runs


def largest_shard(param: Tensor) -> tuple[int, ...]:
    """The local shape on the rank that has most of a DTensor: every sharded dimension rounded up.

    [5, 1024] over 4 ranks is 2 rows, not 1.25. A plain tensor's own shape.
    """
    shape = list(param.shape)
    if is_dtensor(param):
        for mesh_dim, placement in enumerate(param.placements):
            dim = getattr(placement, "dim", None)  # also of _StridedShard, which is no Shard in some versions
            if dim is not None:
                shape[dim] = -(-shape[dim] // param.device_mesh.size(mesh_dim))
    return tuple(shape)


def compact_copy(value: Any) -> Any:
    """A copy of host state, containers included; a tensor's has memory of its own (a view would carry its whole
    arena into a file)."""
    if isinstance(value, Tensor):
        if not is_dtensor(value):
            return value.detach().clone()
        fresh = torch.empty_like(value, device="cpu")
        local_of(fresh).copy_(local_of(value))
        return fresh
    if isinstance(value, dict):
        return {k: compact_copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([compact_copy(v) for v in value])
    return value
