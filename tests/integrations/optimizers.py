"""What the trainers are given: each optimizer with small state, on models small enough to train in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from helpers.bits import differences, snapshot
from statestream import CPUOffloadOptimizer, FusedAdam
from torch import nn

__all__ = ["LR", "MAKERS", "SMALL", "Batches", "assert_same_run", "model_of", "train"]

LR = 1e-2
SMALL = {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
CHUNK = 1 << 15
"""Bytes: a few chunks for these models."""


def fused(params: Iterable[Any], **options: Any) -> FusedAdam:
    return FusedAdam(params, **{"lr": LR, "weight_decay": 0.01} | options)


def offloaded(params: Iterable[Any], **options: Any) -> CPUOffloadOptimizer:
    return CPUOffloadOptimizer(fused(params, **options), step_chunk_bytes=CHUNK)


def offloaded_adamw(params: Iterable[Any]) -> CPUOffloadOptimizer:
    return CPUOffloadOptimizer(torch.optim.AdamW(params, lr=LR, weight_decay=0.01), step_chunk_bytes=CHUNK)


MAKERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: fused(params, **SMALL),
    "FusedAdam, exports to the host": lambda params: fused(params, **SMALL, state_dict_cpu_offload=True),
    "FusedAdam, remainders": lambda params: fused(params, master_weights=True, store_param_remainders=True),
    "CPUOffloadOptimizer of FusedAdam": lambda params: offloaded(params, **SMALL),
    "CPUOffloadOptimizer of AdamW": offloaded_adamw,
}


def model_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)).to(dtype)


class Batches(torch.utils.data.Dataset):
    """Inputs and what a fixed linear map makes of them."""

    def __init__(self, count: int = 48, dtype: torch.dtype = torch.bfloat16):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 16, generator=generator).to(dtype)
        self.targets = (self.inputs.float() @ torch.randn(16, 16, generator=generator) / 4).to(dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Losses of so many batches. `optimizer` has `step` and `zero_grad`: torchtitan's container is none of torch's."""
    data, losses = Batches(), []
    for step in steps:
        inputs, targets = data[torch.arange(step, step + 16) % len(data)]
        loss = nn.functional.mse_loss(model(inputs).float(), targets.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_run(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Bit for bit: weights, states, counters and settings."""
    ours, theirs = snapshot(optimizer), snapshot(other)
    assert ours and not (found := differences(ours, theirs)), found
    assert any(name.endswith("exp_avg_sq") for name in ours), "no state was compared"
