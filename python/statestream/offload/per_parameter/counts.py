"""What an optimizer counts for itself in a step: in a group, in an attribute, in state that belongs to no parameter.

A step in chunks calls the optimizer several times. Each call has to start from the counts that the step began with, and
without those that the first step makes. Afterwards each count has to be what one call made of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.tensors.local import copy_version

__all__ = ["Counts", "own_copy"]

_MOST_ELEMENTS = 64
"""A larger tensor is no count: it may be what an optimizer keeps of a parameter under a name of its own."""

_TORCHS = {"state", "param_groups", "defaults", "_hook_for_profile", "_zero_grad_profile_name"}
"""Attributes of every optimizer: its groups and state are looked at by themselves."""


class Counts:
    """Settings of groups, attributes, and state under other keys than parameters: as they were when a step began, and
    what its calls have changed since."""

    def __init__(self, inner: torch.optim.Optimizer):
        seen = {id(p) for group in inner.param_groups for p in group["params"]}
        self._kept = [
            *(_Kept(group, seen, lambda key: key == "params") for group in inner.param_groups),
            _Kept(inner.state, seen, lambda key: isinstance(key, Tensor)),
            _Kept(vars(inner), seen, lambda key: key in _TORCHS or key.startswith("_optimizer_")),
        ]
        self._changes: list[Any] = [None] * len(self._kept)
        self._before = self._changes
        self._calls, self._undone = 0, False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of the optimizer."""
        self._calls += 1
        self._before, self._undone = self._changes, True  # until it has ended well
        yield
        self._changes = [_merged(old, kept.change()) for old, kept in zip(self._changes, self._kept, strict=True)]
        self._undone = False

    def undone(self) -> None:
        """What the last call has updated was put back: what it has counted does not count."""
        self._changes, self._undone = self._before, True

    def set_back(self) -> None:
        """To what the step began with."""
        for kept in self._kept:
            kept.restore()

    def finish(self) -> None:
        """Leaves what the calls have counted, each count once."""
        if self._calls > 1 or self._undone:
            self.set_back()
            for kept, change in zip(self._kept, self._changes, strict=True):
                kept.apply(change)


@dataclass
class _New:
    """A change to another value; `gone`: it was taken out."""

    value: Any
    gone: bool = False


class _Kept:
    """A value as it was: of a dict or a list also its values, of a small tensor its elements.

    What has changed is None (nothing), a _New, a Tensor (its elements now) or a dict (what has changed within, by key).
    """

    def __init__(self, value: Any, seen: set[int], passed: Callable[[Any], bool] = lambda key: False):
        self.value, self.passed = value, passed
        self.within: dict[Any, _Kept] | None = None
        self.elements: Tensor | None = None
        if id(value) in seen:
            return
        if isinstance(value, (dict, list)):
            seen.add(id(value))
            self.within = {key: _Kept(v, seen) for key, v in _items(value) if not passed(key)}
        elif _is_small(value):
            seen.add(id(value))
            self.elements, self.version = value.detach().clone(), copy_version(value)

    def _is_written(self) -> bool:
        if self.value.device.type == "cpu":
            return not torch.equal(self.value, self.elements)
        version = copy_version(self.value)  # a look at the elements would wait for the device
        return version is None or version != self.version

    def restore(self) -> None:
        if self.elements is not None and self._is_written():
            self._write(self.elements)
            self.version = copy_version(self.value)
        if self.within is not None:
            for kept in self.within.values():
                kept.restore()
            self._fill({key: kept.value for key, kept in self.within.items()})

    def change(self) -> Any:
        if self.elements is not None:
            return self.value.detach().clone() if self._is_written() else None
        if self.within is None:
            return None
        now = {key: value for key, value in _items(self.value) if not self.passed(key)}
        changes = {key: _New(None, gone=True) for key in self.within if key not in now}
        for key, value in now.items():
            kept = self.within.get(key)
            changes[key] = kept.change() if kept is not None and _is_same(kept.value, value) else _New(value)
        return {key: change for key, change in changes.items() if change is not None} or None

    def apply(self, change: Any) -> None:
        """Where everything is as it was."""
        if isinstance(change, Tensor):
            self._write(change)
        elif change is not None:
            now = {key: kept.value for key, kept in self.within.items()}
            for key, inner in change.items():
                if not isinstance(inner, _New):
                    self.within[key].apply(inner)
                elif inner.gone:
                    del now[key]
                else:
                    now[key] = inner.value
            self._fill(now)

    def _write(self, elements: Tensor) -> None:
        self.value.detach().copy_(elements)

    def _fill(self, now: dict[Any, Any]) -> None:
        if isinstance(self.value, list):
            self.value[:] = now.values()
            return
        for key in [key for key in self.value if key not in now and not self.passed(key)]:
            del self.value[key]
        for key, value in now.items():
            if self.value.get(key, now) is not value:
                self.value[key] = value


def own_copy(value: Any, instead: dict[int, Any]) -> Any:
    """A value that may be written and leaves no trace: dicts, lists and small tensors in it are copies, and all else is
    the same. `instead` says what stands for which object, by id."""
    if id(value) in instead:
        return instead[id(value)]
    if isinstance(value, (dict, list)):
        new = instead[id(value)] = copy.copy(value)
        for key, inner in _items(value):
            new[key] = own_copy(inner, instead)
        return new
    return value.detach().clone() if _is_small(value) else value


def _items(value: dict[Any, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _is_small(value: Any) -> bool:
    if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
        return False
    return value.numel() <= _MOST_ELEMENTS and value.device.type != "meta"


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(old, (int, float, str)) and type(old) is type(new) and old == new)


def _merged(old: Any, new: Any) -> Any:
    """Two changes of calls that began alike: what both have changed is as the second left it."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), change) for key, change in new.items()}
    if isinstance(old, _New) and isinstance(new, _New) and isinstance(old.value, dict) and isinstance(new.value, dict):
        for key, value in old.value.items():  # each has made it for its parameters
            new.value.setdefault(key, value)
    return new
