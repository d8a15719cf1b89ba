"""Where a local tensor's elements are in the whole one, so that random bits hang on the whole and not on its cutting.

An element's index is the one that it has in the whole tensor counted row by row. A kernel knows it by up to three
levels of (size, stride) (IndexMap); a share that needs more, or is ragged, is several runs of elements.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

from statestream.tensors.local import is_dtensor, local_of
from statestream.tensors.sharding import local_ranges

__all__ = ["WHOLE", "IndexMap", "Run", "index_runs", "one_run", "runs_of"]

Ranges = tuple[tuple[int, int], ...]


class IndexMap(NamedTuple):
    """Global indices of a local tensor's elements. Element x in memory order has the coordinates
    (x // size1 // size0, x // size1 % size0, x % size1), and the index
    offset + their products with (stride0, stride1, stride2). The sizes of levels that are not needed are 1.
    """

    size0: int = 1
    size1: int = 1
    stride0: int = 1
    stride1: int = 0
    stride2: int = 0
    offset: int = 0


WHOLE = IndexMap()
"""The local tensor is the whole one, laid out in the order of its indices."""


class Run(NamedTuple):
    """Elements [first, first + numel) of a local tensor in memory order, and the map of all of its elements that holds
    for these."""

    first: int
    numel: int
    index_map: IndexMap


class _Level(NamedTuple):
    """One loop over a local tensor's elements: the first indices of equal steps, or of `starts` of their own."""

    size: int
    stride: int
    starts: Ranges = ()
    """(begin, length) of runs along a dimension that do not step alike; their lengths add up to `size`."""


def runs_of(param: Tensor) -> tuple[Run, ...]:
    """The runs of a parameter's local tensor; none where it is empty."""
    local = local_of(param)
    if local.numel() == 0:
        return ()
    if not is_dtensor(param) and local.is_contiguous():
        return (Run(0, local.numel(), WHOLE),)
    ranges = tuple(tuple(found) for found in local_ranges(param))
    return index_runs(tuple(param.shape), ranges, tuple(local.stride()))


def one_run(runs: tuple[Run, ...]) -> Run:
    """One run in their place, which keeps apart what the first of them holds and goes on in order: for state whose
    blocks may not be cut where the runs are. Its bits hang on the sharding."""
    numel = sum(run.numel for run in runs)
    return Run(0, numel, IndexMap(offset=runs[0].index_map.offset if runs else 0))


@lru_cache(maxsize=16384)
def index_runs(shape: tuple[int, ...], ranges: tuple[Ranges, ...], strides: tuple[int, ...]) -> tuple[Run, ...]:
    """Runs of a dense local tensor with these strides, which holds the product of `ranges` of a tensor of `shape`."""
    whole = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    sizes = [sum(end - begin for begin, end in found) for found in ranges]
    if prod(sizes) == 0:
        return ()
    in_memory = sorted(range(len(shape)), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    offset, levels = 0, []
    for dim in in_memory:
        begin, of_dim = _levels_of(ranges[dim], whole[dim])
        offset += begin
        levels += of_dim
    return tuple(_expanded(_merged(levels), offset, 0))


def _levels_of(ranges: Ranges, stride: int) -> tuple[int, list[_Level]]:
    """Offset and loops of one dimension: its indices are `ranges` of the whole's."""
    first = ranges[0][0]
    lengths = {end - begin for begin, end in ranges}
    steps = {b[0] - a[0] for a, b in pairwise(ranges)}
    if len(ranges) == 1:
        return first * stride, [_Level(ranges[0][1] - first, stride)]
    if len(lengths) == 1 and len(steps) == 1:
        return first * stride, [_Level(len(ranges), steps.pop() * stride), _Level(lengths.pop(), stride)]
    starts = tuple((begin, end - begin) for begin, end in ranges)
    return 0, [_Level(sum(length for _, length in starts), stride, starts)]


def _merged(levels: list[_Level]) -> list[_Level]:
    """As few levels as say the same."""
    merged: list[_Level] = []
    for level in levels:
        if level.size == 1 and not level.starts:
            continue
        outer = merged[-1] if merged else None
        if outer is not None and not outer.starts and not level.starts and outer.stride == level.size * level.stride:
            merged[-1] = _Level(outer.size * level.size, level.stride)
        else:
            merged.append(level)
    return merged


def _expanded(levels: list[_Level], offset: int, first: int) -> list[Run]:
    """Runs from element `first` on, at `offset` in the whole tensor."""
    if len(levels) <= 3 and not any(level.starts for level in levels):
        return [_run(levels, offset, first)]
    outer, inner = levels[0], levels[1:]
    below = prod(level.size for level in inner)
    if outer.starts:
        before = (0, *accumulate(length for _, length in outer.starts))
        parts = [
            ([_Level(length, outer.stride), *inner], begin, done)
            for (begin, length), done in zip(outer.starts, before, strict=False)
        ]
    else:
        parts = [(inner, i, i) for i in range(outer.size)]
    runs: list[Run] = []
    for rest, index, done in parts:
        runs += _expanded(_merged(rest), offset + index * outer.stride, first + done * below)
    return runs


def _run(levels: list[_Level], offset: int, first: int) -> Run:
    numel = prod(level.size for level in levels)
    sizes = [level.size for level in levels]
    strides = [level.stride for level in levels]
    if len(levels) <= 1:
        stride = strides[0] if strides else 1
        return Run(first, numel, IndexMap(stride0=stride, offset=offset - first * stride))
    if len(levels) == 2:
        size0, size1 = 1, sizes[1]
        stride0, stride1, stride2 = strides[0], 0, strides[1]
    else:
        size0, size1 = sizes[1:]
        stride0, stride1, stride2 = strides
    # A kernel counts from the local tensor's first element: what lies before the run is taken off.
    before = first // (size0 * size1) * stride0
    return Run(first, numel, IndexMap(size0, size1, stride0, stride1, stride2, offset - before))
