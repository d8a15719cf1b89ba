"""Whether FP32 masters round to the weights beside them. Where they do not, the weights were written after the masters:
a step of FusedAdam would begin with the weights."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from statestream.tensors.local import is_fake

__all__ = ["Agreement", "comparable"]

_HALVES = (torch.bfloat16, torch.float16)
_SLICE = 1 << 18
"""Elements that are compared at a time: what that takes is a few times their bytes."""


def comparable(master: torch.dtype, weight: torch.dtype) -> bool:
    """Whether a master is of numbers and its weight rounded from it."""
    return master.is_floating_point and weight in _HALVES


class Agreement:
    """Counts the elements that differ, over the parts of all parameters."""

    def __init__(self) -> None:
        self.compared = 0
        self.differing: dict[str, int] = {}

    def compare(self, label: str, master: Tensor | None, weight: Tensor | None) -> None:
        """Looks at a local master and the same part of its weight; at nothing where either is missing, or is not what
        the other could be made of."""
        if master is None or weight is None or not comparable(master.dtype, weight.dtype):
            return
        if master.shape != weight.shape or is_fake(master) or is_fake(weight):
            return
        for a, b in zip(_parts(master), _parts(weight), strict=True):
            a, b = a.to(dtype=torch.float32), b.to(device=a.device)
            differ = (a.to(b.dtype) != b) & ~(a.isnan() & b.isnan())
            self.compared += differ.numel()
            if count := int(differ.sum()):
                self.differing[label] = self.differing.get(label, 0) + count

    def warn(self, stacklevel: int = 3) -> None:
        """One RuntimeWarning where any differ."""
        if self.differing:
            label = next(iter(self.differing))
            warnings.warn(
                f"{sum(self.differing.values()):,} of {self.compared:,} masters do not round to their weights; of "
                f"{len(self.differing):,} parameters, {label} for one ({self.differing[label]:,}). The weights were "
                "written after the masters, or are others, such as an average. The masters are taken as they are; a "
                "step of FusedAdam, and a save, take the weights there: load model and optimizer and save again, or "
                "drop=['master_param'], to go on from the weights",
                RuntimeWarning,
                stacklevel=stacklevel,
            )


def _parts(tensor: Tensor) -> list[Tensor]:
    """Views of it along its longest dimension."""
    if tensor.numel() <= _SLICE:
        return [tensor]
    dim = max(range(tensor.dim()), key=tensor.size)
    half = tensor.size(dim) // 2
    return [*_parts(tensor.narrow(dim, 0, half)), *_parts(tensor.narrow(dim, half, tensor.size(dim) - half))]
