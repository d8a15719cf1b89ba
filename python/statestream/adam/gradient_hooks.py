"""Which optimizer a parameter's gradient goes to: told by hooks on the parameter itself, where every optimizer looks.

torch lists a parameter's hooks in a dictionary of its Python object, and autograd runs those of the dictionary that
the tensor inside was given. ``torch.utils.swap_tensors``, and with it ``to_empty`` and ``.to(dtype)`` of DTensors,
exchanges the tensors inside alone: hooks are still listed, and never run. So they are given to the tensor anew at every
look.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

__all__ = ["GradientHooks"]


class _Hook:
    """What torch calls once a gradient is final. It keeps neither the optimizer nor its memory alive.

    The gradient is taken by `taker.take(param, name)`; without a taker it stays in `grad`, where `optimizer` reads it.
    """

    handle: RemovableHandle

    def __init__(self, optimizer: weakref.ref, taker: weakref.ref | None, name: str):
        self._optimizer, self._taker, self._name = optimizer, taker, name

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer()

    @property
    def takes(self) -> bool:
        return self._taker is not None

    @torch._disable_dynamo
    def __call__(self, param: Tensor) -> None:
        taker = None if self._taker is None else self._taker()
        if taker is not None:
            taker.take(param, self._name)


class GradientHooks:
    """One optimizer's hooks on its parameters. They go when this goes; `taker`, or no one, takes the gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, taker: Any = None):
        self._optimizer = weakref.ref(optimizer)
        self._taker = None if taker is None else weakref.ref(taker)
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._handles)

    def put_on(self, params: Iterable[Tensor], names: Callable[[], dict[int, str]]) -> bool:
        """Has a hook on each of these that is trained and that no other optimizer has, and on no other parameter: on a
        lazy one once it is initialized. Whether there are new ones; `names()` is what errors call parameters, by id."""
        kept: dict[int, RemovableHandle] = {}
        names, new = cache(names), False
        for param in params:
            hook = self._own(param)
            if hook is None and param.requires_grad and not is_lazy(param) and not self._others(param):
                hook, new = self._put(param, names()[id(param)]), True
            if hook is not None:
                param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks  # gives them to the tensor inside
                kept[hook.handle.id] = hook.handle
        for key in self._handles.keys() - kept.keys():
            self._handles.pop(key).remove()
        self._handles.update(kept)
        return new

    def take_over(self, params: Iterable[Tensor], names: Callable[[], dict[int, str]]) -> None:
        """Of parameters whose gradients another living optimizer takes, or that this one takes, the gradients are this
        one's from here on. One warning says so where they had been taken."""
        names, lost = cache(names), []
        for param in params:
            others = self._others(param)
            taken = any(hook.takes for hook in others)
            if taken or (others and self._taker is not None):
                for other in others:
                    other.handle.remove()
                name = names()[id(param)]
                hook = self._put(param, name)
                self._handles[hook.handle.id] = hook.handle
                lost += [name] * taken
        if lost:
            warnings.warn(
                f"a CPUOffloadOptimizer that offloads the gradients of {_listed(lost)} is still there: this new one "
                "has taken them over, and the earlier one refuses to step. A scheduler or another name may hold it; "
                "call its close() before the next one is built",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )

    def check(self, params: Iterable[Tensor], names: Callable[[], dict[int, str]]) -> None:
        """RuntimeError where gradients of some of these go to another optimizer."""
        lost = [param for param in params if param.requires_grad and self._others(param)]
        if lost:
            named = names()
            raise RuntimeError(
                f"another optimizer has taken over the gradients of {_listed([named[id(p)] for p in lost])}: it is "
                "over the same parameters. Step that one; to go on with this one delete the other, or call its close()"
            )

    def remove(self) -> None:
        _remove(self._handles)

    def _own(self, param: Tensor) -> _Hook | None:
        return next((hook for hook in _hooks_on(param) if self._handles.get(hook.handle.id) is hook.handle), None)

    def _others(self, param: Tensor) -> list[_Hook]:
        """Those of other optimizers that are still there."""
        found = _hooks_on(param)
        return [hook for hook in found if hook.optimizer not in (None, self._optimizer())] if found else found

    def _put(self, param: Tensor, name: str) -> _Hook:
        for earlier in _hooks_on(param):
            if earlier.optimizer is self._optimizer():  # of the same optimizer, before it was wrapped or wrapped again
                earlier.handle.remove()
        hook = _Hook(self._optimizer, self._taker, name)
        hook.handle = param.register_post_accumulate_grad_hook(hook)
        param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
        return hook


def _hooks_on(param: Tensor) -> list[_Hook]:
    hooks = param._post_accumulate_grad_hooks
    return [hook for hook in hooks.values() if type(hook) is _Hook] if hooks else []


def _remove(handles: dict[int, RemovableHandle]) -> None:
    while handles:
        handles.popitem()[1].remove()


def _callers_level() -> int:
    """The stack level, seen from who warns, of the line that is neither in this package nor in torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("statestream", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
