"""One small model, sharded in the ways that people train: FSDP2, HSDP, TP + FSDP2, expert meshes, submeshes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["LAYOUTS", "distributed", "plain", "share"]

# Over four ranks: rows that come out uneven, ranks left with nothing, rows that all divide, vectors.
_SHAPES = {"uneven": (10, 4), "few": (3, 5), "row": (1, 16), "even": (16, 8), "vector": (24,), "bias": (3,)}


class Weights(nn.Module):
    """Parameters of all shapes, and nothing that computes."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.w = nn.ParameterDict({name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in _SHAPES.items()})
        self.up = nn.Linear(8, 16, bias=False, dtype=dtype)
        self.down = nn.Linear(16, 8, bias=False, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(4, 6, 8).to(dtype))


def plain(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The model in one piece, with the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Weights(dtype)


def distributed(layout: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The same model, sharded over all ranks."""
    model = plain(dtype, seed)
    LAYOUTS[layout](model)
    return model


def share(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor, cut by torch: the judge of the product's own cutting."""
    if not isinstance(like, DTensor):
        return full
    cut = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return cut.to_local()


def _fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=_mesh(dist.get_world_size()))


def _hsdp(model: nn.Module) -> None:
    ranks = dist.get_world_size()
    shards = max(ranks // 2, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard")))


def _fsdp_columns(model: nn.Module) -> None:
    ranks = dist.get_world_size()

    def columns(param: nn.Parameter) -> Shard:
        # FSDP2 wants dimensions other than the first to divide.
        return Shard(1) if param.dim() > 1 and param.shape[1] % ranks == 0 else Shard(0)

    fully_shard(model, mesh=_mesh(ranks), shard_placement_fn=columns)


def _tp_fsdp(model: nn.Module) -> None:
    ranks = dist.get_world_size()
    tp = min(ranks, 2)
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def _experts(model: nn.Module) -> None:
    """Experts on a mesh of their own beside one of data parallelism, as expert parallelism has it."""
    ranks = dist.get_world_size()
    ep = max(ranks // 2, 1)
    mesh = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("dp", "ep"))
    experts = distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
    model.experts = nn.Parameter(experts)
    fully_shard(model, mesh=_mesh(ranks), ignored_params={model.experts})


def _left_out(model: nn.Module) -> None:
    """The experts on the first half of the ranks alone; every rank knows the parameter."""
    ranks = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(max(ranks // 2, 1))))
    experts = distribute_tensor(model.experts.detach(), mesh, [Shard(0)], src_data_rank=None)
    model.experts = nn.Parameter(experts)
    fully_shard(model, mesh=_mesh(ranks), ignored_params={model.experts})


def _mesh(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


LAYOUTS: dict[str, Callable[[nn.Module], None]] = {
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "columns": _fsdp_columns,
    "tp_fsdp": _tp_fsdp,
    "experts": _experts,
    "left_out": _left_out,
}
