"""statestream: Adam whose state is small, whose checkpoint export is bounded, and whose step streams."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statestream.adam.fused_adam import FusedAdam
    from statestream.memory import log_memory
    from statestream.offload import CPUOffloadOptimizer
    from statestream.offload.timeline import Timeline
    from statestream.planner.live import plan

__all__ = ["CPUOffloadOptimizer", "FusedAdam", "Timeline", "log_memory", "plan"]
__version__ = "0.1.0"

_HOMES = {
    "CPUOffloadOptimizer": "statestream.offload",
    "FusedAdam": "statestream.adam.fused_adam",
    "Timeline": "statestream.offload.timeline",
    "log_memory": "statestream.memory",
    "plan": "statestream.planner.live",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: the command line answers without loading torch, and can still speak where
    # the compiled module is missing.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
