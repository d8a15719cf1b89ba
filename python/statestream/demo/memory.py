"""The peak of memory during a call, counted by torch's own allocators."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_extra_bytes"]

Result = TypeVar("Result")


def peak_extra_bytes(device: torch.device, call: Callable[[], Result]) -> tuple[Result, int]:
    """Runs `call`; returns its result and the most bytes that were allocated on `device` at any moment
    of it, beyond those allocated before. A result that stays on the device counts."""
    return _on_cuda(device, call) if device.type == "cuda" else _on_cpu(call)


def _on_cuda(device: torch.device, call: Callable[[], Result]) -> tuple[Result, int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def _on_cpu(call: Callable[[], Result]) -> tuple[Result, int]:
    # Every allocation and release of torch's CPU allocator, temporaries inside an operator included.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its start on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    allocated = peak = 0
    for change in changes:
        allocated += change["args"]["Bytes"]
        peak = max(peak, allocated)
    return result, peak
