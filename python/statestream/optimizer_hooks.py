"""An optimizer's hooks, run as torch.optim.Optimizer runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["call_hooks", "run_step_post_hooks", "run_step_pre_hooks", "through_hooks", "without_load_hooks"]

Hooks = Mapping[int, Callable[..., Any]]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a step, `self` included, and its keyword arguments."""


def run_step_pre_hooks(hooks: Hooks, optimizer: torch.optim.Optimizer, call: Call) -> Call:
    """The arguments of the step after each hook, which may return others."""
    for hook in list(hooks.values()):  # one may remove itself
        changed = hook(optimizer, *call)
        if changed is not None:
            if not (isinstance(changed, tuple) and len(changed) == 2):
                raise RuntimeError(f"a step pre-hook returned {changed!r}; it must return None or (args, kwargs)")
            call = changed
    return call


def run_step_post_hooks(hooks: Hooks, optimizer: torch.optim.Optimizer, call: Call) -> None:
    for hook in list(hooks.values()):
        hook(optimizer, *call)


def call_hooks(hooks: Hooks, optimizer: torch.optim.Optimizer) -> None:
    """Hooks around a state dict that take nothing else."""
    for hook in list(hooks.values()):
        hook(optimizer)


def through_hooks(hooks: Hooks, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict after each hook, which may change it or return another."""
    for hook in list(hooks.values()):
        changed = hook(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    return state_dict


@contextmanager
def without_load_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, the optimizer has no hooks around `load_state_dict`."""
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    saved = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, type(saved[name])())
    try:
        yield
    finally:
        for name, hooks in saved.items():
            setattr(optimizer, name, hooks)
