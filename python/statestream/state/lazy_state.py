"""`optimizer.state` that makes a parameter's state when it is first read."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["LazyState", "peek"]


class LazyState(defaultdict):
    """State of every group member, present as soon as anyone looks.

    It is true from the start, when it is still empty: DCP takes a false state for a reason to run a step
    of its own with zero gradients, which would leave every counter at 1. And since a look makes the
    state, a checkpoint of a fresh optimizer is complete, and a load into one drops nothing.

    `make(param)`, a method of the optimizer, returns a member's new state, or None for a key that is no member. A
    frozen member has state only once its brackets are read. One that cannot have any, such as a quantised base of
    integers, has an empty state, which is not kept. The optimizer owns the state, which holds it weakly: once the
    optimizer is gone, what was made stays, and nothing more is.
    """

    def __init__(self, make: Callable[[Tensor], dict[str, Any] | None] | None = None):
        super().__init__(dict)
        self.make = make

    @property
    def make(self) -> Callable[[Tensor], dict[str, Any] | None] | None:
        return None if self._make is None else self._make()

    @make.setter
    def make(self, make: Callable[[Tensor], dict[str, Any] | None] | None) -> None:
        self._make = None if make is None else weakref.WeakMethod(make)

    def __bool__(self) -> bool:
        return True

    def __missing__(self, key: Any) -> dict[str, Any]:
        make = self.make
        made = make(key) if make is not None and isinstance(key, Tensor) else None
        if made is not None and not made:
            return made
        self[key] = made if made is not None else {}
        return self[key]

    # `get` and `in` look too: torchtitan asks so before it makes state by a step of its own, and before it loads any.
    def get(self, key: Any, default: Any = None) -> Any:
        _ = key in self  # makes it
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        make = self.make
        if make is None or not isinstance(key, Tensor) or not key.requires_grad:
            return False
        made = make(key)
        if made:
            self[key] = made
        return bool(made)

    def __reduce__(self):
        # The owner's method stays behind; the owner's copy binds its own (Optimizer.__setstate__).
        return (LazyState, (), None, None, iter(self.items()))


def peek(states: dict[Tensor, dict[str, Any]], param: Tensor) -> dict[str, Any] | None:
    """A parameter's state if it is there already; looking so makes nothing. `states` may be any dictionary: trainers
    reset an optimizer by giving it another."""
    return dict.get(states, param)
