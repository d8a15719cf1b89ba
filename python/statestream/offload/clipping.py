"""The norm of all gradients, where they are in host memory and the parameters over several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from statestream.tensors import is_dtensor

__all__ = ["global_norm"]


def global_norm(grads: Sequence[tuple[Tensor, Tensor | None]], norm_type: float) -> Tensor:
    """The `norm_type`-norm of the gradients seen as one vector, a float32 scalar on the CPU, the same on every rank.

    `grads` are pairs of a parameter and this rank's part of its gradient, in host memory, or None where it has none.
    Parts of one mesh are summed over the dimensions that it is sharded along: one all-reduce of one number each. Every
    rank has to call this with the same parameters. ValueError for an order that is not above 0.
    """
    norm_type = float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type: {norm_type} is not valid; give a number above 0, or inf")
    parts: dict[Any, list[Tensor]] = {}
    for param, grad in grads:
        found = parts.setdefault(_sharded_over(param), [])
        if grad is not None and grad.numel():
            found.append(grad)
    norms = [_over_ranks(get_total_norm(found, norm_type).float(), *over, norm_type) for over, found in parts.items()]
    # The norm of a single number may differ from it in its last bit.
    return norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)


def _sharded_over(param: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh, and those of its dimensions along which ranks have different elements."""
    if not is_dtensor(param):
        return None, ()
    return param.device_mesh, tuple(i for i, p in enumerate(param.placements) if not p.is_replicate())


def _over_ranks(norm: Tensor, mesh: Any, dims: Sequence[int], norm_type: float) -> Tensor:
    if not dims or mesh.get_coordinate() is None:
        return norm
    infinite = math.isinf(norm_type)
    value = (norm if infinite else norm**norm_type).to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(value, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    value = value.cpu()
    return value if infinite else value ** (1.0 / norm_type)
