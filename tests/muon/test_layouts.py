"""Which parameters each layout takes together, by hand: four ranks, in one process."""

from __future__ import annotations

import pytest
import torch
from statestream.offload.muon.variants import muon_layout
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from .cases import STAND_INS
from .dion_common import Common

MATRIX, EXPERTS, CONVOLUTIONS = (16, 8), (4, 16, 8), (4, 4, 8, 8)
BF16 = torch.bfloat16
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()

BOTH = {
    "in batches of as many as there are ranks": ([(MATRIX, ROWS)] * 9, {}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),
    "of one shape": (
        [(MATRIX, ROWS), ((8, 16), ROWS), (MATRIX, ROWS), ((8, 16), ROWS)],
        {},
        [[0, 2], [1, 3]],
    ),
    "of one sharding": (
        [(MATRIX, ROWS), (MATRIX, COLUMNS), (MATRIX, ROWS), (MATRIX, WHOLE)],
        {},
        [[0, 2], [1], [3]],
    ),
    "of one dtype": (
        [(MATRIX, ROWS), (MATRIX, ROWS, BF16), (MATRIX, ROWS), (MATRIX, ROWS, BF16)],
        {},
        [[0, 2], [1, 3]],
    ),
    "experts that each rank has whole are alone": ([(EXPERTS, ROWS)] * 3, {}, [[0], [1], [2]]),
    "experts that are sharded within a matrix are not": ([(EXPERTS, COLUMNS)] * 3, {}, [[0, 1, 2]]),
    "nor those that every rank has": ([(EXPERTS, WHOLE)] * 3, {}, [[0, 1, 2]]),
    "nor those that are one matrix, flattened": ([(EXPERTS, ROWS)] * 3, {"flatten": True}, [[0, 1, 2]]),
    "either dimension before the matrix will do": ([(CONVOLUTIONS, COLUMNS)] * 2, {}, [[0], [1]]),
    "AdamW and Lion, one by one": ([(MATRIX, ROWS)] * 2, {"algorithm": "adamw"}, [[0], [1]]),
}
PACKED = [((64, 8), COLUMNS)] * 3
CASES = {
    **{(layout, what): case for layout in STAND_INS for what, case in BOTH.items()},
    ("batched", "heads fill batches"): (PACKED, {"num_heads": 2}, [[0, 0, 1, 1], [2, 2]]),
    ("batched", "blocks go by their shape"): (
        PACKED,
        {"split_sizes": (32, 16, 16)},
        [[0, 1, 2], [0, 0, 1, 1], [2, 2]],
    ),
    ("megabatched", "heads stay in their weight"): (PACKED, {"num_heads": 2}, [[0, 1, 2]]),
    ("megabatched", "blocks stay in their weight"): (PACKED, {"split_sizes": (32, 16, 16)}, [[0, 1, 2]]),
}


@pytest.mark.parametrize(("layout", "what"), CASES)
def test_parameters_are_taken_together(layout, what, fake_ranks):
    specs, options, batches = CASES[layout, what]
    mesh = fake_ranks(0, (4,))
    params = [
        Parameter(distribute_tensor(torch.zeros(shape, dtype=dtype[0] if dtype else None), mesh, [placement]))
        for shape, placement, *dtype in specs
    ]
    inner = STAND_INS[layout]([{"params": params, **options}], mesh)
    found = muon_layout(inner).batches(inner.param_groups[0], params)
    assert sorted(found) == sorted(batches)


def test_experts_that_are_sharded_both_ways_wait_for_the_other_ranks(fake_ranks):
    mesh = fake_ranks(0, (2, 2))
    params = [Parameter(distribute_tensor(torch.zeros(EXPERTS), mesh, [Shard(0), Shard(1)])) for _ in range(2)]
    inner = STAND_INS["batched"](params)
    inner._world_size = 2
    assert muon_layout(inner).batches(inner.param_groups[0], params) == [[0, 1]]


def test_a_mesh_dimension_of_one_rank_shards_nothing(fake_ranks):
    mesh = fake_ranks(0, (1, 2))
    params = [Parameter(distribute_tensor(torch.zeros(EXPERTS), mesh, [Shard(0), Shard(2)])) for _ in range(2)]
    inner = STAND_INS["batched"](params)
    inner._world_size = 2
    assert muon_layout(inner).batches(inner.param_groups[0], params) == [[0, 1]]


@pytest.mark.parametrize("attribute", ["_world_size", "_process_group", "_device_rank"])
def test_a_muon_without_dions_attributes_is_not_known(attribute):
    inner = STAND_INS["batched"]([Parameter(torch.zeros(MATRIX))])
    assert muon_layout(inner) is not None
    delattr(inner, attribute)
    assert muon_layout(inner) is None


@pytest.mark.parametrize("option", ["algorithm", "step"])
def test_a_muon_without_dions_options_in_every_group_is_not_known(option):
    inner = STAND_INS["megabatched"]([{"params": [Parameter(torch.zeros(MATRIX))]} for _ in range(2)])
    assert muon_layout(inner) is not None
    del inner.param_groups[1][option]
    assert muon_layout(inner) is None


def test_an_optimizer_of_another_name_or_without_tasks_is_not_known():
    params = [Parameter(torch.zeros(MATRIX))]
    assert muon_layout(type("NorMuon", (STAND_INS["batched"],), {})(params)) is None
    assert muon_layout(type("Muon", (Common,), {})(params)) is None
    assert muon_layout(type("Muon", (torch.optim.Muon,), {})(params)) is None
