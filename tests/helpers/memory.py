"""How much more memory a piece of work needs at its peak than before it began, by resident bytes of this process.

The system counts a peak of all resident pages, pages of files among them, and those it takes away and brings back as it
likes. A figure holds only where as many of them were there before the work as after it, and another agrees with it;
else the work is measured anew.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    Two measurements have to agree: pages of files that come and go within one are in its peak, and nothing else shows
    them.
    Skips where the system cannot reset its peak counter; RuntimeError where no two were undisturbed and agreed.
    """
    figures: list[int] = []
    for _ in range(MEASUREMENTS):
        _start_the_peak_anew()  # first, to skip where nothing below is there either
        settle()
        with _free_resident_memory_held_back():
            before = _Resident.now()
            _start_the_peak_anew()
            result = work()
            peak = _status("VmHWM")
            del result
            settle()
            if _Resident.now().is_comparable_with(before):
                figure = peak - before.own - before.files
                if any(abs(figure - other) <= SLACK for other in figures):
                    return figure
                figures.append(figure)
    raise RuntimeError(
        f"in {MEASUREMENTS} measurements resident pages were taken away, or freed by others; what was left: {figures}"
    )


def own_resident_bytes() -> int:
    """Resident bytes that are no file's: without swap, the system takes none of them away."""
    return _status("RssAnon") + _status("RssShmem")


def settle() -> None:
    """Gives freed memory back to the system: it would be taken for memory in use, or serve the work unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _free_resident_memory_held_back() -> Iterator[None]:
    """What the C library keeps of freed memory whatever it is asked (the end of a thread's arena, for one) is allocated
    meanwhile: in the work's hands it would not be seen."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    held, passed = [], []
    for nbytes in (1 << shift for shift in range(25, 17, -1)):  # larger blocks are never kept
        for _ in range(16):
            if block := libc.malloc(nbytes):
                is_kept = _resident_pages(libc, block, nbytes) > nbytes // mmap.PAGESIZE // 4
                (held if is_kept else passed).append(block)
    for block in passed:
        libc.free(block)
    libc.malloc_trim(0)  # each of these has touched a page
    try:
        yield
    finally:
        for block in held:
            libc.free(block)


def _resident_pages(libc: ctypes.CDLL, address: int, nbytes: int) -> int:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (address + nbytes - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), found):
        return 0
    return sum(page & 1 for page in found)


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
