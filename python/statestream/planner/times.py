"""Seconds of a step, an export and a save, at bandwidths that are given."""

from __future__ import annotations

from dataclasses import dataclass

from statestream.planner.estimate import Estimate
from statestream.planner.quantities import parse_rate

__all__ = ["Rates", "Times", "times"]


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of the link between host and device (each way), of device memory, of the disk for one rank."""

    link: int | None = None
    device: int | None = None
    disk: int | None = None

    @classmethod
    def checked(cls, link: str | None = None, device: str | None = None, disk: str | None = None) -> Rates:
        """BadOption, by the names that the command line gives them, for what is no bandwidth."""
        given = {"link": link, "device_bandwidth": device, "disk": disk}
        found = [None if text is None else parse_rate(name, text) for name, text in given.items()]
        return cls(*found)


@dataclass(frozen=True)
class Times:
    """Seconds; None where a bandwidth that it takes is not given."""

    step: float | None = None
    export: float | None = None
    save: float | None = None


def times(estimate: Estimate, rates: Rates, ranks: int) -> Times:
    """`ranks` write one checkpoint together. No time is counted for Python, launches and latencies."""
    save = None if rates.disk is None else estimate.on_disk / ranks / rates.disk
    return Times(_step(estimate, rates), _export(estimate, rates), save)


def _step(estimate: Estimate, rates: Rates) -> float | None:
    if not estimate.chunks:
        return None if rates.device is None else estimate.traffic / rates.device
    if rates.link is None:
        return None
    # Loads, updates and stores overlap: whichever takes longest, with the first chunk's stages before it and what is
    # left of the last one's after it. Without a bandwidth of device memory, far above a link's, it counts nothing.
    total, first, last = sum(estimate.chunks), estimate.chunks[0], estimate.chunks[-1]
    link = 1 / rates.link
    update = 0.0 if rates.device is None or not total else estimate.traffic / total / rates.device
    return max(first * link + total * update + last * link, first * (link + update) + total * link)


def _export(estimate: Estimate, rates: Rates) -> float | None:
    if estimate.host or not estimate.export.host:
        return None  # within host memory, or within the device's
    return None if rates.link is None else estimate.exported / rates.link
