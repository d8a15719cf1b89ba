"""Kernel rows with what they need beside addresses, cut where a shard's elements stop being in line."""

from __future__ import annotations

from array import array

import torch

from statestream import kernels
from statestream.formats import FORMATS, SCALE_BLOCK
from statestream.kernels import Formats
from statestream.tensors.global_index import Run, one_run

__all__ = ["add_rows", "runs_for"]

_ITEMSIZES = {kernels.NONE: 0, **{f.code: f.itemsize for f in FORMATS}}
"""Bytes of an element, by format code."""
_SCALE_BYTES = torch.float32.itemsize


def runs_for(formats: Formats, runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs that rows of these formats are cut at: rows of scaled state begin on block edges, so that where runs do
    not, there is one in their place."""
    if formats.has_scales and any(run.first % SCALE_BLOCK for run in runs):
        return (one_run(runs),)
    return runs


def add_rows(
    rows: array,
    extras: array,
    row: tuple[int, ...],
    formats: Formats,
    *,
    ordinal: int,
    first: int,
    runs: tuple[Run, ...],
    scales: tuple[int, int, int],
) -> None:
    """Adds `row`, elements `first` on of a local tensor, to `rows`, cut where `runs` end, and to `extras` one a row.

    `scales` are the addresses of the row's first scales of exp_avg, exp_avg_sq and master, 0 where there are none.
    """
    numel, *addresses, step, spare = row
    itemsizes = [_ITEMSIZES[code] for code in formats]
    for run in runs:
        begin, end = max(run.first, first), min(run.first + run.numel, first + numel)
        if begin >= end:
            continue
        moved = begin - first
        places = (a + moved * size if a else 0 for a, size in zip(addresses, itemsizes, strict=True))
        rows.extend((end - begin, *places, step, spare))
        blocks = moved // SCALE_BLOCK * _SCALE_BYTES
        extras.extend((*(s + blocks if s else 0 for s in scales), ordinal, begin, *run.index_map, 0))
