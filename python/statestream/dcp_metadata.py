"""What the .metadata of a torch.distributed.checkpoint folder says, without running anything that is in it.

The file is a pickle, and unpickling runs what it names. Here every class in it stands for a record of what the file
says of its objects, so that a checkpoint from elsewhere can be looked at.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["METADATA", "classes_in", "tensors_in"]

METADATA = ".metadata"

_MOST = 2**63 - 1
"""torch keeps sizes in 64 bits."""


class _Record:
    """What a pickle says of one object: `args` it is made with, and its `state`."""

    def __new__(cls, *args: Any) -> _Record:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def __init__(self, stream: BinaryIO):
        super().__init__(stream)
        self.named: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.named.add((module, name))
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch":
            return name  # a dtype
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        return type(name, (_Record,), {})


def tensors_in(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype's name ("bfloat16") of each tensor by its key. ValueError for a file that is no such metadata."""
    with path.open("rb") as stream:
        try:
            entries = _Reader(stream).load().state["state_dict_metadata"]
            return {key: _tensor(entry) for key, entry in entries.items() if _is_tensor(entry)}
        except Exception as error:  # a damaged pickle may raise anything
            raise _no_metadata(path, error) from None


def classes_in(path: Path) -> set[tuple[str, str]]:
    """Module and name of everything that unpickling the file would call. ValueError for a file that is no pickle."""
    with path.open("rb") as stream:
        reader = _Reader(stream)
        try:
            reader.load()
        except Exception as error:
            raise _no_metadata(path, error) from None
    return reader.named


def _no_metadata(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{str(path)!r} is no metadata of torch.distributed.checkpoint ({type(error).__name__})")


def _is_tensor(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata"


def _tensor(entry: _Record) -> tuple[tuple[int, ...], str]:
    properties = entry.state["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    shape = tuple(entry.state["size"])
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MOST:
            raise ValueError(f"{size!r} is no size")
    return shape, str(dtype)
