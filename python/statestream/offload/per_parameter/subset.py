"""An optimizer that is made to see some of its parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from statestream.offload.per_parameter.counts import Counts
from statestream.tensors.local import local_of

__all__ = ["Subset"]


class Subset:
    """Lets the optimizer see some of its parameters at a time. Entered, it sees none; left, all is as it was:
    groups whole, every gradient back. What it counts for itself is counted once, however often it was called."""

    def __init__(self, inner: torch.optim.Optimizer, call: Callable[[], Any]):
        self.inner, self.call = inner, call
        self.groups = self.inner.param_groups
        self.params = [group["params"] for group in self.groups]
        self.grads = {id(p): (p, p.grad) for params in self.params for p in params if p.grad is not None}
        self.counts = Counts(inner)
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
        self.counts.finish()

    def update(self, params: Sequence[Tensor]) -> None:
        """The optimizer's own step for these parameters, with the group settings that the step began with."""
        if self.ran:
            self.counts.set_back()
        self.ran = True
        chosen = {id(p) for p in params}
        try:
            for group, all_params in zip(self.groups, self.params, strict=True):
                group["params"] = [p for p in all_params if id(p) in chosen]
            for param in params:
                param.grad = self.grads[id(param)][1]
            with self.counts.call():
                self.call()
        finally:
            for param in params:
                # An optimizer may have replaced it, or set it to None.
                self.grads[id(param)] = (param, param.grad)
                param.grad = None

    @contextmanager
    def updating(self, params: Sequence[Tensor], room: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Updates these parameters, and then runs the block. After an error in either they are put back, and the
        update has not counted. `room`, as large as the local tensors, holds copies of them for that."""
        locals_ = [local_of(param) for param in params]
        if room is None:
            room = [torch.empty_like(local) for local in locals_]
        for before, local in zip(room, locals_, strict=True):
            before.copy_(local)
        try:
            self.update(params)
            yield
        except BaseException:
            self.counts.undone()
            for before, local in zip(room, locals_, strict=True):
                local.copy_(before)
            raise


def _check_restorable(param: Tensor, grad: Tensor) -> None:
    """A gradient older than the parameter's dtype could be hidden, and not put back."""
    try:
        param.grad = grad
    except RuntimeError as error:
        raise ValueError(
            f"a gradient of {grad.dtype} belongs to a parameter that is {param.dtype} now; set gradients to None when "
            f"a model changes its dtype ({error})"
        ) from error
