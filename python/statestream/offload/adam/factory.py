"""State and scales of parameters in arenas, which stay where they are."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from statestream.state.factory import StateFactory
from statestream.state.state_format import MASTER, MOMENTS, STEP, StateFormat
from statestream.tensors.local import is_fake, local_of, same_layout

__all__ = ["STATES", "HostStateFactory", "scales_of"]

STATES = (*MOMENTS, MASTER)


def scales_of(name: str) -> str:
    """The kind of a state's scales, in an arena of their own: one of 4 bytes for each grain."""
    return f"{name} scales"


class HostStateFactory(StateFactory):
    """StateFactory whose tensors and scales are views of arenas: made, reset and kept in place.

    The arenas are those of `ranges`, an AdamStrategy, which owns the optimizer that owns this factory. Once it is gone
    this is a StateFactory like any other, of state that is in host memory still.
    """

    def __init__(self, state_format: StateFormat, ranges: Any):
        super().__init__(state_format)
        self._ranges = weakref.ref(ranges)
        self.torn = ranges.torn

    @property
    def ranges(self) -> Any:
        return self._ranges()

    @property
    def offloaded(self) -> bool:
        return self.ranges is not None

    def exports_to_host(self, asked: bool) -> bool:
        snapshot = None if self.ranges is None else self.ranges.snapshot
        return asked if snapshot is None else snapshot

    def make(self, param: Tensor) -> dict[str, Any]:
        ranges = self.ranges
        if ranges is None:
            return super().make(param)
        state = ranges.views(param)
        state[STEP].zero_()
        for name in MOMENTS:
            local_of(state[name]).zero_()
        for scale in self.scales.get(param, {}).values():
            scale.fill_(1.0)
        if MASTER in state:
            self.reset_master(param, state)
        return state

    def follow(self, param: Tensor, state: dict[str, Any]) -> None:
        ranges = self.ranges
        if ranges is None:
            super().follow(param, state)
            return
        local, dtypes = local_of(param), self.state_format.dtypes(param)
        others = {name: value for name, value in state.items() if name not in (STEP, *STATES)}
        fits = set(state) - set(others) == {STEP, *dtypes} and all(
            state[name].dtype is dtype and same_layout(local_of(state[name]), local) for name, dtype in dtypes.items()
        )
        if fits and ranges.holds(param, state):
            return
        # The parameter changed its shape, or someone put other tensors in the state: trainers do, which move all
        # they find to the device.
        ranges.wait()
        # Copies: the new place may be the old one, in another layout.
        old = {name: self.stored(param, name, state[name]).cloned() for name in dtypes if name in state}
        step = self.step_in(state).clone()
        state.clear()
        state.update(ranges.views(param) if fits else self.make(param))
        for name, value in old.items():
            self.carry(value, self.stored(param, name, state[name]))
        state[STEP].copy_(step)
        state.update(others)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the optimizer has no part in the arenas.
        return StateFactory, (self.state_format,), {"state_format": self.state_format, "scales": self.scales}

    def reset_master(self, param: Tensor, state: dict[str, Any]) -> None:
        if is_fake(local_of(param)):
            local_of(state[MASTER]).zero_()  # of a parameter without data the first step makes the master
        else:
            super().reset_master(param, state)
