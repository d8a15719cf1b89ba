"""Faults that the demo's comparison has to find: what shows that its "equal" means something."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

__all__ = ["CONTROLS", "DROP_MASTERS", "DROP_STEP", "FLIP_BIT", "drop_masters", "drop_steps", "flip_saved_bit"]

FLIP_BIT = "flip-bit"
DROP_STEP = "drop-step"
DROP_MASTERS = "drop-masters"
CONTROLS = (FLIP_BIT, DROP_STEP, DROP_MASTERS)

_FLIPPED = 1 << 21
"""The second bit of an FP32 mantissa. Every format of moments keeps it, so that loading does not round it away."""


def flip_saved_bit(path: Path, key: str) -> None:
    """Flips one bit of the largest element of the FP32 tensor `key` in a saved DCP checkpoint."""
    entries = dcp.FileSystemReader(path).read_metadata().storage_data
    place = next(info for index, info in entries.items() if index.fqn == key)
    with open(path / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        tensor = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
        largest = tensor.abs().argmax()
        tensor.view(torch.int32).view(-1)[largest] ^= _FLIPPED
        changed = io.BytesIO()
        torch.save(tensor, changed)
        if len(changed.getvalue()) != place.length:
            raise RuntimeError(f"{key} takes {len(changed.getvalue())} bytes instead of the {place.length} saved")
        file.seek(place.offset)
        file.write(changed.getvalue())


def drop_steps(optim: dict[str, Any]) -> None:
    """Sets every step counter of a flat state dict to that of a fresh optimizer."""
    for key, value in optim.items():
        if key.endswith(".step"):
            optim[key] = torch.zeros_like(value) if isinstance(value, Tensor) else 0


def drop_masters(optim: dict[str, Any]) -> None:
    """Takes the masters out of a flat state dict."""
    for key in [key for key in optim if key.endswith(".master_param")]:
        del optim[key]
