"""An optimizer that is made to see some of its parameters at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Subset"]


class Subset:
    """Lets the optimizer see some of its parameters at a time. Entered, it sees none; left, all is as it was:
    groups whole, every gradient back."""

    def __init__(self, inner: torch.optim.Optimizer, call: Callable[[], Any]):
        self.inner, self.call = inner, call
        self.groups = self.inner.param_groups
        self.params = [group["params"] for group in self.groups]
        self.grads = {id(p): (p, p.grad) for params in self.params for p in params if p.grad is not None}
        self.options = [{k: _kept(v) for k, v in g.items() if k != "params"} for g in self.groups]
        self.counts = {k: v for k, v in vars(self.inner).items() if type(v) in (int, float)}
        self.ran = False

    def __enter__(self) -> Subset:
        for param, grad in self.grads.values():
            if grad.dtype is not param.dtype:
                _check_restorable(param, grad)
        try:
            for param, _ in self.grads.values():
                param.grad = None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for group, params in zip(self.groups, self.params, strict=True):
            group["params"] = params
        for param, grad in self.grads.values():
            param.grad = grad

    def update(self, params: Sequence[Tensor]) -> None:
        """The optimizer's own step for these parameters, with the group settings that the step began with."""
        if self.ran:
            self._set_back()
        self.ran = True
        chosen = {id(p) for p in params}
        try:
            for group, all_params in zip(self.groups, self.params, strict=True):
                group["params"] = [p for p in all_params if id(p) in chosen]
            for param in params:
                param.grad = self.grads[id(param)][1]
            self.call()
        finally:
            for param in params:
                # An optimizer may have replaced it, or set it to None.
                self.grads[id(param)] = (param, param.grad)
                param.grad = None

    def _set_back(self) -> None:
        for group, options in zip(self.groups, self.options, strict=True):
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = _kept(value)
        vars(self.inner).update(self.counts)


def _check_restorable(param: Tensor, grad: Tensor) -> None:
    """A gradient older than the parameter's dtype could be hidden, and not put back."""
    try:
        param.grad = grad
    except RuntimeError as error:
        raise ValueError(
            f"a gradient of {grad.dtype} belongs to a parameter that is {param.dtype} now; set gradients to None when "
            f"a model changes its dtype ({error})"
        ) from error


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str, bool, tuple, type(None), Callable)) else copy.deepcopy(value)
