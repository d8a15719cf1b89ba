"""An optimizer's state-dict hooks, run as torch runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["call_hooks", "through_hooks"]

Hooks = Mapping[int, Callable[..., Any]]


def call_hooks(hooks: Hooks, optimizer: torch.optim.Optimizer) -> None:
    for hook in list(hooks.values()):  # one may remove itself
        hook(optimizer)


def through_hooks(hooks: Hooks, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict after each hook, which may change it or return another."""
    for hook in list(hooks.values()):
        changed = hook(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    return state_dict
