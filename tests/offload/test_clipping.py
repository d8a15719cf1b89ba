"""The norm of gradients that are spread over ranks: on every rank that of the whole, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.thread_ranks import ThreadMesh, run_on_threads
from statestream.offload.gradients.clipping import global_norm
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

MESH = (2, 3)
PLACEMENTS = {
    "replicas of shards": (Replicate(), Shard(0)),
    "shards of replicas": (Shard(0), Replicate()),
    "both ways": (Shard(0), Shard(1)),
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
    "replicas": (Replicate(), Replicate()),
}


def part_of(number: int, placements, coordinate) -> torch.Tensor | None:
    """A rank's part: its bits hang on those coordinates alone along which ranks have different elements."""
    where = [c for c, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate()]
    seed = hash((number, *where)) % 2**31
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def whole(number: int, placements) -> list[torch.Tensor]:
    """All different parts."""
    coordinates = {
        tuple(c if not placement.is_replicate() else 0 for c, placement in zip(at, placements, strict=True)): at
        for at in ((a, b) for a in range(MESH[0]) for b in range(MESH[1]))
    }
    return [part_of(number, placements, at) for at in coordinates.values()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_every_rank_has_the_norm_of_the_whole(monkeypatch, norm_type):
    def norm(rank):
        mesh = ThreadMesh(MESH, rank)
        grads = [
            (SimpleNamespace(device_mesh=mesh, placements=placements), part_of(i, placements, mesh.get_coordinate()))
            for i, placements in enumerate(PLACEMENTS.values())
        ]
        return global_norm([*grads, (torch.empty(1), torch.full((7,), 0.5))], norm_type)

    parts = [part for i, placements in enumerate(PLACEMENTS.values()) for part in whole(i, placements)]
    wanted = torch.linalg.vector_norm(torch.cat([*parts, torch.full((7,), 0.5)]).double(), norm_type)
    for found in run_on_threads(monkeypatch, MESH[0] * MESH[1], norm):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_gradient_that_one_rank_has_counts_on_all(monkeypatch, norm_type):
    def norm(rank):
        param = SimpleNamespace(device_mesh=ThreadMesh((3,), rank), placements=(Shard(0),))
        none = SimpleNamespace(device_mesh=param.device_mesh, placements=(Shard(0),))
        empty = torch.empty(0) if rank == 2 else None
        return global_norm([(param, torch.tensor([3.0, -4.0]) if rank == 1 else empty), (none, None)], norm_type)

    wanted = 5.0 if norm_type == 2.0 else 4.0
    assert run_on_threads(monkeypatch, 3, norm) == [torch.tensor(wanted)] * 3


def test_no_gradient_is_a_norm_of_zero_and_a_bad_order_is_refused():
    assert global_norm([(torch.empty(1), None)], 2.0) == 0.0
    for order in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm_type"):
            global_norm([], order)
