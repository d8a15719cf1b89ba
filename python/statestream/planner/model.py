"""A model as a plan sees it: names, shapes and dtypes of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from statestream.planner.quantities import MOST, BadOption

__all__ = ["Model", "Parameter", "model_of_size", "shape_of"]

MOST_LAYERS = 10_000
"""Each is planned by itself, several times."""


@dataclass(frozen=True)
class Parameter:
    """`dtype` is a name out of formats.WEIGHTS, or None where the source does not say. `itemsize` is given of a frozen
    one that is stored in no such way: bytes of an element."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    trained: bool = True
    itemsize: int | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Model:
    """`source` says where the shapes are from; `remarks` what they leave open, a sentence each."""

    source: str
    parameters: tuple[Parameter, ...]
    remarks: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)

    @property
    def dtype(self) -> str | None:
        """That of most elements."""
        counts: dict[str | None, int] = {}
        for p in self.parameters:
            counts[p.dtype] = counts.get(p.dtype, 0) + p.elements
        return max(counts, key=counts.__getitem__, default=None)


def shape_of(sizes: object) -> tuple[int, ...]:
    """A list of sizes, as files have it. ValueError for what is no shape."""
    if not isinstance(sizes, (list, tuple)):
        raise ValueError(f"{sizes!r} is no list of sizes")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MOST:
            raise ValueError(f"{size!r} is no size")
    return tuple(sizes)


def model_of_size(parameters: int, layers: int = 1, width: int = 1024) -> Model:
    """So many parameters in equal layers, one tensor each of rows of `width` elements, for want of shapes.

    The last tensor takes what does not divide.
    """
    if not 1 <= layers <= min(parameters, MOST_LAYERS):
        raise BadOption("layers", f"{layers} is out of range; use 1 to {min(parameters, MOST_LAYERS)}")
    rows = parameters // layers // width
    shape = (rows, width) if rows else (parameters // layers,)
    tensors: Sequence[Parameter] = [Parameter(f"layers.{i}", shape) for i in range(layers)]
    left = parameters - layers * prod(shape)
    rest = (Parameter("rest", (left,)),) if left else ()
    return Model("a number of parameters", (*tensors, *rest), ("Shapes are not known: equal layers are assumed.",))
