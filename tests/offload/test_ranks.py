"""Plans are made from global shapes and the largest shard: every rank makes the same calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed.processes import run_claims
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload.host.store import largest_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from . import ranks_worker


@pytest.fixture
def fake_ranks():
    """One process as a given rank of several; collectives do nothing."""

    def become(rank, mesh_shape):
        if dist.is_initialized():
            dist.destroy_process_group()
        ranks = 1
        for size in mesh_shape:
            ranks *= size
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        return init_device_mesh("cpu", mesh_shape)

    yield become
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "largest"),
    [
        ((5, 1024), (4,), [Shard(0)], (2, 1024)),
        ((1, 16), (4,), [Shard(0)], (1, 16)),
        ((10, 4), (4,), [Shard(1)], (10, 1)),
        ((5, 7), (2, 2), [Shard(0), Shard(1)], (3, 4)),
        ((9, 8), (2, 2), [Shard(0), Shard(0)], (3, 8)),
        ((5, 8), (2, 2), [Replicate(), Shard(0)], (3, 8)),
    ],
)
def test_the_largest_shard_is_rounded_up(shape, mesh_shape, placements, largest, fake_ranks):
    mesh = fake_ranks(0, mesh_shape)
    tensor = distribute_tensor(torch.zeros(shape), mesh, placements)
    assert largest_shard(tensor) == largest
    assert tensor.to_local().shape == torch.Size(largest), "the first rank has the largest shard"


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.AdamW])
def test_every_rank_makes_the_same_plan(make, fake_ranks):
    plans, local_bytes = [], []
    for rank in range(4):
        mesh = fake_ranks(rank, (4,))
        params = [
            torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]))
            for shape in ((5, 1024), (1, 16), (64, 64), (13,), (10, 300))
        ]
        optimizer = CPUOffloadOptimizer(make(params), 50_000)
        plans.append(optimizer.strategy.store.plan)
        local_bytes.append(optimizer.host_state_bytes)
    assert all(plan == plans[0] for plan in plans)
    assert len(plans[0].chunks) > 2
    assert len(set(local_bytes)) > 1, "the control: shards differ, and host memory is that of the local shard"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_claims(2, ranks_worker.CLAIMS, tmp_path_factory.mktemp("ranks"), seconds=400)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("claim", ranks_worker.CLAIMS)
def test_on_two_ranks(claim, results):
    assert not results[claim], results[claim]


@pytest.mark.long  # half a minute
@pytest.mark.timeout(450)
@pytest.mark.parametrize("claims", [ranks_worker.OTHERS, ranks_worker.ONE_DTYPE], ids=["others", "of one dtype"])
def test_so_do_all_others(claims, tmp_path):
    results = run_claims(2, claims, tmp_path, seconds=400)
    assert not any(results.values()), results
