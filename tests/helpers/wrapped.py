"""A parameter of the kind that torchao makes for float8 all-gathers: a tensor subclass without storage of its own,
around one dense tensor that holds its values.

What it shares with torchao's: every operation is done on the tensor inside; copies, views and empty tensors of its like
are of its class; a scale that is derived from the values lies beside, and saying so reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Wrapped", "wrapped_parameter"]

aten = torch.ops.aten
_OF_ITS_CLASS = {
    *(aten.detach.default, aten.empty_like.default, aten.copy_.default, aten.view.default, aten.slice.Tensor),
    *(aten.as_strided.default, aten._to_copy.default, aten.clone.default),
}


class Wrapped(Tensor):
    flattened = 0

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(
            cls, inside.size(), strides=inside.stride(), dtype=inside.dtype, device=inside.device
        )

    def __init__(self, inside: Tensor):
        self.inside = inside
        self._precomputed_scale: Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        Wrapped.flattened += 1
        return ["inside", *(["_precomputed_scale"] if self._precomputed_scale is not None else [])], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda x: x.inside, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, out) if func in _OF_ITS_CLASS else out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Wrapped({self.inside})"


def wrapped_parameter(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(Wrapped(values.clone()))
