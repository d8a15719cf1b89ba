"""DTensors without communication: one around a given local tensor, and a rank's share of a full tensor."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from statestream.tensors.local import is_dtensor, is_fake, local_of

__all__ = ["as_dtensor_like", "local_ranges", "redistribute_like", "shard_of"]

Range = tuple[int, int]
"""First index along a dimension, and one past the last."""


def as_dtensor_like(local: Tensor, like: Tensor) -> Tensor:
    """`local` as the local tensor of a DTensor on the mesh of `like`, with its placements, shape and stride;
    `local` itself where `like` is a plain tensor.

    The dtype is that of `local`, and so is the device: DTensor.from_local would move a host tensor to the
    device of the mesh, and empty_like leaves no choice of the memory.
    """
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    spec = copy.copy(like._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=False)


def redistribute_like(grad: Tensor, param: Tensor, name: str) -> Tensor:
    """A gradient with the placements of its parameter: itself, unless autograd left it a sum that is still to be
    taken (Partial) or cut it otherwise. Then it is redistributed, as torch's own optimizers do: a collective, the
    same on every rank. Raises ValueError where the two are on different meshes."""
    if not is_dtensor(grad) or not is_dtensor(param) or grad.placements == param.placements:
        return grad
    if grad.device_mesh != param.device_mesh:
        raise ValueError(
            f"{name}: gradient on {grad.device_mesh}, parameter on {param.device_mesh}; redistribute the gradient"
        )
    return grad.redistribute(param.device_mesh, param.placements)


def shard_of(value: Tensor, param: Tensor, name: str, label: str) -> Tensor:
    """This rank's part of `value`, shaped as the local tensor of `param`, on the device where `value` is.

    `value` is a tensor of the parameter's global shape: a DTensor with the parameter's placements on the same
    ranks, or a plain tensor, of which a view is taken (in host memory a copy where the share is not one range,
    as under FSDP together with tensor parallelism). No communication, and no memory on the parameter's device.

    Raises ValueError, naming `name` of `label`, where that cannot be.
    """
    if is_dtensor(value):
        _check_same_sharding(value, param, name, label)
        local = local_of(value)
    elif is_dtensor(param):
        local = _share_of_full(value, param, name, label)
    else:
        local = value
    target = local_of(param)
    if is_fake(local) and not is_fake(target):
        raise ValueError(f"{name} of {label}: a tensor on {local.device} without data in the state dict")
    if local.shape != target.shape:
        raise ValueError(
            f"{name} of {label}: local shape {tuple(local.shape)} in the state dict, {tuple(target.shape)} in "
            "the optimizer"
        )
    return local.detach().resolve_neg()


def _check_same_sharding(value: Tensor, param: Tensor, name: str, label: str) -> None:
    if not is_dtensor(param):
        raise ValueError(
            f"{name} of {label}: a DTensor cannot be loaded into a plain parameter; give full_tensor() of it, or "
            "load it through torch.distributed.checkpoint, which reshards"
        )
    mesh, own = value.device_mesh, param.device_mesh
    same_ranks = mesh is own or mesh == own or (mesh.shape == own.shape and bool((mesh.mesh == own.mesh).all()))
    if tuple(value.placements) != tuple(param.placements) or not same_ranks:
        raise ValueError(
            f"{name} of {label}: placements {value.placements} on a mesh of {tuple(mesh.shape)} in the state dict, "
            f"{param.placements} on one of {tuple(own.shape)}{'' if same_ranks else ' with other ranks'} in the "
            "optimizer; load it through torch.distributed.checkpoint, which reshards"
        )


def local_ranges(param: Tensor, name: str = "parameter") -> list[list[Range]]:
    """The indices of the whole tensor that this rank has, along each dimension: the local tensor holds their product in
    order. All of them for a plain tensor, none on a rank that the mesh leaves out.

    Raises ValueError, naming `name`, for a placement of which that is not known.
    """
    ranges: list[list[Range]] = [[(0, size)] for size in param.shape]
    if not is_dtensor(param):
        return ranges
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [[(0, 0)] for _ in param.shape]
    for mesh_dim, placement in enumerate(param.placements):
        if placement.is_replicate():
            continue
        dim, pieces = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        if dim is None:
            raise ValueError(f"{name}: the share of a full tensor is not known for placement {placement}")
        ranges[dim] = _shard(ranges[dim], mesh.size(mesh_dim), coordinate[mesh_dim], pieces)
    return ranges


def _share_of_full(value: Tensor, param: Tensor, name: str, label: str) -> Tensor:
    if param.device_mesh.get_coordinate() is None:  # a rank that the mesh leaves out has an empty local tensor
        return value.new_empty(local_of(param).shape)
    for dim, kept in enumerate(local_ranges(param, f"{name} of {label}")):
        parts = [value.narrow(dim, begin, end - begin) for begin, end in kept]
        # Joined in host memory: a device may have no room for it.
        value = parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts], dim)
    return value


def _shard(ranges: Sequence[Range], ranks: int, rank: int, pieces: int) -> list[Range]:
    """What `rank` of `ranks` keeps of the indices in `ranges`, of which each rank takes an equal run, the last
    ones less. With `pieces` above 1 (_StridedShard) the indices are first cut into as many, and each of them
    is shared out so."""
    kept: list[Range] = []
    for piece in range(pieces):
        for begin, end in _run(_run(ranges, pieces, piece), ranks, rank):
            if kept and kept[-1][1] == begin:
                kept[-1] = (kept[-1][0], end)
            else:
                kept.append((begin, end))
    return kept or [(0, 0)]


def _run(ranges: Sequence[Range], parts: int, part: int) -> list[Range]:
    """The part-th of `parts` runs, equal but for the last, of the indices in `ranges`."""
    length = -(-sum(end - begin for begin, end in ranges) // parts)
    skip, take = part * length, length
    run: list[Range] = []
    for begin, end in ranges:
        first = min(begin + skip, end)
        skip -= first - begin
        last = min(first + take, end)
        take -= last - first
        if last > first:
            run.append((first, last))
    return run
