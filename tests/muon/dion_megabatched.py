"""Stand-in for dion's Muon in its megabatched layout: one task for all matrices of a group that are alike, state made
by the constructor, lr and AdamW's counts as tensors, packed weights by `split_sizes` and `num_heads`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .dion_common import (
    Common,
    Task,
    alike,
    decay_and_add,
    exchanged,
    gathered,
    local,
    momenta,
    scale,
    shaped,
    with_grad,
)


class Muon(Common):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._hyperparam_tensors: dict[tuple[int, str], Tensor] = {}
        self._state_prepopulated = False
        for group in self.param_groups:
            self._prepopulate(group)
        self._sync_hyperparam_tensors()
        self._state_prepopulated = True

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        if getattr(self, "_state_prepopulated", False):
            self._prepopulate(self.param_groups[-1])

    def _prepopulate(self, group: dict) -> None:
        for p in group["params"]:
            self._state_of(p, group["algorithm"])

    def _state_of(self, param: Tensor, algorithm: str) -> dict[str, Tensor]:
        state = super()._state_of(param, algorithm)
        if algorithm == "adamw" and "step_dev" not in state:
            state["step_dev"] = torch.zeros((), dtype=torch.float32, device=local([param])[0].device)
        return state

    def _sync_hyperparam_tensors(self) -> None:
        """Each group's lr in one tensor that is kept: keyed by the group's index, and skipped for an empty group."""
        for index, group in enumerate(self.param_groups):
            if not group["params"]:
                continue
            kept = self._hyperparam_tensors.get((index, "lr"))
            if kept is None:
                kept = torch.empty((), dtype=torch.float32, device=local(group["params"])[0].device)
                self._hyperparam_tensors[index, "lr"] = kept
            if group["lr"] is not kept:
                kept.copy_(torch.as_tensor(group["lr"]))
                group["lr"] = kept

    def _counted(self) -> dict[str, list[dict]]:
        self._sync_hyperparam_tensors()
        return super()._counted()

    def _adamw_step(self, state: dict, group: dict) -> Tensor:
        return state["step_dev"].add_(1)

    def state_dict(self):
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            for key, value in group.items():
                if isinstance(value, Tensor) and value.ndim == 0:
                    group[key] = value.item()
        return state_dict

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._sync_hyperparam_tensors()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if group["algorithm"] == "adamw" and state is not None:
                    count = state.get("step_dev", torch.tensor(float(group["step"])))
                    state["step_dev"] = count.to(torch.float32)

    def _matrix_tasks(self, groups: list[dict]) -> Iterator[Task]:
        return self._create_ortho_tasks(groups)

    def _create_ortho_tasks(self, groups: list[dict]) -> Iterator[Task]:
        for group in groups:
            for params in alike(with_grad(group)):
                yield self._update(params, group)

    def _update(self, params: list[Tensor], group: dict) -> Task:
        shape = tuple(params[0].shape)
        weights, grads = local(params), local(p.grad for p in params)
        momentum = local(self._state_of(p, "muon")["momentum"] for p in params)
        whole, dim = self._sharded(params[0], group)
        heads = group.get("num_heads", 1)
        if heads > 1:
            shape = (heads, shape[0] // heads, *shape[1:])
            weights, grads, momentum = (
                [t.view(-1, *shape[1:]) for t in tensors] for tensors in (weights, grads, momentum)
            )
            whole, dim = True, None
        process_group = None if whole and dim is None else self._process_group
        updates = momenta(momentum, grads, group["mu"], group["nesterov"])
        updates = yield from self._orthogonalize(updates, shape, dim, process_group, group)
        decay_and_add(
            weights,
            updates,
            group["lr"],
            group["weight_decay"],
            scale(group["adjust_lr"], shape, group["flatten"]),
        )

    def _orthogonalize(self, updates, shape, dim, process_group, group):
        world, count = self._world_size, len(updates)
        if process_group is not None and (count > 1 or dim is not None):
            updates = updates + [torch.zeros_like(updates[0])] * (-count % world)
        if dim is not None and process_group is not None:
            dim -= len(shape)
            length = updates[0].size(dim)
            most = -(-shape[dim] // world)
            if length < most:  # also a rank without rows takes part
                padding = [0, 0] * (-dim - 1) + [0, most - length]
                updates = [torch.nn.functional.pad(u, padding) for u in updates]
            chunks = list(torch.stack(updates).unflatten(0, (world, -1)).unbind(0))
            shards = yield from exchanged(chunks, process_group)
            full = self._newton_schulz(torch.cat(shards, dim), group, shape)
            back = yield from exchanged(list(full.tensor_split(world, dim)), process_group)
            done = torch.stack(back).narrow(dim, 0, length).flatten(0, 1)
        elif count > 1 and process_group is not None:
            each = len(updates) // world
            mine = torch.stack(updates[self._device_rank * each :][:each])
            chunks = yield from gathered(self._newton_schulz(mine, group, shape), world, process_group)
            done = torch.stack(chunks).flatten(0, 1)
        elif count == 1:
            done = self._newton_schulz(updates[0], group, shape).unsqueeze(0)
        else:
            done = self._newton_schulz(torch.stack(updates), group, shape)
        return list(done[:count].unbind(0))

    def _newton_schulz(self, matrices: Tensor, group: dict, shape: tuple[int, ...]) -> Tensor:
        rows = group.get("split_sizes")
        if rows is None:
            return shaped(matrices, group["flatten"], group["epsilon"])
        whole = scale(group["adjust_lr"], shape)
        blocks = [
            shaped(block.contiguous(), False, group["epsilon"]) * (scale(group["adjust_lr"], block.shape) / whole)
            for block in matrices.split(list(rows), dim=-2)
        ]
        return torch.cat(blocks, dim=-2)
