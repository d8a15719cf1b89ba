"""Host memory for state: one contiguous block a kind, in which every parameter's state is a view.

A *bank* holds the arenas of the parameters that were added together. Its units lie in plan order in each of
its arenas, so that a chunk is one range of each. Sizes here are those of the local shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from statestream.device.host_memory import HostMemory
from statestream.streaming.plan import Piece
from statestream.tensors.local import is_dense

__all__ = ["GRADS", "Arena", "Bank"]

GRADS = "grads"
"""The kind that a step reads and leaves alone: gradients that were offloaded in backward."""


class Arena:
    """One kind of state of a bank's units, in one block of host memory.

    `sizes` are the local bytes of each unit, padded to 256 elements, and 0 where a unit has no such state.
    `grains` are the bytes of one grain of each unit (streaming/plan.py); a piece past the local end is empty.
    """

    def __init__(self, kind: str, sizes: Sequence[int], grains: Sequence[int], memory: HostMemory):
        self.kind = kind
        self.sizes, self.grains = tuple(sizes), tuple(grains)
        self.offsets = (0, *accumulate(self.sizes))
        self.block = memory.block(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    def start(self, unit: int, grain: int) -> int:
        """Byte at which a unit's grain begins."""
        return self.offsets[unit] + min(grain * self.grains[unit], self.sizes[unit])

    def view(self, unit: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """A unit's state as a tensor with the shape of `like`, and its strides where it is dense.

        RuntimeError where the unit has less room than that: what follows it is another unit's."""
        if like.numel() == 0:  # of memory of its own: what it would be a view of may hold another dtype
            return torch.empty_like(like, dtype=dtype, device=self.block.device)
        begin, nbytes = self.offsets[unit], like.numel() * dtype.itemsize
        if nbytes > self.sizes[unit]:
            raise RuntimeError(
                f"{self.kind} of unit {unit}: {nbytes} bytes are wanted for {dtype} of shape {tuple(like.shape)}, and "
                f"its place has {self.sizes[unit]}"
            )
        values = self.block[begin : begin + nbytes].view(dtype)
        return values.as_strided(like.shape, like.stride()) if is_dense(like) else values.view(like.shape)


class Bank:
    """Arenas of units that were added together: `units[i]` has index `first + i` in the plan. It is the parameter, or
    None where that one's state lies elsewhere by now."""

    def __init__(self, first: int, units: Sequence[Any], arenas: Sequence[Arena]):
        self.first, self.units, self.arenas = first, list(units), tuple(arenas)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    def start(self, kind: int, piece: Piece) -> int:
        return self.arenas[kind].start(piece.unit - self.first, piece.first)

    def end(self, kind: int, piece: Piece) -> int:
        return self.arenas[kind].start(piece.unit - self.first, piece.last)
