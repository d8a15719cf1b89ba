"""How much more memory a piece of work needs at its peak than before it began."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["peak_extra_bytes"]


def peak_extra_bytes(work: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of the process's peak resident memory over those before, and what `work` returned (still alive).

    Sees native temporaries as well as tensors. Skips where the system cannot reset its peak counter.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory would serve the work unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except (OSError, AttributeError):
        pytest.skip("this system does not reset the peak of resident memory")
    before = _resident("VmRSS")
    result = work()
    return _resident("VmHWM") - before, result


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)
