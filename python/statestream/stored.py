"""One state as it lies in memory, and its exact FP32 reading and writing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from statestream import kernels
from statestream.tensors import flat, local_of, same_layout

__all__ = ["SCALED", "Stored", "exported_dtype"]

SCALED = (torch.float16, torch.uint8)
"""Dtypes that hold payloads: FP16, and FP8 (E4M3) as bytes."""


def exported_dtype(stored: torch.dtype) -> torch.dtype:
    """Remainders are bits and leave as they are; every number leaves as FP32."""
    return stored if stored is torch.int16 else torch.float32


@dataclass(frozen=True)
class Stored:
    """`tensor` is as in the optimizer's state, perhaps a DTensor. Of a scaled one, `scale` holds the scales of its
    local blocks, and `root` says that it is a second moment's square root. Slices begin on block edges."""

    tensor: Tensor
    scale: Tensor | None = None
    root: bool = False

    @property
    def local(self) -> Tensor:
        return local_of(self.tensor)

    @property
    def exported(self) -> torch.dtype:
        return exported_dtype(self.tensor.dtype)

    @property
    def is_as_exported(self) -> bool:
        return self.tensor.dtype is self.exported

    def decode(self, out: Tensor, first: int = 0) -> None:
        """FP32 values of the elements from `first` on, in memory order, into the 1-D `out` on the same device."""
        part = flat(self.local)[first : first + out.numel()]
        kernels.decode(part, out, scale=self.scale, root=self.root, first=first)

    def encode(self, values: Tensor, first: int = 0) -> None:
        """Writes 1-D FP32 values, rounded to nearest, into the elements from `first` on."""
        part = flat(self.local)[first : first + values.numel()]
        kernels.encode(values, part, scale=self.scale, root=self.root, first=first)

    def values(self) -> Tensor:
        """The local values as exported: the live tensor where it is stored so, else a copy laid out as it is."""
        local = self.local
        if self.is_as_exported:
            return local
        out = torch.empty_like(local, dtype=torch.float32)
        if local.numel():
            self.decode(flat(out))
        return out

    def write(self, values: Tensor) -> None:
        """Sets the local values, given in any layout and real dtype; makes a copy of 4 bytes an element where they have
        to be encoded."""
        local = self.local
        if self.scale is None:
            local.copy_(values)
        elif local.numel():
            fp32 = torch.empty_like(local, dtype=torch.float32).copy_(values)
            self.encode(flat(fp32))

    def cloned(self) -> Stored:
        """A copy of the local state with its scales."""
        return Stored(self.local.clone(), None if self.scale is None else self.scale.clone(), self.root)

    def take_over(self, old: Stored) -> None:
        """Sets the local values to those of a state stored otherwise, or elsewhere."""
        if old.scale is None:
            self.write(old.local)
        elif self.scale is not None and self.local.dtype is old.local.dtype and same_layout(self.local, old.local):
            self.local.copy_(old.local)
            self.scale.copy_(old.scale)
        else:
            self.write(old.values())
