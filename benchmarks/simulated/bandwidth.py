"""A device without memory that keeps time: what a step would take at given bandwidths.

Copies take bytes over the link's rate, each queue apart; kernels bytes over the memory's rate, of the device or of the
host. An operation begins when its queue is free and its waits are over. Python's own time is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statestream.offload.host.arena import Bank
from statestream.offload.host.layout import Layout
from statestream.streaming import pipeline
from statestream.streaming.host_pipeline import HostShare, Passage
from statestream.streaming.plan import GRAIN_ELEMENTS, Piece, Unit, make_plan
from statestream.streaming.share import cut_at, device_units, host_chunks

LINK = 55e9  # bytes a second, each way: PCIe 5.0 x16 as measured by others
MEMORY = 4.0e12  # bytes a second of device memory
HOST_MEMORY = 100e9  # bytes a second of host memory
TRAFFIC = 2.5  # bytes that a kernel moves for each byte of state: state read and written, weight and gradient


@dataclass
class Clock:
    """Seconds at which each queue becomes free, and how long each was busy."""

    compute: float = 0.0
    load: float = 0.0
    store: float = 0.0
    down: float = 0.0
    up: float = 0.0


class TimedDevice:
    compute, load, store, down, up = "compute", "load", "store", "down", "up"

    def __init__(self, link: float = LINK, memory: float = MEMORY, host_memory: float = HOST_MEMORY):
        copies = dict.fromkeys(("load", "store", "down", "up"), link)
        self.rates = {**copies, "compute": memory / TRAFFIC, "host": host_memory / TRAFFIC}
        self.worker_at = 0.0
        self.free_at, self.busy = Clock(), Clock()
        self.spans: list[tuple[str, float, float]] = []
        self.live = self.peak = 0

    def allocate(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        self._nbytes = nbytes

    def free(self, block: None) -> None:
        self.live -= self._nbytes

    def record(self, queue: str) -> float:
        return getattr(self.free_at, queue)

    def wait(self, queue: str, event: float) -> None:
        setattr(self.free_at, queue, max(getattr(self.free_at, queue), event))

    def copy(self, queue, to, to_offset, source, offset, nbytes) -> None:
        self._work(queue, nbytes)

    def launch(self, nbytes: int) -> None:
        self._work("compute", nbytes)

    def start(self, flow) -> TimedDevice:
        for event in flow:
            self.worker_at = max(self.worker_at, event)
        return self

    def result(self) -> None:
        pass

    def update_on_host(self, nbytes: int) -> None:
        self.worker_at += nbytes / self.rates["host"]

    def _work(self, queue: str, nbytes: int) -> None:
        seconds, begin = nbytes / self.rates[queue], getattr(self.free_at, queue)
        if queue == "up":
            begin = max(begin, self.worker_at)  # whoever queues it has just made what goes up
        self.spans.append((queue, begin, begin + seconds))
        setattr(self.free_at, queue, begin + seconds)
        setattr(self.busy, queue, getattr(self.busy, queue) + seconds)


class _SizedArena:
    """An Arena's arithmetic without its memory."""

    block, kind = None, "state"

    def __init__(self, units: Sequence[Unit], kind: int):
        self._sizes = [unit.sizes[kind] for unit in units]
        self._grains = [unit.sizes[kind] // unit.grains for unit in units]
        self._offsets = [sum(self._sizes[:i]) for i in range(len(units))]

    def start(self, unit: int, grain: int) -> int:
        return self._offsets[unit] + grain * self._grains[unit]


class _Launches:
    def __init__(self, device: TimedDevice):
        self.device = device

    def step(self, stage, ring):
        self.device.launch(stage.chunk.nbytes)


class _HostLaunches:
    """The host's side for BF16 weights and gradients under FP32 masters: 2 bytes an element down, and 2 up."""

    def __init__(self, device: TimedDevice, units: Sequence[Unit]):
        self.device, self.units = device, units

    def down(self, chunk):
        return [Passage(None, 0, 0, 2 * GRAIN_ELEMENTS * (p.last - p.first)) for p, _ in chunk]

    up = down

    def step(self, chunk, slot):
        self.device.update_on_host(sum(_nbytes(self.units, piece) for piece, _ in chunk))


def _nbytes(units: Sequence[Unit], piece: Piece) -> int:
    return units[piece.unit].nbytes // units[piece.unit].grains * (piece.last - piece.first)


@dataclass(frozen=True)
class Timing:
    """Seconds. `fill` and `drain` are the first load and the last store; `bound` is what a step may take; `spans` are
    a queue's name, begin and end for each copy and each update."""

    total: float
    loads: float
    updates: float
    stores: float
    fill: float
    drain: float
    chunks: int
    peak_bytes: int
    spans: list[tuple[str, float, float]]

    @property
    def bound(self) -> float:
        return 1.05 * max(self.loads, self.updates, self.stores) + self.fill + self.drain


def adam_units(elements: Sequence[int], bytes_per_element: Sequence[int] = (2, 2, 4)) -> list[Unit]:
    """Parameters of so many elements, with BF16 moments and FP32 masters unless told otherwise."""
    units = []
    for n in elements:
        grains = max(1, -(-n // GRAIN_ELEMENTS))
        units.append(Unit(tuple(grains * GRAIN_ELEMENTS * b for b in bytes_per_element), grains))
    return units


def time_step(
    units: Sequence[Unit], budget: int | None, most_chunks: int = 32, link: float = LINK, memory: float = MEMORY
) -> Timing:
    """One step of the real plan, layout and stream."""
    plan = make_plan(units, budget, most_chunks=most_chunks)
    kinds = len(units[0].sizes)
    bank = Bank(0, units, [_SizedArena(units, kind) for kind in range(kinds)])
    layout = Layout(plan, units, [bank])
    device = TimedDevice(link, memory)
    pipeline.run(device, plan.ring_bytes, layout.stages(), _Launches(device))
    first, last = plan.chunks[0].nbytes, plan.chunks[-1].nbytes
    return Timing(
        total=max(device.free_at.compute, device.free_at.load, device.free_at.store),
        loads=device.busy.load,
        updates=device.busy.compute,
        stores=device.busy.store,
        fill=first / link,
        drain=last / link,
        chunks=len(plan.chunks),
        peak_bytes=device.peak,
        spans=device.spans,
    )


@dataclass(frozen=True)
class SharedTiming:
    """Bytes of state that each side updated, and seconds until it was done."""

    device_bytes: int
    device: float
    host_bytes: int
    host: float

    @property
    def total(self) -> float:
        return max(self.device, self.host)


def time_shared_step(units: Sequence[Unit], budget: int, fraction: float, **rates: float) -> SharedTiming:
    """One step of which the host does `fraction`, through three slots of 4 MiB."""
    cut = cut_at(units, fraction)
    plan = make_plan(device_units(units, cut), budget)
    layout = Layout(plan, units, [Bank(0, units, [_SizedArena(units, kind) for kind in range(len(units[0].sizes))])])
    chunks = host_chunks(units, cut, [4 * GRAIN_ELEMENTS] * len(units), 4 << 20)
    device = TimedDevice(**rates)
    host = HostShare(device, [None] * 3, chunks, _HostLaunches(device, units)) if chunks else None
    pipeline.run(device, plan.ring_bytes, layout.stages(), _Launches(device), host)
    return SharedTiming(
        sum(chunk.nbytes for chunk in plan.chunks),
        device.free_at.store,
        sum(_nbytes(units, piece) for chunk in chunks for piece, _ in chunk),
        device.free_at.up,
    )
