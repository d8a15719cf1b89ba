"""A small model with what checkpoints trip over: groups of different settings, frozen and unused layers, buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from helpers.training import gradient

__all__ = ["Net", "grouped", "train_model"]


class Net(nn.Module):
    """`frozen` takes no gradient; `unused` may and never gets one."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        super().__init__()
        options = {"dtype": dtype, "device": device}
        self.embed = nn.Embedding(11, 6, **options)
        self.first = nn.Linear(6, 5, **options)
        self.norm = nn.LayerNorm(5, **options)
        self.unused = nn.Linear(3, 2, bias=False, **options)
        self.frozen = nn.Linear(4, 3, **options).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), **options))


def grouped(model: Net) -> list[dict]:
    """Three groups of different settings: matrices, the rest, the frozen ones."""
    named = dict(model.named_parameters())
    frozen = [p for p in named.values() if not p.requires_grad]
    matrices = [p for p in named.values() if p.requires_grad and p.dim() > 1]
    rest = [p for p in named.values() if p.requires_grad and p.dim() <= 1]
    return [
        {"params": matrices, "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "initial_lr": 2e-2},
        {"params": rest, "lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "initial_lr": 3e-2},
        {"params": frozen, "lr": 7e-4, "betas": (0.7, 0.98), "eps": 1e-7, "initial_lr": 4e-2},
    ]


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps with gradients that are a function of the step, for all parameters but the frozen and the unused."""
    for step in steps:
        for index, (name, param) in enumerate(model.named_parameters()):
            if param.requires_grad and not name.startswith("unused"):
                param.grad = gradient(param, index, step)
        optimizer.step()
