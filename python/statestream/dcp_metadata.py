"""Shapes out of the .metadata of a torch.distributed.checkpoint folder, without running anything that is in it.

The file is a pickle, and unpickling runs what it names. Here every class in it stands for a record of what the file
says of its objects, so that a checkpoint from elsewhere can be looked at.
"""

from __future__ import annotations

import collections
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

from statestream.planner.formats import WEIGHTS, format_named
from statestream.planner.model import Model, Parameter, shape_of
from statestream.planner.quantities import BadOption

__all__ = ["METADATA", "classes_in", "model_of_checkpoint"]

METADATA = ".metadata"

_STATE = re.compile(r"(?:^|\.)state\.(?P<param>.+)\.[^.]+$")
"""Keys of an optimizer's state: "optim.state.layers.0.weight.exp_avg"."""


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


def model_of_checkpoint(path: Path) -> Model:
    """The weights in a checkpoint: its floating-point tensors that are no optimizer's state; where there are none, the
    parameters that its optimizer has state of. BadOption for a file that is no such metadata."""
    with path.open("rb") as stream:
        try:
            entries = _Reader(stream).load().state["state_dict_metadata"]
            tensors = {key: _tensor(entry) for key, entry in entries.items() if _is_tensor(entry)}
        except Exception as error:  # a damaged pickle may raise anything
            raise _no_metadata(path, error) from None
    weights = [
        Parameter(key, shape, _float_name(dtype))
        for key, (shape, dtype) in tensors.items()
        if not _STATE.search(key) and _float_name(dtype) and shape
    ]
    if weights:
        return Model(str(path.parent), tuple(weights))
    trained: dict[str, tuple[int, ...]] = {}
    for key, (shape, _) in tensors.items():
        match = _STATE.search(key)
        if match and shape:
            trained.setdefault(match["param"], shape)
    if not trained:
        raise BadOption("source", f"{str(path.parent)!r} holds neither weights nor the state of an optimizer")
    remark = "The checkpoint holds an optimizer's state alone: how its weights are stored is not known."
    return Model(str(path.parent), tuple(Parameter(n, s) for n, s in trained.items()), (remark,))


def classes_in(path: Path) -> set[tuple[str, str]]:
    """Module and name of everything that unpickling the file would call. BadOption for a file that is no pickle."""
    with path.open("rb") as stream:
        reader = _Reader(stream)
        try:
            reader.load()
        except Exception as error:
            raise _no_metadata(path, error) from None
    return reader.named


def _no_metadata(path: Path, error: Exception) -> BadOption:
    kind = type(error).__name__
    return BadOption("source", f"{str(path)!r} is no metadata of torch.distributed.checkpoint ({kind})")


def _is_tensor(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata"


def _tensor(entry: _Record) -> tuple[tuple[int, ...], str]:
    """Shape and name of the dtype."""
    properties = entry.state["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    return shape_of(entry.state["size"]), str(dtype)


def _float_name(dtype: str) -> str | None:
    try:
        return format_named("dtype", dtype, WEIGHTS).name if dtype != "uint8" else None
    except BadOption:
        return None
