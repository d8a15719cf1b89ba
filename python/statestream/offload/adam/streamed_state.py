"""State and scales of parameters in arenas, which stay where they are."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from statestream.adam.grad_scaling import StepNumbers
from statestream.adam.rounding import Rounding
from statestream.adam.state_backend import ResidentState, SteppedOptimizer
from statestream.state.state_format import MASTER, MOMENTS, STATES, STEP, StateFormat
from statestream.tensors.local import is_fake, local_of, same_layout

if TYPE_CHECKING:
    from statestream.offload.adam.strategy import AdamStrategy

__all__ = ["StreamedState", "scales_of"]


def scales_of(name: str) -> str:
    """The kind of a state's scales, in an arena of their own: one of 4 bytes for each grain."""
    return f"{name} scales"


class StreamedState(ResidentState):
    """State whose tensors and scales are views of arenas in host memory: made, reset and kept in place, and stepped by
    `strategy`, an AdamStrategy, which owns the arenas and the optimizer.

    Once that is gone this is a ResidentState like any other, of state that is in host memory still.
    """

    def __init__(self, state_format: StateFormat, rounding: Rounding, strategy: AdamStrategy):
        super().__init__(state_format, rounding)
        self._strategy = weakref.ref(strategy)
        self.torn = strategy.torn

    @property
    def strategy(self) -> AdamStrategy | None:
        return self._strategy()

    @property
    def offloaded(self) -> bool:
        return self.strategy is not None

    def exports_to_host(self, asked: bool) -> bool:
        snapshot = None if self.strategy is None else self.strategy.snapshot
        return asked if snapshot is None else snapshot

    def step(self, optimizer: SteppedOptimizer, numbers: StepNumbers) -> None:
        strategy = self.strategy
        if strategy is None:
            super().step(optimizer, numbers)
        else:
            strategy.stream(numbers)
            self.step_bytes = strategy.step_bytes

    def computing(self) -> AbstractContextManager[Any]:
        return super().computing() if self.strategy is None else self.strategy.device.computing()

    def detached(self, optimizer: SteppedOptimizer) -> SteppedOptimizer:
        return optimizer if self.strategy is None else self.strategy.detached()

    def make(self, param: Tensor) -> dict[str, Any]:
        strategy = self.strategy
        if strategy is None:
            return super().make(param)
        state = strategy.views(param)
        state[STEP].zero_()
        for name in MOMENTS:
            local_of(state[name]).zero_()
        for scale in self.scales.get(param, {}).values():
            scale.fill_(1.0)
        if MASTER in state:
            self.reset_master(param, state)
        return state

    def follow(self, param: Tensor, state: dict[str, Any]) -> None:
        strategy = self.strategy
        if strategy is None:
            super().follow(param, state)
            return
        local, dtypes = local_of(param), self.state_format.dtypes(param)
        others = {name: value for name, value in state.items() if name not in (STEP, *STATES)}
        fits = set(state) - set(others) == {STEP, *dtypes} and all(
            (tensor := self.stored(param, name, state[name]).local).dtype is dtype and same_layout(tensor, local)
            for name, dtype in dtypes.items()
        )
        if fits and strategy.holds(param, state):
            return
        # The parameter changed its shape, or someone put other tensors in the state: trainers do, which move all
        # they find to the device.
        strategy.wait()
        # Copies: the new place may be the old one, in another layout.
        old = {name: self.stored(param, name, state[name]).cloned() for name in dtypes if name in state}
        step = self.step_in(state).clone()
        state.clear()
        state.update(strategy.views(param) if fits else self.make(param))
        for name, value in old.items():
            self.carry(value, self.stored(param, name, state[name]))
        state[STEP].copy_(step)
        state.update(others)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the optimizer has no part in the arenas.
        return ResidentState, *super().__reduce__()[1:]

    def reset_master(self, param: Tensor, state: dict[str, Any]) -> None:
        if is_fake(local_of(param)):
            local_of(state[MASTER]).zero_()  # of a parameter without data the first step makes the master
        else:
            super().reset_master(param, state)
