"""Tensors whose memory is the disk's, for values that are made anew and written a moment later."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from statestream.convert.rules import How
from statestream.convert.values import dtype_of, values_of

__all__ = ["PART_ELEMENTS", "Scratch"]

PART_ELEMENTS = 1 << 18
"""Of a tensor, made at a time: what the making takes is a few times their bytes."""


class Scratch:
    """Makes tensors in files without names, of which the system writes back what does not fit in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.nbytes = 0
        self._left: list[tuple[Tensor, How, Tensor | None, Tensor | None]] = []

    def make(self, how: How, kept: Tensor | None, weight: Tensor | None) -> Tensor:
        """As `values_of`, but the values are there after `fill`. OSError where the disk has no room for them."""
        if how is How.KEPT:
            return kept
        like = kept if weight is None else weight
        laid_out = torch.empty_like(like, dtype=dtype_of(how, None), device="meta")
        out = torch.empty(0, dtype=laid_out.dtype, device="cpu")
        if laid_out.numel():
            out.set_(self._storage(laid_out.untyped_storage().nbytes()), 0, laid_out.size(), laid_out.stride())
        else:
            out = torch.empty(like.size(), dtype=laid_out.dtype, device="cpu")
        self.nbytes += out.nbytes
        self._left.append((out, how, kept, weight))
        return out

    def fill(self, progress: Callable[[int], object]) -> None:
        """`progress` is called with the bytes that have been made so far."""
        done = 0
        for out, how, kept, weight in self._left:
            done = _fill(out, how, kept, weight, done, progress)
        self._left.clear()

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        descriptor, name = tempfile.mkstemp(prefix=".statestream-", dir=self.folder)
        try:
            # Without room a write into the mapping would end the process.
            reserve = getattr(os, "posix_fallocate", None)
            os.ftruncate(descriptor, nbytes) if reserve is None else reserve(descriptor, 0, nbytes)
            return torch.UntypedStorage.from_file(name, shared=True, nbytes=nbytes)
        finally:
            os.close(descriptor)
            os.unlink(name)  # the mapping keeps it, and nothing is left of it however this process ends


def _fill(
    out: Tensor, how: How, kept: Tensor | None, weight: Tensor | None, done: int, progress: Callable[[int], object]
) -> int:
    if out.numel() > PART_ELEMENTS:
        dim = max(range(out.dim()), key=out.size)
        half = out.size(dim) // 2
        for start, length in ((0, half), (half, out.size(dim) - half)):
            parts = (None if t is None else t.narrow(dim, start, length) for t in (kept, weight))
            done = _fill(out.narrow(dim, start, length), how, *parts, done, progress)
        return done
    out.copy_(values_of(how, kept, weight))
    progress(done + out.nbytes)
    return done + out.nbytes
