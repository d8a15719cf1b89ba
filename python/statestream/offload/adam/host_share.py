"""The host's part in the steps of one optimizer: how large its share is, its slots, its threads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from statestream.offload.adam.host_step import AdamOnHost, grain_bytes
from statestream.offload.host.store import StateStore
from statestream.offload.host.threads import host_threads
from statestream.streaming.balance import Balance
from statestream.streaming.host_pipeline import SLOT_BYTES, SLOTS, HostShare, StepTimes
from statestream.streaming.plan import Piece
from statestream.streaming.share import fraction_of_all

__all__ = ["HostSide"]


class HostSide:
    """`cpu_fraction` and `cpu_threads` are CPUOffloadOptimizer's; `offloaded`: gradients are in host memory already.

    Host memory: SLOTS slots of SLOT_BYTES, of less where all parameters need less, none where they are on the CPU.
    """

    def __init__(self, store: StateStore, cpu_fraction: float | str, cpu_threads: int | None, offloaded: bool = False):
        self.store, self.threads = store, cpu_threads
        self._grain_bytes = partial(grain_bytes, offloaded=offloaded)
        self._fraction = cpu_fraction
        self._balance = Balance() if cpu_fraction == "auto" else None
        self._share, self._settled = 0.5, False
        """Of "auto" the share of all bytes, and whether it stays so."""
        self._slots: list[Tensor] = []
        self._timed: tuple[StepTimes, int, int] | None = None
        self._chunks: tuple[Any, list[Any]] | None = None
        self._grains: list[int] = []
        """Of each unit the bytes that a grain takes in a slot: they follow its parameter's dtype."""

    @property
    def staging_bytes(self) -> int:
        """Host memory that gradients and weights pass through."""
        return sum(slot.numel() for slot in self._slots)

    def prepare(self, device: Any, active: Collection[int] | None = None) -> None:
        """Before a step of the `active` units, or when parameters were added: what the last step taught is used, and
        slots are taken."""
        self._learn()
        fraction: Any = self._fraction
        if self._balance is not None:
            fraction = self._balanced(device, active)
        self.store.share(fraction)
        if fraction:
            grains = [self._grain_bytes(p) if p is not None else 0 for bank in self.store.banks for p in bank.units]
            if grains != self._grains:
                self._grains, self._chunks = grains, None
            if not device.host_reaches_parameters:
                self._take_slots(device)

    def _balanced(self, device: Any, active: Collection[int] | None) -> float:
        """The balance is between bytes that are stepped: a parameter that never has a gradient is on neither side."""
        if device.host_reaches_parameters:  # there is no other side
            return 1.0
        if active is not None and not self._settled:
            self._settled = self._balance.settled
            self._share = fraction_of_all(self.store.units, active, self._balance.fraction)
        return self._share

    def share_of(self, device: Any, flow: Any) -> HostShare | None:
        """The host's share of the step whose flow on the device is `flow`; None where it has none."""
        if not self.store.fraction:
            return None
        in_place = device.host_reaches_parameters
        chunks = [
            tuple((piece, at) for piece, at in chunk if piece.unit in flow.jobs) for chunk in self._all_chunks(in_place)
        ]
        chunks = [chunk for chunk in chunks if chunk]
        if not chunks:
            return None
        stepper = AdamOnHost(flow, host_threads(self.threads), in_place)
        timed = self._balance is not None and not self._balance.settled and not in_place
        return HostShare(device, () if in_place else self._slots, chunks, stepper, timed)

    def stepped(self, share: HostShare | None, active: Collection[int]) -> None:
        """A step of these units is done, on the host's side by `share`."""
        if share is None or share.times is None:
            return
        units = self.store.layout.units

        def nbytes(pieces: Iterable[Piece]) -> int:
            return sum(units[p.unit].nbytes // units[p.unit].grains * (p.last - p.first) for p in pieces)

        on_device = nbytes(p for chunk in self.store.plan.chunks for p in chunk.pieces if p.unit in active)
        self._timed = share.times, on_device, nbytes(p for chunk in share.chunks for p, _ in chunk)

    def _all_chunks(self, in_place: bool) -> list[Any]:
        layout = self.store.layout
        if self._chunks is None or self._chunks[0] is not layout:
            room = SLOT_BYTES if in_place else self._slots[0].numel()
            self._chunks = layout, self.store.host_chunks(self._grains, room)
        return self._chunks[1]

    def _take_slots(self, device: Any) -> None:
        needed = sum(g * unit.grains for g, unit in zip(self._grains, self.store.layout.units, strict=True))
        room = max(min(needed, SLOT_BYTES), max(self._grains, default=1))
        if not self._slots or self._slots[0].numel() < room:
            self._slots, self._chunks = [device.memory.block(room) for _ in range(SLOTS)], None

    def _learn(self) -> None:
        timed, self._timed = self._timed, None
        if timed is not None:
            times, on_device, on_host = timed
            device_seconds, host_seconds = times.seconds()
            self._balance.learn(on_device, device_seconds, on_host, host_seconds)
