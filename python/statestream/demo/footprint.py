"""What a way to train keeps in memory for as long as it trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from statestream.demo.training import Training

__all__ = ["Footprint", "footprint", "footprint_of_adamw"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Footprint:
    """In bytes. `masters` are FP32 weights, whoever keeps them."""

    weights: int
    gradients: int
    moments: int
    masters: int

    @property
    def state(self) -> int:
        return self.moments + self.masters


def footprint(training: Training) -> Footprint:
    """Of the training as it runs."""
    params = list(training.model.parameters())
    states = [training.optimizer.state[param] for param in params]
    return Footprint(
        weights=_bytes(params),
        gradients=_bytes(params),  # autograd gives them the weights' dtype
        moments=_bytes(state[name] for state in states for name in _MOMENTS),
        masters=_bytes(state["master_param"] for state in states),
    )


def footprint_of_adamw(training: Training) -> Footprint:
    """Of torch.optim.AdamW at the same task: over an FP32 copy of the BF16 weights, as it has no masters."""
    params = list(training.model.parameters())
    copies = [param.detach().float() for param in params]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    optimizer = torch.optim.AdamW(copies)
    optimizer.step()
    return Footprint(
        weights=_bytes(params),
        gradients=_bytes(params),
        moments=_bytes(optimizer.state[copy][name] for copy in copies for name in _MOMENTS),
        masters=_bytes(copies),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
