"""Small runs of an optimizer: parameters of awkward shapes, and gradients that are a function of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from statestream import FusedAdam

from helpers.modes import Mode

__all__ = ["SHAPES", "build", "gradient", "make_params", "train", "with_gradients"]

SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (130,), (), (0,), (4, 3, 3, 3), (1, 1), (33, 2))
"""A matrix, more than a vector's width, a scalar, nothing, a channels_last weight, one element, odd."""


def make_params(mode: Mode, seed: int = 0) -> list[torch.nn.Parameter]:
    """One parameter for each of SHAPES; the 4-D one is channels_last."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = mode.param_dtypes
    params = []
    for i, shape in enumerate(SHAPES):
        value = _normal(shape, generator).to(dtypes[i % len(dtypes)])
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        params.append(torch.nn.Parameter(value))
    return params


def build(mode: Mode, seed: int = 0, **arguments: Any) -> FusedAdam:
    """FusedAdam of the mode over `make_params`, in two groups of different settings."""
    params = make_params(mode, seed)
    groups = [
        {"params": params[:3]},
        {"params": params[3:], "lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.2},
    ]
    return FusedAdam(groups, **{"lr": 1e-2, "weight_decay": 0.05, **mode.arguments, **arguments})


def gradient(param: torch.Tensor, index: int, step: int) -> torch.Tensor:
    """The gradient of the parameter with that index at that step, whoever asks: over four decades."""
    return torch.empty_like(param, requires_grad=False).copy_(_values(tuple(param.shape), index, step))


@lru_cache(maxsize=1000)
def _values(shape: tuple[int, ...], index: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    scale = 10.0 ** (torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") * 4 - 3)
    return _normal(shape, generator) * scale


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The same whatever a test has made torch's default dtype and device."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Runs the numbered steps; parameters are numbered over all groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for index, param in enumerate(params):
            param.grad = gradient(param, index, step)
        optimizer.step()


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], Sequence[torch.Tensor]], *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return params[0].sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.gradients()


def with_gradients(gradients: Callable[[], Sequence[torch.Tensor]], *params: torch.Tensor) -> torch.Tensor:
    """A loss. `gradients` is called in its backward, and gives the parameters' gradients, as a trainer's hooks do."""
    return _WithGradients.apply(gradients, *params)
