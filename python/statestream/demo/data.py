"""Text that every machine with Python has: the source of Python's standard library."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus"]

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_ENOUGH_BYTES = 4 * 2**20
_TOO_FEW_BYTES = 2**16


class Corpus:
    """Up to 4 MiB of source text, and batches of it that depend on nothing but the seed and the step."""

    def __init__(self, root: Path | None = None) -> None:
        """Reads the .py files below `root`, the standard library where none is given.

        Raises ValueError where there is hardly any text.
        """
        root = Path(sysconfig.get_path("stdlib")) if root is None else root
        text = bytearray()
        for path in _sources(root):
            try:
                text += path.read_bytes()
            except OSError:
                continue  # a file that this user may not read
            if len(text) >= _ENOUGH_BYTES:
                break
        if len(text) < _TOO_FEW_BYTES:
            raise ValueError(f"{root} holds {len(text)} bytes of Python source; the demo needs {_TOO_FEW_BYTES}")
        self.text = torch.frombuffer(text[:_ENOUGH_BYTES], dtype=torch.uint8)

    def batch(self, seed: int, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """`size` pieces of text and the byte that follows each of theirs: two int64 of (size, length)."""
        draw = random.Random(f"{seed} {step}")
        starts = [draw.randrange(self.text.numel() - length) for _ in range(size)]
        pieces = torch.stack([self.text[start : start + length + 1] for start in starts]).long()
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _NOT_LIBRARY)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)
