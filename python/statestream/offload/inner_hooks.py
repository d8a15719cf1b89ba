"""What an optimizer does by itself while a CPUOffloadOptimizer has its state: nothing that would go wrong.

By hooks that torch runs in the optimizer's own methods. So nothing of its class and nothing on the object is replaced,
and a scheduler that was given the optimizer, before or after, goes on working.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["InnerHooks", "hooks_of_others", "inner_hooks_of"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


class InnerHooks:
    """Of a Strategy (strategy.py) over its optimizer, which holds it as well; neither is held.

    While that is there, the optimizer's own `step()` and `load_state_dict` raise, and its `state_dict()` waits for
    the last stores. Once that is gone the optimizer is one like any other, with its state in host memory. After
    `close` it does nothing any more.
    """

    def __init__(self, strategy: Any):
        self._strategy, self._name = weakref.ref(strategy), type(strategy.inner).__name__
        self._handles: list[Any] = []
        self._lent = self.closed = False
        self._last_store: tuple[Any, Any] | None = None

    def begin(self, inner: torch.optim.Optimizer) -> None:
        """From here on; of whoever had it before no more."""
        before = inner_hooks_of(inner)
        step = inner.register_step_pre_hook(self._before_step)
        inner._optimizer_step_pre_hooks.move_to_end(step.id, last=False)
        export = inner.register_state_dict_pre_hook(self._before_export, prepend=True)
        load = inner.register_load_state_dict_pre_hook(self._before_load, prepend=True)
        self._handles = [step, export, load]
        for handle in () if before is None else before._handles:
            handle.remove()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within, the optimizer's hooks and its load are called by whoever has its state."""
        self._lent = True
        try:
            yield
        finally:
            self._lent = False

    def stored(self, device: Any, event: Any) -> None:
        """After `event` of the device host memory holds what the last step made. None: it stored nothing."""
        if event is not None:
            self._last_store = device, event

    def wait(self) -> None:
        """Until it does."""
        if self._last_store is not None:
            device, event = self._last_store
            device.synchronize(event)
            self._last_store = None

    def _before_step(self, *_: Any) -> None:
        self._check("step")

    def _before_export(self, *_: Any) -> None:
        self._check_open()
        self.wait()

    def _before_load(self, *_: Any) -> None:
        self._check("load_state_dict")

    def _check(self, call: str) -> None:
        self._check_open()
        if self._strategy() is not None and not self._lent:
            raise RuntimeError(
                f"{call}() of this {self._name}: its state is in host memory; call {call}() of the CPUOffloadOptimizer "
                "over it"
            )
        self.wait()

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(
                f"this {self._name} has no state any more: the CPUOffloadOptimizer over it was closed; build a new "
                "optimizer, and load what was saved"
            )


def inner_hooks_of(inner: torch.optim.Optimizer) -> InnerHooks | None:
    """The hooks on an optimizer whose state is in host memory; None on any other."""
    owners = (getattr(hook, "__self__", None) for hook in inner._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, InnerHooks)), None)


def hooks_of_others(inner: torch.optim.Optimizer) -> dict[str, OrderedDict]:
    """The optimizer's hooks but for those of its CPUOffloadOptimizer, for a twin of it."""
    return {
        name: OrderedDict(
            (key, hook)
            for key, hook in getattr(inner, name).items()
            if not isinstance(getattr(hook, "__self__", None), InnerHooks)
        )
        for name in _HOOKS
    }
