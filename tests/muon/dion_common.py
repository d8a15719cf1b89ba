"""What both layouts of the stand-in for dion's Muon share: arithmetic, collectives, tasks, and the step.

Written from dion's documented behaviour (attributes, groups, states, the order of its collectives, what is batched
with what); the arithmetic is of the same form, and not meant to give dion's own bits. test_real_dion.py compares the
two where dion is installed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Task = Generator[None, None, None]

COEFFICIENTS = [(4.0, -6.8, 2.9), (3.9, -6.3, 2.6), (3.7, -5.5, 2.3), (2.8, -3.1, 1.2)]


def orthogonalized(matrices: Tensor, epsilon: float) -> Tensor:
    """Newton-Schulz in BF16 over the last two dimensions of a matrix or of a batch of them."""
    x = matrices.to(torch.bfloat16)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + epsilon)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def shaped(matrices: Tensor, flatten: bool, epsilon: float) -> Tensor:
    """As `orthogonalized`, for more dimensions than three."""
    shape = matrices.shape
    if flatten and matrices.ndim > 2:
        matrices = matrices.flatten(1)
    elif matrices.ndim > 3:
        matrices = matrices.flatten(end_dim=-3)
    return orthogonalized(matrices, epsilon).reshape(shape)


def scale(option: str | None, shape: tuple[int, ...], flatten: bool = False) -> float:
    rows, columns = (shape[0], math.prod(shape[1:])) if flatten else shape[-2:]
    return {
        None: 1.0,
        "spectral_norm": math.sqrt(rows / columns),
        "rms_norm": 0.2 * math.sqrt(max(rows, columns)),
    }[option]


def momenta(momentum: list[Tensor], grads: list[Tensor], mu: float, nesterov: bool) -> list[Tensor]:
    """Updates the momenta; what is to be orthogonalised, in BF16 as it is sent."""
    grads = [g.to(m.dtype) for g, m in zip(grads, momentum, strict=True)]
    torch._foreach_mul_(momentum, mu)
    torch._foreach_add_(momentum, grads)
    wanted = momentum
    if nesterov:
        wanted = torch._foreach_mul(momentum, mu)
        torch._foreach_add_(wanted, grads)
    return [u.to(torch.bfloat16) for u in wanted]


Number = float | Tensor
"""A 0-dim tensor is on the parameters' device, and no value of it goes to the host."""


def decay_and_add(params: list[Tensor], updates: list[Tensor], lr: Number, weight_decay: float, factor: float) -> None:
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_sub_(params, torch._foreach_mul(updates, lr * factor))


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: dict, step: Number) -> None:
    lr, beta1, beta2 = group["lr"], group["beta1"], group["beta2"]
    m.lerp_(g.to(m.dtype), 1 - beta1)
    v.mul_(beta2).addcmul_(g.to(v.dtype), g.to(v.dtype), value=1 - beta2)
    p.mul_(1 - lr * group["weight_decay"])
    denominator = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["epsilon"])
    p.sub_(m / denominator * (lr / (1 - beta1**step)))


def lion(p: Tensor, g: Tensor, m: Tensor, group: dict) -> None:
    lr = group["lr"]
    update = m.lerp(g.to(m.dtype), 1 - group["beta1"]).sign_()
    m.lerp_(g.to(m.dtype), 1 - group["beta2"])
    p.mul_(1 - lr * group["weight_decay"]).sub_(update * lr)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def exchanged(chunks: list[Tensor], group: dist.ProcessGroup) -> Generator[None, None, list[Tensor]]:
    """all_to_all of as many chunks of one shape as there are ranks. Other tasks run while it is under way."""
    received = [torch.empty_like(c) for c in chunks]
    chunks = [c.clone(memory_format=torch.contiguous_format) for c in chunks]
    work = dist.all_to_all(received, chunks, group=group, async_op=True)
    yield
    work.wait()
    return received


def gathered(mine: Tensor, world: int, group: dist.ProcessGroup) -> Generator[None, None, list[Tensor]]:
    received = [torch.empty_like(mine) for _ in range(world)]
    work = dist.all_gather(received, mine.contiguous(), group=group, async_op=True)
    yield
    work.wait()
    return received


def run_tasks(tasks: Iterable[Task], most: int = 3) -> None:
    """Up to `most` tasks at once, in turns; a new one starts whenever there is room."""
    tasks, running, more = iter(tasks), [], True
    while more or running:
        started = []
        if more and len(running) < most:
            task = next(tasks, None)
            more = task is not None
            started = [task] if task is not None and _goes_on(task) else []
        running = started + [task for task in running if _goes_on(task)]


def _goes_on(task: Task) -> bool:
    try:
        next(task)
    except StopIteration:
        return False
    return True


class Common(torch.optim.Optimizer):
    """Arguments, attributes and the step of either layout."""

    def __init__(
        self,
        params,
        distributed_mesh: DeviceMesh | dist.ProcessGroup | None = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
    ):
        defaults = {
            "lr": lr,
            "mu": mu,
            "beta1": betas[0],
            "beta2": betas[1],
            "weight_decay": weight_decay,
            "algorithm": "muon",
            "step": 0,
            "epsilon": epsilon,
            "nesterov": nesterov,
            "flatten": flatten,
            "adjust_lr": adjust_lr,
            "cautious_wd": False,
        }
        super().__init__(params, defaults)
        self._device_rank, self._world_size, self._process_group = 0, 1, None
        if isinstance(distributed_mesh, DeviceMesh):
            self._device_rank, self._world_size = distributed_mesh.get_local_rank(), distributed_mesh.size()
            self._process_group = distributed_mesh.get_group()
        elif distributed_mesh is not None:
            self._device_rank, self._world_size = dist.get_rank(distributed_mesh), dist.get_world_size(distributed_mesh)
            self._process_group = distributed_mesh
        self._distributed_mesh = distributed_mesh

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._counted()
        run_tasks(chain(self._matrix_tasks(groups["muon"]), self._elementwise_tasks(groups)))
        return loss

    def _counted(self) -> dict[str, list[dict]]:
        """The groups by algorithm, with one step more in each."""
        by_algorithm: dict[str, list[dict]] = {"muon": [], "lion": [], "adamw": []}
        for group in self.param_groups:
            group["step"] += 1
            by_algorithm[group["algorithm"]].append(group)
        return by_algorithm

    def _matrix_tasks(self, groups: list[dict]) -> Iterator[Task]:
        raise NotImplementedError

    def _elementwise_tasks(self, groups: dict[str, list[dict]]) -> Iterator[Task]:
        for group in groups["lion"]:
            yield self._lion(group)
        for group in groups["adamw"]:
            yield self._adamw(group)

    def _lion(self, group: dict) -> Task:
        for p in with_grad(group):
            lion(*local((p, p.grad, self._state_of(p, "lion")["momentum"])), group)
        yield

    def _adamw(self, group: dict) -> Task:
        for p in with_grad(group):
            state = self._state_of(p, "adamw")
            tensors = local((p, p.grad, state["momentum"], state["variance"]))
            adamw(*tensors, group, self._adamw_step(state, group))
        yield

    def _adamw_step(self, state: dict, group: dict) -> Number:
        """The count of this step, for bias correction."""
        return group["step"]

    def _state_of(self, param: Tensor, algorithm: str) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
            if algorithm == "adamw":
                state["variance"] = torch.zeros_like(param)
        return state

    def _sharded(self, param: Tensor, group: dict) -> tuple[bool, int | None]:
        """(whether its matrices lie whole on different ranks, the dimension of a matrix that is sharded)."""
        if not isinstance(param, DTensor):
            return False, None
        dims = [p.dim for i, p in enumerate(param.placements) if p.is_shard() and param.device_mesh.size(i) > 1]
        if group["flatten"]:
            return False, dims[0] if dims else None
        of_matrix = [dim for dim in dims if dim >= param.ndim - 2]
        return len(of_matrix) < len(dims), of_matrix[0] if of_matrix else None


def with_grad(group: dict) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def alike(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters of one global shape, placements and dtype, in order."""
    sorted_params: dict = {}
    for p in params:
        placements = p.placements if isinstance(p, DTensor) else None
        sorted_params.setdefault((p.shape, placements, p.dtype), []).append(p)
    return list(sorted_params.values())
