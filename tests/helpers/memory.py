"""How much more memory a piece of work needs at its peak than before it began, by resident bytes of this process.

The system counts a peak of all resident pages, pages of files among them, and those it takes away and brings back as it
likes. A figure holds only where as many of them were there before the work as after it; else the work is measured anew.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["own_resident_bytes", "peak_extra_bytes", "settle"]

SLACK = 1 << 19
"""Bytes that may come or go beside the work."""
MEASUREMENTS = 8


def peak_extra_bytes(work: Callable[[], object]) -> int:
    """Bytes of the process's peak resident memory over those before, while `work` runs and what it returned lives.

    Sees native temporaries as well as tensors. `work` runs once or several times, and has to need the same each time.
    Skips where the system cannot reset its peak counter; RuntimeError where no measurement was undisturbed.
    """
    for _ in range(MEASUREMENTS):
        _start_the_peak_anew()  # first, to skip where nothing below is there either
        settle()
        before = _Resident.now()
        _start_the_peak_anew()
        result = work()
        peak = _status("VmHWM")
        del result
        settle()
        if _Resident.now().is_comparable_with(before):
            return peak - before.own - before.files
    raise RuntimeError(f"in each of {MEASUREMENTS} measurements resident pages were taken away, or freed by others")


def own_resident_bytes() -> int:
    """Resident bytes that are no file's: without swap, the system takes none of them away."""
    return _status("RssAnon") + _status("RssShmem")


def settle() -> None:
    """Gives freed memory back to the system: it would be taken for memory in use, or serve the work unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class _Resident:
    own: int
    files: int
    swapped: int

    @staticmethod
    def now() -> _Resident:
        return _Resident(own_resident_bytes(), _status("RssFile"), _status("VmSwap"))

    def is_comparable_with(self, before: _Resident) -> bool:
        # Memory of others that went during the work was counted before it, and hides as much of what the work took.
        return (
            abs(self.files - before.files) <= SLACK
            and self.swapped - before.swapped <= SLACK
            and before.own - self.own <= SLACK
        )


def _start_the_peak_anew() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not reset the peak of resident memory")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)
