"""The norm of all gradients, where they are in host memory and the parameters over several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from statestream.tensors.local import is_dtensor

__all__ = ["global_norm"]


def global_norm(grads: Sequence[tuple[Tensor, Tensor | None]], norm_type: float) -> Tensor:
    """The `norm_type`-norm of the gradients seen as one vector, a float32 scalar on the CPU, the same on every rank.

    `grads` are pairs of a parameter and this rank's float32 part of its gradient, in host memory, or None where it has
    none. It is the norm of the gradients' norms, as torch.nn.utils.get_total_norm takes it, of whole tensors with the
    same bits; parts are summed first, over the dimensions of their mesh that they are sharded along, with one
    all-reduce for each. Every rank has to call this with the same parameters. ValueError for an order that is not
    above 0.
    """
    norm_type = float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type: {norm_type} is not valid; give a number above 0, or inf")
    norms = [_norm(grad, norm_type) for _, grad in grads]
    there = [grad is not None for _, grad in grads]
    sharded: dict[Any, list[int]] = {}
    for i, (param, _) in enumerate(grads):
        if over := _sharded_over(param):
            sharded.setdefault(over, []).append(i)
    for (mesh, dims), members in sharded.items():
        found = torch.stack([torch.stack([norms[i], _scalar(float(there[i]))]) for i in members])
        for i, (norm, present) in zip(members, _over_ranks(found, mesh, dims, norm_type), strict=True):
            norms[i], there[i] = norm, bool(present)
    kept = [norm for norm, present in zip(norms, there, strict=True) if present]
    return torch.linalg.vector_norm(torch.stack(kept), norm_type) if kept else _scalar(0.0)


def _norm(grad: Tensor | None, norm_type: float) -> Tensor:
    if grad is None or not grad.numel():  # whose largest element torch would not know
        return _scalar(0.0)
    return torch.linalg.vector_norm(grad, norm_type)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _sharded_over(param: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh, and those of its dimensions along which ranks have different elements; None for a whole parameter."""
    if not is_dtensor(param) or param.device_mesh.get_coordinate() is None:
        return None
    dims = tuple(i for i, placement in enumerate(param.placements) if not placement.is_replicate())
    return (param.device_mesh, dims) if dims else None


def _over_ranks(found: Tensor, mesh: Any, dims: Sequence[int], norm_type: float) -> Tensor:
    """Rows of a norm, and of 1 where there is a gradient, as all ranks of these dimensions have them."""
    infinite = math.isinf(norm_type)
    values = (found if infinite else found**norm_type).to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(values, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    values = values.cpu()
    return values if infinite else values ** (1.0 / norm_type)
