"""What is known of each Muon: its states, which parameters it orthogonalises together, and which ranks take part.

Known are torch.optim.Muon and dion's Muon (github.com/microsoft/dion), the latter by its attributes in two public
layouts, without importing it:

* batched: `_create_muon_tasks`; of a group the matrices of one shape, placements and dtype, in order, in batches of
  `_world_size`. States are made by the first step;
* megabatched: `_create_ortho_tasks`; all of a group's matrices of one shape, placements and dtype in one task.
  States are made by the constructor; AdamW counts on the device (`step_dev`), lr is a tensor.

Either counts each group's `step` and takes `algorithm` (muon, adamw or lion) from the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from statestream.tensors.local import is_dtensor

__all__ = ["BatchedMuon", "MegabatchedMuon", "TorchMuon", "muon_layout"]

STATES = {"muon": ("momentum",), "lion": ("momentum",), "adamw": ("momentum", "variance")}


class TorchMuon:
    """torch.optim.Muon: matrices one at a time, one state, made by the first step."""

    smallest = "matrices"
    counter: str | None = None
    """A state that counts a parameter's steps, 0-dim FP32, in versions that have it. A checkpoint without it means the
    group's `step`."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of a parameter's states, each of the parameter's shape and dtype and zero before its first step."""
        return ("momentum_buffer",)

    def batches(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[list[int]]:
        """Which of a group's `params` (by index) the optimizer works on together. A parameter of several matrices
        may be in several batches."""
        return [[i] for i in range(len(params))]

    def process_groups(self) -> list[Any]:
        """Each set of ranks that have to step the same chunks: of DTensors, every dimension of their mesh."""
        meshes: dict[int, Any] = {}
        for group in self.inner.param_groups:
            for param in group["params"]:
                if is_dtensor(param):
                    meshes.setdefault(id(param.device_mesh), param.device_mesh)
        found = []
        for mesh in meshes.values():
            if mesh.get_coordinate() is not None:
                found += [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        return list(dict.fromkeys(found))

    def sync_options(self) -> None:
        """Takes up what a caller wrote in the groups; called with the groups whole."""


class BatchedMuon(TorchMuon):
    """dion's Muon in the batched layout."""

    smallest = "Muon batches"

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        algorithm = group["algorithm"]
        if algorithm not in STATES:
            raise ValueError(
                f"algorithm {algorithm!r} of {type(self.inner).__name__} is not one of {', '.join(STATES)}"
            )
        return STATES[algorithm]

    def batches(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[list[int]]:
        if group["algorithm"] != "muon":
            return [[i] for i in range(len(params))]  # element by element
        alone: list[list[int]] = []
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, param in enumerate(params):
            placements = tuple(param.placements) if is_dtensor(param) else None
            if _holds_whole_matrices(group, param):
                alone.append([i])
                continue
            for shape in self._matrices(group, param):
                alike.setdefault((shape, placements, param.dtype), []).append(i)
        size = self.inner._world_size
        return alone + [same[at : at + size] for same in alike.values() for at in range(0, len(same), size)]

    @staticmethod
    def _matrices(group: dict[str, Any], param: Tensor) -> Iterable[tuple[int, ...]]:
        """Global shapes of the matrices that are put into batches: several of a packed weight."""
        shape = tuple(param.shape)
        for option in ("split_sizes", "partitions"):
            sizes = group.get(option)
            if sizes is not None:
                return [(size, *shape[1:]) for size in sizes]
        heads = group.get("num_heads") or 1
        return [(shape[0] // heads, *shape[1:])] * heads

    def process_groups(self) -> list[Any]:
        group = self.inner._process_group
        return [] if group is None or self.inner._world_size == 1 else [group]


class MegabatchedMuon(BatchedMuon):
    """dion's Muon in the megabatched layout. Its tasks are cut at multiples of the world size, where they would be
    padded anyway; so it communicates as much as uncut."""

    counter = "step_dev"

    @staticmethod
    def _matrices(group: dict[str, Any], param: Tensor) -> Iterable[tuple[int, ...]]:
        return [tuple(param.shape)]  # a packed weight is taken apart within its task

    def sync_options(self) -> None:
        # Groups are empty in some chunks, and then their lr would stay the number that a caller set.
        sync = getattr(self.inner, "_sync_hyperparam_tensors", None)
        if sync is not None:
            sync()


def _holds_whole_matrices(group: dict[str, Any], param: Tensor) -> bool:
    """Whether each rank has matrices of its own (experts sharded along the first dimension): no rank waits."""
    if not is_dtensor(param) or param.ndim < 3 or group.get("flatten"):
        return False
    dims = [p.dim for i, p in enumerate(param.placements) if p.is_shard() and param.device_mesh.size(i) > 1]
    return bool(dims) and all(dim < param.ndim - 2 for dim in dims)


def muon_layout(inner: torch.optim.Optimizer) -> TorchMuon | None:
    """How to step a Muon in parts; None for what is no Muon, or one that is not known."""
    if type(inner) is torch.optim.Muon:
        return TorchMuon(inner)
    of_dion = all(hasattr(inner, name) for name in ("_world_size", "_process_group", "_device_rank"))
    if type(inner).__name__ != "Muon" or not of_dion:
        return None
    if not all("algorithm" in group and "step" in group for group in inner.param_groups):
        return None
    if hasattr(inner, "_create_ortho_tasks"):
        return MegabatchedMuon(inner)
    return BatchedMuon(inner) if hasattr(inner, "_create_muon_tasks") else None
