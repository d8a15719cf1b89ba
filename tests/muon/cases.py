"""Models for Muon, the plain optimizer of each kind over them, and the comparison of two runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from statestream import CPUOffloadOptimizer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn import Parameter

from . import dion_batched, dion_megabatched

__all__ = [
    "CASES",
    "CHECKPOINTED",
    "STEPS",
    "Case",
    "Group",
    "Run",
    "check_same",
    "differences",
    "dion_muon",
    "offloaded",
    "train",
]

STEPS = 4
STAND_INS = {"batched": dion_batched.Muon, "megabatched": dion_megabatched.Muon}


def dion_muon() -> type[torch.optim.Optimizer]:
    """dion's own; ImportError where it is not installed."""

    def as_it_is(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda inner: inner

    with mock.patch.object(torch, "compile", as_it_is):  # it compiles where it is imported, and here it need not
        import dion
    return dion.Muon


@dataclass(frozen=True)
class Group:
    """Parameters of these global shapes; `dim` is how they are sharded where ranks share (None: each has them all)."""

    shapes: Sequence[tuple[int, ...]]
    dim: int | None = 0
    options: dict[str, Any] = field(default_factory=dict)


def none(step: int) -> set[int]:
    return set()


@dataclass(frozen=True)
class Case:
    """`missing`: step -> indices of parameters without a gradient. `plain`: no DTensors, as under DDP. `real`: dion's
    own Muon, which has to be of that layout, rather than the stand-in."""

    layout: str
    groups: Sequence[Group]
    dtype: torch.dtype = torch.float32
    plain: bool = False
    missing: Callable[[int], set[int]] = none
    real: bool = False

    def run(self, mesh: DeviceMesh | None = None) -> Run:
        """Parameters, always of the same values, and the optimizer over them."""
        params = self.params(mesh)
        each = iter(params)
        groups = [{"params": [next(each) for _ in group.shapes], **group.options} for group in self.groups]
        if self.layout == "torch":
            return Run(self, params, torch.optim.Muon(groups, lr=0.02))
        where: Any = mesh if mesh is None or not self.plain else mesh.get_group()
        muon = dion_muon() if self.real else STAND_INS[self.layout]
        return Run(self, params, muon(groups, where, lr=0.02, nesterov=True))

    def params(self, mesh: DeviceMesh | None = None) -> list[Parameter]:
        generator = torch.Generator().manual_seed(7)
        shapes = [(shape, group.dim) for group in self.groups for shape in group.shapes]
        fulls = [torch.randn(shape, generator=generator).to(self.dtype) for shape, _ in shapes]
        return [Parameter(self._spread(full, dim, mesh)) for full, (_, dim) in zip(fulls, shapes, strict=True)]

    def _spread(self, full: Tensor, dim: int | None, mesh: DeviceMesh | None) -> Tensor:
        if mesh is None or self.plain:
            return full
        placement: Placement = Shard(dim) if dim is not None else torch.distributed.tensor.Replicate()
        return distribute_tensor(full, mesh, [placement])

    def set_grads(self, params: Sequence[Parameter], step: int) -> None:
        generator = torch.Generator().manual_seed(1000 + step)
        dims = [group.dim for group in self.groups for _ in group.shapes]
        for i, (param, dim) in enumerate(zip(params, dims, strict=True)):
            full = torch.randn(param.shape, generator=generator).to(self.dtype)
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            grad = self._spread(full, dim, mesh)  # a collective: on every rank, also where it is then missing
            param.grad = None if i in self.missing(step) else grad


@dataclass
class Run:
    case: Case
    params: list[Parameter]
    optimizer: Any


def offloaded(run: Run, budget: int | None) -> Run:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*need more than step_chunk_bytes")
        return Run(run.case, run.params, CPUOffloadOptimizer(run.optimizer, budget))


def train(run: Run, steps: Sequence[int] = range(STEPS)) -> Run:
    """Steps with an lr of its own in each step and group."""
    for step in steps:
        for number, group in enumerate(run.optimizer.param_groups):
            group["lr"] = 0.02 / (1 + step + number)
        run.case.set_grads(run.params, step)
        run.optimizer.step()
    return run


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    tensor = tensor.detach().contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def _same_option(key: str, mine: Any, other: Any) -> bool:
    # dion saves tensors among the options as numbers, and makes a tensor again of the lr alone.
    return mine == other and (type(mine) is type(other) or key == "initial_lr")


def differences(mine: Run, plain: Run) -> list[str]:
    """Where parameters, state or groups are not the same, by bits. State that is there but zero, for a parameter
    that never had a gradient, counts as none."""
    found = []
    for i, (p, q) in enumerate(zip(mine.params, plain.params, strict=True)):
        if not torch.equal(_bits(p), _bits(q)):
            found.append(f"parameter {i}")
        own, other = mine.optimizer.state.get(p, {}), plain.optimizer.state.get(q, {})
        if not other and not any(_bits(v).any() for v in own.values()):
            continue
        if list(own) != list(other):
            found.append(f"state keys of parameter {i}: {list(own)} and {list(other)}")
            continue
        for name in own:
            a, b = own[name], other[name]
            if type(a) is not type(b) or a.dtype is not b.dtype or not torch.equal(_bits(a), _bits(b)):
                found.append(f"{name} of parameter {i}")
    for i, (a, b) in enumerate(zip(mine.optimizer.param_groups, plain.optimizer.param_groups, strict=True)):
        found += [
            f"{key} of group {i}: {a.get(key)!r} and {b.get(key)!r}"
            for key in a.keys() | b.keys()
            if key != "params" and not _same_option(key, a.get(key), b.get(key))
        ]
    return found


def check_same(mine: Run, other: Run) -> None:
    found = differences(mine, other)
    assert not found, f"{mine.case}: {found}"


ADAMW = Group([(64,), (7,), (40,)], options={"algorithm": "adamw", "weight_decay": 0.1})
LION = Group([(10,), (64, 8)], options={"algorithm": "lion"})
EXPERTS = Group([(4, 64, 32)] * 3)
EMPTY = Group([])
ODD = [(64, 256), (1, 256), (64, 256), (256, 1), (7, 32), (64, 256), (5, 16), (7, 32), (64, 256)]
EVEN = [shape for shape in ODD if shape[0] % 4 == 0]


def a_third(step: int) -> set[int]:
    return {i for i in range(40) if (i + step) % 3 == 0}


def by_rank(step: int) -> set[int]:
    """On each rank others, of the parameters for which no rank waits: those after the matrices in ODD."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {i for i in range(len(ODD), 40) if (i + step + rank) % 3 == 0}


CASES = {
    "megabatched, odd rows": Case("megabatched", [Group(ODD), EMPTY, EXPERTS, ADAMW, LION]),
    "megabatched, missing gradients": Case("megabatched", [Group(ODD), EMPTY, EXPERTS, ADAMW, LION], missing=a_third),
    "megabatched, missing on some ranks": Case("megabatched", [Group(ODD), EXPERTS, ADAMW, LION], missing=by_rank),
    "megabatched, packed": Case(
        "megabatched",
        [
            Group([(128, 64)] * 5, options={"split_sizes": (64, 32, 32)}),
            Group([(64, 64)] * 3, options={"num_heads": 4}),
            Group([(64, 64)] * 5),
            ADAMW,
        ],
    ),
    "megabatched, columns": Case(
        "megabatched", [Group([(48, 130)] * 5, dim=1), Group([(4, 64, 32)] * 3, dim=2), ADAMW]
    ),
    "megabatched, BF16": Case("megabatched", [Group(ODD), EXPERTS, ADAMW], dtype=torch.bfloat16),
    "megabatched, DDP": Case("megabatched", [Group(ODD), EXPERTS, ADAMW], plain=True),
    "megabatched, no matrices": Case("megabatched", [EMPTY, ADAMW, LION]),
    "batched": Case("batched", [Group(EVEN), EMPTY, EXPERTS, ADAMW, LION]),
    "batched, missing gradients": Case("batched", [Group(EVEN), EMPTY, EXPERTS, ADAMW, LION], missing=a_third),
    "batched, BF16": Case("batched", [Group(EVEN), EXPERTS, ADAMW], dtype=torch.bfloat16),
    "batched, odd rows, DDP": Case("batched", [Group(ODD), EXPERTS, ADAMW], plain=True),
    "batched, columns": Case("batched", [Group([(1, 256)] * 3 + [(7, 64)] * 5, dim=1), ADAMW]),
    "batched, packed over several batches": Case(
        "batched", [Group([(128, 64)] * 5, dim=1, options={"partitions": (64, 32, 32)}), Group(EVEN), ADAMW]
    ),
    "batched, packed, DDP": Case(
        "batched", [Group([(96, 32)] * 3, options={"partitions": (64, 16, 16)}), Group(ODD), ADAMW], plain=True
    ),
    "batched, flattened": Case("batched", [Group([(8, 4, 3, 3)] * 3, options={"flatten": True}), ADAMW]),
    "torch, DDP": Case("torch", [Group(ODD), EMPTY, Group([(12, 20)])], plain=True),
    "torch, missing gradients": Case("torch", [Group(ODD), EMPTY], plain=True, missing=a_third),
    # torch's own Muon refuses DTensors of uneven shards.
    "torch, sharded": Case("torch", [Group([(64, 256), (32, 16)]), EMPTY]),
}

CHECKPOINTED = {
    "megabatched": Case(
        "megabatched", [Group(ODD), EXPERTS, Group([(128, 64)] * 3, options={"split_sizes": (64, 32, 32)}), ADAMW]
    ),
    "batched": Case("batched", [Group(EVEN), EXPERTS, ADAMW]),
    "torch": Case("torch", [Group([(64, 256), (32, 16)])]),
}
"""Without an empty group: a flat state dict has no place for one."""
