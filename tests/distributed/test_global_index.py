"""Where a share's elements are in the whole tensor: for each of them what torch's own cutting of 0, 1, 2, ... says."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statestream import kernels
from statestream.kernels import Formats
from statestream.kernels.rows import add_rows, runs_for
from statestream.tensors.global_index import WHOLE, IndexMap, Run, index_runs, one_run, runs_of
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .test_sharding import CASES, STRIDED, world

SHAPES = [(3, 5), (1, 16), (10, 4), (16, 8), (8, 16, 3), (7, 9), (24,), (4, 6, 8, 5)]


def indices(runs: tuple[Run, ...]) -> list[int]:
    """By the kernels' rule (IndexMap), one element after another."""
    found = []
    for first, numel, (size0, size1, stride0, stride1, stride2, offset) in runs:
        assert first == len(found), "runs are in order and leave nothing out"
        for x in range(first, first + numel):
            outer, middle, inner = x // size1 // size0, x // size1 % size0, x % size1
            found.append(offset + outer * stride0 + middle * stride1 + inner * stride2)
    return found


def in_memory(local: torch.Tensor) -> list[int]:
    return local.as_strided((local.numel(),), (1,), local.storage_offset()).tolist()


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


EVEN = [(16, 8), (8, 16, 3)]
"""Rows that divide: of others torch's cutting of two cuts is another one in version 2.9."""


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [*((*case, shape) for case in CASES for shape in SHAPES), *((*case, shape) for case in STRIDED for shape in EVEN)],
    ids=str,
)
def test_a_shards_runs_are_where_torch_cut_it(mesh_shape, placements, shape):
    if any(getattr(p, "dim", 0) >= len(shape) for p in placements):
        placements = tuple(Replicate() if getattr(p, "dim", 0) >= len(shape) else p for p in placements)
    for rank in range(torch.Size(mesh_shape).numel()):
        with world(rank, mesh_shape) as mesh:
            cut = distribute_tensor(counted(shape), mesh, placements, src_data_rank=None)
            assert indices(runs_of(cut)) == in_memory(cut.to_local())


def test_two_cuts_that_do_not_come_out_even_are_runs_of_rows():
    # By hand: tensor parallelism cuts 10 rows into 5 and 5, FSDP each of them into 3 and 2.
    rows = {(0, 0): [0, 1, 2], (0, 1): [5, 6, 7], (1, 0): [3, 4], (1, 1): [8, 9]}
    full = counted((10, 4))
    for (fsdp, tp), kept in rows.items():
        with world(2 * fsdp + tp, (2, 2)) as mesh:
            placements = STRIDED[0][1]
            local = full[kept]
            cut = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
            assert indices(runs_of(cut)) == in_memory(local)


@st.composite
def shares(draw):
    """A part of a tensor: some runs of indices of each dimension, laid out in memory in any order."""
    shape = draw(st.lists(st.integers(1, 6), max_size=5))
    part, ranges = counted(tuple(shape)), []
    for dim, size in enumerate(shape):
        edges = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=6)))
        edges = edges[: len(edges) // 2 * 2]
        ranges.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
        part = torch.cat([part.narrow(dim, begin, end - begin) for begin, end in ranges[-1]], dim)
    order = draw(st.permutations(range(len(shape))))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tuple(shape), tuple(ranges), part.permute(order).contiguous().permute(inverse)


@given(shares())
@settings(deadline=None, max_examples=400)
def test_any_ranges_in_any_layout(share):
    shape, ranges, local = share
    assert indices(index_runs(shape, ranges, tuple(local.stride()))) == in_memory(local)


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        (((8, 6), ((2, 4),), (0, 6)), 1),  # rows
        (((8, 6), ((0, 8),), (2, 4)), 1),  # columns
        (((8, 6), ((0, 2), (4, 6)), (2, 4)), 1),  # equal steps of rows, and columns: three levels
        (((8, 6), ((0, 2), (5, 6)), (0, 6)), 2),  # steps that differ
    ],
    ids=str,
)
def test_runs_are_as_few_as_can_be(case, runs):
    shape, rows, columns = case
    local = torch.empty(sum(b - a for a, b in rows), columns[1] - columns[0])
    assert len(index_runs(shape, (rows, (columns,)), tuple(local.stride()))) == runs


def test_a_plain_contiguous_tensor_is_the_whole_and_an_empty_one_nothing():
    assert runs_of(torch.empty(3, 4)) == (Run(0, 12, WHOLE),)
    assert runs_of(torch.empty(3, 0)) == ()


def test_channels_last_needs_no_more_than_three_levels():
    local = counted((4, 6, 8, 5)).to(memory_format=torch.channels_last)
    runs = runs_of(local)
    assert len(runs) == 1 and indices(runs) == in_memory(local)


def test_one_run_begins_where_the_first_does():
    runs = index_runs((9, 4), (((1, 3), (6, 7)), ((0, 4),)), (4, 1))
    assert one_run(runs) == Run(0, 12, IndexMap(offset=4))


def test_a_run_in_the_middle_that_begins_within_a_block_is_cut_nowhere():
    scaled = Formats(kernels.BFLOAT16, kernels.BFLOAT16, kernels.SCALED_FLOAT8, kernels.SCALED_FLOAT8, kernels.NONE)
    plain = Formats(*[kernels.BFLOAT16] * 4, kernels.NONE)
    runs = (Run(0, 100, WHOLE), Run(100, 156, WHOLE), Run(256, 44, WHOLE))
    assert runs_for(scaled, runs) == (one_run(runs),)
    assert runs_for(plain, runs) == runs


def test_rows_of_a_part_have_its_addresses_scales_and_place():
    """Elements 512..1100 of a local tensor that is cut at 768: by hand."""
    formats = Formats(kernels.BFLOAT16, kernels.FLOAT32, kernels.SCALED_FLOAT8, kernels.SCALED_FLOAT16, kernels.NONE)
    runs = (Run(0, 768, WHOLE), Run(768, 1024, IndexMap(offset=5000)))
    rows, extras = array("q"), array("q")
    row = (588, 10_000, 20_000, 30_000, 40_000, 0, 77, 0)
    add_rows(rows, extras, row, formats, ordinal=3, first=512, runs=runs, scales=(50_000, 60_000, 0))
    assert list(rows[:8]) == [256, 10_000, 20_000, 30_000, 40_000, 0, 77, 0]
    assert list(rows[8:]) == [332, 10_512, 21_024, 30_256, 40_512, 0, 77, 0]
    assert list(extras[:12]) == [50_000, 60_000, 0, 3, 512, *WHOLE, 0]
    assert list(extras[12:]) == [50_004, 60_004, 0, 3, 768, *IndexMap(offset=5000), 0]
