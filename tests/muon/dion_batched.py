"""Stand-in for dion's Muon in its batched layout: batches of world_size, state made by the first step.

One option more than there: a group's `partitions`, rows of the matrices that a packed weight holds; each goes into the
batch of its own shape, so that one weight is in several batches. For weights that are not sharded along their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass
class Matrix:
    """One matrix of a batch: global shape, and the local weight, gradient and momentum."""

    shape: tuple[int, ...]
    weight: Tensor
    grad: Tensor
    momentum: Tensor

    def like(self) -> Matrix:
        return Matrix(self.shape, *(torch.empty_like(t) for t in (self.weight, self.grad, self.momentum)))


class Muon(Common):
    def _matrix_tasks(self, groups: list[dict]) -> Iterator[Task]:
        return self._create_muon_tasks(groups)

    def _create_muon_tasks(self, groups: list[dict]) -> Iterator[Task]:
        for group in groups:
            if group.get("partitions"):
                yield from self._packed(group)
                continue
            for params in create_param_batches(with_grad(group), self._world_size):
                whole, dim = self._sharded(params[0], group)
                batch = []
                for p in params:
                    tensors = local((p, p.grad, self._state_of(p, "muon")["momentum"]))
                    batch.append(Matrix(tuple(p.shape), *tensors))
                if whole and dim is None:
                    for matrix in batch:
                        yield self._update([matrix], group, None, whole=True)
                else:
                    yield self._update(batch, group, dim)

    def _packed(self, group: dict) -> Iterator[Task]:
        blocks: dict = {}
        for p in with_grad(group):
            _, dim = self._sharded(p, group)
            assert dim != 0, "partitions of a weight that is sharded along its rows"
            parts = [
                t.split(list(group["partitions"])) for t in local((p, p.grad, self._state_of(p, "muon")["momentum"]))
            ]
            for rows, *tensors in zip(group["partitions"], *parts, strict=True):
                blocks.setdefault((rows, p.shape[1], dim, p.dtype), []).append(Matrix((rows, *p.shape[1:]), *tensors))
        for (_, _, dim, _), matrices in blocks.items():
            for at in range(0, len(matrices), self._world_size):
                yield self._update(matrices[at : at + self._world_size], group, dim)

    def _update(self, batch: list[Matrix], group: dict, dim: int | None, whole: bool = False) -> Task:
        """`whole`: every rank has a matrix of its own, and waits for nobody."""
        world = self._world_size
        if not whole:
            batch = batch + [batch[0].like() for _ in range(world - len(batch))]
        updates = momenta([x.momentum for x in batch], [x.grad for x in batch], group["mu"], group["nesterov"])
        if dim is not None:
            if batch[0].shape[dim] % world:
                raise AssertionError(f"dimension {dim} of {batch[0].shape} is not divisible by {world} ranks")
            shards = yield from exchanged(updates, self._process_group)
            full = shaped(torch.cat(shards, dim), group["flatten"], group["epsilon"])
            updates = yield from exchanged(list(full.tensor_split(world, dim)), self._process_group)
        elif len(batch) > 1:
            mine = shaped(updates[self._device_rank], group["flatten"], group["epsilon"])
            updates = yield from gathered(mine, world, self._process_group)
        else:
            updates = [shaped(updates[0], group["flatten"], group["epsilon"])]
        factor = scale(group["adjust_lr"], batch[0].shape, group["flatten"])
        decay_and_add([x.weight for x in batch], updates, group["lr"], group["weight_decay"], factor)


def create_param_batches(params: list[Tensor], batch_size: int) -> Iterator[list[Tensor]]:
    for same in alike(params):
        for at in range(0, len(same), batch_size):
            yield same[at : at + batch_size]
