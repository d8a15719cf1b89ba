"""load(k+1), step(k), store(k-1): three queues joined by events. Knows nothing of Adam, or of tensors.

Why each wait is there, and there are no others:

* the load queue waits for the compute queue once, at the start: before that, the ring's memory belongs to
  whatever computed last, and the host state to the stores of the step before;
* load k waits for the store of the chunk that used the same bytes of the ring before (`Stage.after`);
* step k waits for load k, and store k for step k;
* at the end the compute queue waits for the last store: then the ring's memory may be used for anything.

The host never waits, unless it has a share of the step itself (host_pipeline.py): then for that. An error ends a step
at a clean edge: see `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from statestream.streaming.host_pipeline import HostShare

__all__ = ["Stage", "Stepper", "Transfer", "run"]

LOADS_AHEAD = 2
"""Chunks whose loads are queued before the step of the current one. One keeps the link busy; the second hides
the time that Python takes."""


@dataclass(frozen=True)
class Transfer:
    """One range of host memory and its place in the ring, in bytes. `stored`: whether it goes back, as state does."""

    host: Any
    host_offset: int
    ring_offset: int
    nbytes: int
    stored: bool = True


@dataclass(frozen=True)
class Stage:
    """One chunk's passage. `after` is the latest earlier stage whose bytes of the ring it overwrites, or -1."""

    transfers: Sequence[Transfer]
    after: int
    chunk: Any = None


class Stepper(Protocol):
    """What is done with a chunk on the device. A unit may be stepped in several stages, one piece in each."""

    def step(self, stage: Stage, ring: Any) -> None:
        """Launches the chunk's update on the compute queue."""

    def keeps(self, stage: Stage) -> bool:
        """After `step` raised: whether some of the chunk was updated, so that it has to be stored. If not, the
        chunk is as it was before, parameters included."""

    def begun(self, stage: Stage) -> bool:
        """Whether the stage holds the rest of a unit that was updated in part."""

    def finish(self, stage: Stage, ring: Any) -> None:
        """Launches the rest of units that were updated in part, and nothing else."""

    def torn(self, stages: Sequence[Stage], error: BaseException) -> None:
        """What was updated in these stages could not be stored or finished, for this second error."""


def run(device: Any, ring_bytes: int, stages: Sequence[Stage], stepper: Stepper, host: HostShare | None = None) -> Any:
    """Streams every stage through a ring of `ring_bytes`, while the host does its share, if it has one; returns the
    event of the last store.

    `device` is a seam of device/queues.py. An error anywhere is raised as it came. Before that, what was updated is
    stored, a unit that was updated in part is finished, and nothing else is begun: each unit is wholly before
    or wholly after its update. If the device refuses that too, `torn` of the steppers is told.
    """
    if not stages and host is None:
        return None
    ring = device.allocate(ring_bytes) if stages else None
    flow = _Flow(device, ring, stages, stepper, host)
    try:
        return flow.run()
    except BaseException:
        flow.settle()
        raise
    finally:
        if stages:
            device.free(ring)


class _Flow:
    def __init__(self, device: Any, ring: Any, stages: Sequence[Stage], stepper: Stepper, host: HostShare | None):
        self.device, self.ring, self.stages, self.stepper, self.host = device, ring, stages, stepper, host
        self.loaded: list[Any] = []
        self.stored: list[Any] = []
        self.begun = self.stepped = 0
        self.worker: Any = None

    def run(self) -> Any:
        device, ready = self.device, self.device.record(self.device.compute)
        if self.host is not None:
            self.host.mark("begin", device.compute)
            self.worker = device.start(self.host.run(ready))
        device.wait(device.load, ready)
        for k, stage in enumerate(self.stages):
            self._load_ahead(k)
            device.wait(device.compute, self.loaded[k])
            self.begun = k + 1
            self.stepper.step(stage, self.ring)
            self.stepped = k + 1
            device.wait(device.store, device.record(device.compute))
            self._copy_out(device.store, stage)
            self.stored.append(device.record(device.store))
        if self.host is not None:
            self.host.mark("device", device.store)
            self.worker.result()
            device.wait(device.compute, self.host.sent[-1])
        if not self.stages:
            return None
        device.wait(device.compute, self.stored[-1])
        return self.stored[-1]

    def _load_ahead(self, k: int) -> None:
        """Queues the loads up to a little after stage k whose place in the ring is free, or will be by a store
        that is queued already."""
        last = min(k + 1 + LOADS_AHEAD, len(self.stages))
        while len(self.loaded) < last and self.stages[len(self.loaded)].after < k:
            stage = self.stages[len(self.loaded)]
            if stage.after >= 0:
                self.device.wait(self.device.load, self.stored[stage.after])
            self._copy_in(self.device.load, stage)
            self.loaded.append(self.device.record(self.device.load))

    def settle(self) -> None:
        """After an error: stores what was updated and finishes what was updated in part, one thing at a time
        on the compute queue."""
        device, stages, stepper = self.device, self.stages, self.stepper
        k = len(self.stored)
        if self.worker is not None:
            self.worker.stop()
        try:
            device.drain()
            for k in range(len(self.stored), self.stepped):
                self._copy_out(device.compute, stages[k])
            k = self.stepped
            if self.begun > k and stepper.keeps(stages[k]):
                stepper.finish(stages[k], self.ring)
                self._copy_out(device.compute, stages[k])
                k += 1
            rest = range(k, len(stages))
            for k in rest:
                if stepper.begun(stages[k]):
                    self._copy_in(device.compute, stages[k])
                    stepper.finish(stages[k], self.ring)
                    self._copy_out(device.compute, stages[k])
            device.drain()
        except BaseException as error:
            stepper.torn(stages[k:], error)
        if self.host is not None:
            self.host.settle()

    def _copy_in(self, queue: Any, stage: Stage) -> None:
        for t in stage.transfers:
            self.device.copy(queue, self.ring, t.ring_offset, t.host, t.host_offset, t.nbytes)

    def _copy_out(self, queue: Any, stage: Stage) -> None:
        for t in stage.transfers:
            if t.stored:
                self.device.copy(queue, t.host, t.host_offset, self.ring, t.ring_offset, t.nbytes)
