"""One state as it lies in memory, and its exact FP32 reading and writing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from statestream import kernels
from statestream.formats import FORMATS, SCALE_BLOCK, format_of_state, scale_count
from statestream.tensors.local import flat, is_fake, local_of, same_layout
from statestream.tensors.quantized import is_quantized, rederive_master, rederived_master

__all__ = ["SCALED", "Stored"]

SCALED = tuple(f.dtype for f in FORMATS if f.scaled)
"""Dtypes of a moment or a master that hold payloads."""

_SLICE = 1 << 22
"""Elements of a master that are looked at together with their weights at a time: 16 MiB, whole blocks."""


@dataclass(frozen=True)
class Stored:
    """`tensor` is as in the optimizer's state, perhaps a DTensor. Of a scaled one, `scale` holds the scales of its
    local blocks, and `root` says that it is a second moment's square root. Slices begin on block edges.

    `written` is, of a master, the local weight if that was written since the last step, laid out as the master is.
    Reading then gives what the next step would make of the two; the master itself stays as it is."""

    tensor: Tensor
    scale: Tensor | None = None
    root: bool = False
    written: Tensor | None = None

    @property
    def local(self) -> Tensor:
        return local_of(self.tensor)

    @property
    def exported(self) -> torch.dtype:
        return format_of_state(self.tensor.dtype).exported

    @property
    def is_as_exported(self) -> bool:
        """Whether the tensor itself holds the values that leave. Waits for the device where a weight was written."""
        return self.tensor.dtype is self.exported and self._is_refreshed()

    def decode(self, out: Tensor, first: int = 0) -> None:
        """FP32 values of the elements from `first` on, in memory order, into the 1-D `out`: on the same device, unless
        the weight was written."""
        if self.written is None:
            part = flat(self.local)[first : first + out.numel()]
            kernels.decode(part, out, scale=self.scale, root=self.root, first=first)
        elif is_quantized(self.written):
            out.copy_(flat(rederived_master(self.written, self.local))[first : first + out.numel()])
        else:
            for begin in range(0, out.numel(), _SLICE):
                self._decode_refreshed(out[begin : begin + _SLICE], first + begin)

    def _decode_refreshed(self, out: Tensor, first: int) -> None:
        """As a step's refresh leaves a copy of the master: it begins by that, on the device of `out`."""
        end = first + out.numel()
        weight, part = flat(self.written)[first:end].to(out.device), flat(self.local)[first:end]
        if self.scale is None:
            out.copy_(part)
            kernels.refresh_master(weight, out)
            return
        blocks = slice(first // SCALE_BLOCK, first // SCALE_BLOCK + scale_count(out.numel()))
        payload, scale = part.to(out.device, copy=True), self.scale[blocks].to(out.device, copy=True)
        kernels.refresh_master(weight, payload, scale=scale)
        kernels.decode(payload, out, scale=scale)

    def _is_refreshed(self) -> bool:
        """Whether a step would leave an FP32 master as it is: its weight was not written, or is what it rounds to."""
        if self.written is None or not self.local.numel() or is_fake(self.local):
            return True
        if is_quantized(self.written):
            return _same_bits(rederived_master(self.written, self.local), self.local)
        master = flat(self.local)
        for begin in range(0, master.numel(), _SLICE):
            part = master[begin : begin + _SLICE]
            values = torch.empty_like(part)
            self.decode(values, begin)
            if not _same_bits(values, part):
                return False
        return True

    def encode(self, values: Tensor, first: int = 0) -> None:
        """Writes 1-D FP32 values, rounded to nearest, into the elements from `first` on."""
        part = flat(self.local)[first : first + values.numel()]
        kernels.encode(values, part, scale=self.scale, root=self.root, first=first)

    def values(self) -> Tensor:
        """The local values as exported: the live tensor where it holds them, else a copy laid out as it is."""
        return self.local if self.is_as_exported else self.decoded()

    def decoded(self) -> Tensor:
        """A copy of the local values in FP32, laid out as they are."""
        out = torch.empty_like(self.local, dtype=torch.float32)
        if out.numel():
            self.decode(flat(out))
        return out

    def refresh(self, weight: Tensor) -> None:
        """Brings a master back to its local weight, in place, where it does not round to it."""
        if is_quantized(weight):
            rederive_master(weight, self.local)
        elif weight.device == self.local.device:
            kernels.refresh_master(weight, self.local, scale=self.scale)
        else:
            values, master = flat(weight), flat(self.local)
            for begin in range(0, values.numel(), _SLICE):
                part, end = master[begin : begin + _SLICE], begin + _SLICE
                kernels.refresh_master(values[begin:end].to(part.device), part, scale=self.scale, first=begin)

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


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
