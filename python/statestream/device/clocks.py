"""When a queue of a device has come to where it is now: `mark(queue)`, and `seconds(begin, end)` between two marks."""

from __future__ import annotations

import time
from typing import Any

import torch

from statestream.device.guards import wait_for

__all__ = ["CudaClock", "WallClock"]


class WallClock:
    """For a device that has done its work when a call returns."""

    def mark(self, queue: Any) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """By events that carry the time. `seconds` waits for the second of them."""

    def mark(self, queue: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(queue)
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        wait_for(end)
        return begin.elapsed_time(end) / 1e3
