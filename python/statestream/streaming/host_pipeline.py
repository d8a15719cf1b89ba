"""The host's share of a step: gradients come down, the host updates, weights go up. Knows nothing of Adam.

Each chunk passes through a slot of host memory. The flow is a generator, so that whoever drives it decides when it
goes on: a thread (device/worker.py), or a schedule under test. It yields the event that it has to wait for, or None.

Why each wait is there, and there are no others:

* the down queue waits for the compute queue once, at the start: it makes the gradients, and reads the weights of the
  step before;
* the host waits for what comes down for chunk k before it updates it. So what goes up comes after all this as well;
* what comes down for a chunk waits for what went up from the same slot before. The host's update of that chunk comes
  after this, so it overwrites nothing that is still on its way;
* the compute queue waits for the last weights at the end (pipeline.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["SLOTS", "SLOT_BYTES", "HostShare", "HostStepper", "Passage", "StepTimes"]

SLOTS = 3
"""Of gradients that come down: one that is filled, one that the host works on, one that is emptied or arrives."""

SLOT_BYTES = 16 << 20
"""Large enough that neither a copy's fixed cost shows nor a thread's start, small enough that what was brought is still
in a cache."""


@dataclass(frozen=True)
class Passage:
    """A stretch of device memory, given as flat bytes, and its place in a slot; offsets in bytes."""

    outside: Any
    outside_offset: int
    slot_offset: int
    nbytes: int


@dataclass
class StepTimes:
    """When a step began, and when each side was done with it. It may outlive the step, and holds nothing of it."""

    clock: Any
    marks: dict[str, Any] = field(default_factory=dict)

    def seconds(self) -> tuple[float, float]:
        """Of a step that is over: how long the device took, and the host. Waits for both."""
        begin, seconds = self.marks["begin"], self.clock.seconds
        return seconds(begin, self.marks["device"]), seconds(begin, self.marks["host"])


class HostStepper(Protocol):
    """What is done with a chunk on the host."""

    def down(self, chunk: Any) -> Sequence[Passage]:
        """What the update of the chunk reads: of its pieces that were not updated yet."""

    def step(self, chunk: Any, slot: Any) -> None:
        """Updates the chunk, at once, on the calling thread."""

    def up(self, chunk: Any) -> Sequence[Passage]:
        """What updates of the chunk have written: of its pieces that were updated."""

    def begun(self, chunk: Any) -> bool:
        """Whether the chunk holds the rest of a unit that was updated in part, here or on the device."""

    def finish(self, chunk: Any, slot: Any) -> None:
        """Updates the rest of such units, and nothing else."""

    def torn(self, chunks: Sequence[Any], error: BaseException) -> None:
        """What was updated in these chunks could not be finished or sent, for this second error."""


class HostShare:
    """One step's flow over `chunks`, through `slots` (none where the host reads and writes the device's memory)."""

    def __init__(
        self, device: Any, slots: Sequence[Any], chunks: Sequence[Any], stepper: HostStepper, timed: bool = False
    ):
        self.device, self.slots, self.chunks, self.stepper = device, slots, chunks, stepper
        self.times = StepTimes(device.clock) if timed else None
        self.sent: list[Any] = []
        """Events after which the weights of each chunk are on the device."""

    def mark(self, what: str, queue: Any) -> None:
        """Of a timed step: "begin", or that the "device" or the "host" is done."""
        if self.times is not None:
            self.times.marks[what] = self.times.clock.mark(queue)

    def run(self, ready: Any) -> Iterator[Any]:
        """The flow; `ready` is an event of the compute queue."""
        device, ahead = self.device, max(len(self.slots), 1)
        device.wait(device.down, ready)
        here = [self._bring(k) for k in range(min(ahead, len(self.chunks)))]
        for k, chunk in enumerate(self.chunks):
            yield here[k]
            self.stepper.step(chunk, self._slot(k))
            self._send(device.up, k)
            self.sent.append(device.record(device.up))
            if k + ahead < len(self.chunks):
                device.wait(device.down, self.sent[k])
                here.append(self._bring(k + ahead))
        self.mark("host", device.up)

    def settle(self) -> None:
        """After an error, once the device is at rest: sends what was updated and finishes what was updated in part,
        one thing at a time on the compute queue."""
        device, stepper = self.device, self.stepper
        k = len(self.sent)
        try:
            for k in range(len(self.sent), len(self.chunks)):
                # What was updated is still in its slot: it goes first, before more comes down.
                self._send(device.compute, k)
                if stepper.begun(self.chunks[k]):
                    self._copy_down(device.compute, k)
                    device.drain()
                    stepper.finish(self.chunks[k], self._slot(k))
                    self._send(device.compute, k)
            device.drain()
        except BaseException as error:
            stepper.torn(self.chunks[k:], error)

    def _bring(self, k: int) -> Any:
        self._copy_down(self.device.down, k)
        return self.device.record(self.device.down)

    def _copy_down(self, queue: Any, k: int) -> None:
        for p in self.stepper.down(self.chunks[k]) if self.slots else ():
            self.device.copy(queue, self._slot(k), p.slot_offset, p.outside, p.outside_offset, p.nbytes)

    def _send(self, queue: Any, k: int) -> None:
        for p in self.stepper.up(self.chunks[k]) if self.slots else ():
            self.device.copy(queue, p.outside, p.outside_offset, self._slot(k), p.slot_offset, p.nbytes)

    def _slot(self, k: int) -> Any:
        return self.slots[k % len(self.slots)] if self.slots else None
