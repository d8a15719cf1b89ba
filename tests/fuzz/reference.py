"""FusedAdam as its documents describe it, slow and plain: one parameter after another, in NumPy.

It knows nothing of kernels, tables, arenas or chunks, and so nothing of what an offloaded optimizer does either: that
must be the same. A parameter's weights are patterns in row-major order; its state is in the order of the memory that
the parameter had when the state was last looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from native import payload_judge

from . import formats
from .arithmetic import Settings, adam
from .formats import BF16, FP16, FP32, INT16, Held, held

__all__ = ["Form", "Group", "Param", "Reference", "Saved"]

TENSORS = ("exp_avg", "exp_avg_sq", "param")
"""In the order of their numbers in the random bits."""


@dataclass(frozen=True)
class Form:
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    master: str | None
    """None, "fp32", "fp16" or "remainders"."""
    stochastic: bool
    seed: int
    capturable: bool = False

    def kinds(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """What is kept for a parameter of that dtype."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.master == "remainders" and dtype is not FP32:
            kinds["master_param"] = INT16 if dtype is BF16 else FP32
        elif self.master is not None and dtype is not FP32:
            kinds["master_param"] = FP16 if self.master == "fp16" else FP32
        return kinds

    def is_random(self, tensor: str, dtype: torch.dtype) -> bool:
        """Whether a step rounds it by random bits."""
        if tensor == "exp_avg_sq" and dtype in formats.SCALED:
            return True
        if tensor == "param":
            return self.stochastic and self.master is None and dtype is BF16
        return self.stochastic and dtype is not FP32


@dataclass
class State:
    order: np.ndarray
    kinds: dict[str, Held]
    step: np.float32 = field(default_factory=np.float32)


@dataclass(eq=False)
class Param:
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: np.ndarray
    weights: np.ndarray
    requires_grad: bool = True
    state: State | None = None

    def in_memory(self) -> np.ndarray:
        """Weights as float32, in memory order."""
        return formats.floats(self.dtype, self.weights[self.order])


@dataclass
class Group:
    params: list[Param]
    settings: Settings
    step: int = 0


@dataclass
class Saved:
    """A state dict: values in row-major order, float32, or uint16 for remainders."""

    sizes: list[int]
    settings: list[Settings]
    steps: list[int]
    states: dict[int, tuple[np.float32, dict[str, np.ndarray]]] = field(default_factory=dict)


class Reference:
    def __init__(self, form: Form):
        self.form, self.groups = form, []

    # ---- parameters and their state ----

    def placed(self) -> Iterator[tuple[int, Group, Param]]:
        """Each parameter once, with its place among all that are listed."""
        seen, place = set(), -1
        for group in self.groups:
            for param in group.params:
                place += 1
                if id(param) not in seen:
                    seen.add(id(param))
                    yield place, group, param

    def new(self, param: Param, name: str, dtype: torch.dtype) -> Held:
        if name == "master_param" and dtype is not INT16:
            return held(dtype, param.in_memory())
        if dtype is INT16:
            return Held(INT16, np.zeros(param.weights.size, np.uint16))
        return held(dtype, np.zeros(param.weights.size, np.float32), root=name == "exp_avg_sq")

    def made(self, param: Param) -> State:
        kinds = self.form.kinds(param.dtype)
        return State(param.order, {name: self.new(param, name, dtype) for name, dtype in kinds.items()})

    def follow(self, param: Param) -> State:
        """The parameter's state, made if there is none, brought to the dtype and the layout that it has now."""
        if param.state is None:
            param.state = self.made(param)
            return param.state
        state, kinds = param.state, self.form.kinds(param.dtype)
        moved = not np.array_equal(state.order, param.order)
        fresh: dict[str, Held] = {}
        for name, dtype in kinds.items():
            old = state.kinds.get(name)
            if old is not None and old.dtype is dtype and not moved:
                fresh[name] = old
            elif old is None or (old.dtype is INT16) != (dtype is INT16):
                fresh[name] = self.new(param, name, dtype)
            elif dtype is INT16:
                fresh[name] = Held(INT16, _reordered(old.patterns, state.order, param.order))
            else:
                fresh[name] = held(dtype, _reordered(old.values(), state.order, param.order), root=old.root)
        state.kinds, state.order = fresh, param.order
        return state

    def refresh(self, param: Param, state: State) -> None:
        """Where a master does not round to the weight, the weight was written, and wins."""
        master = state.kinds.get("master_param")
        if master is None or master.dtype is INT16:
            return
        weights, values = param.weights[param.order], master.values()
        written = formats.weight(param.dtype, values) != weights
        if written.any():
            state.kinds["master_param"] = held(master.dtype, np.where(written, param.in_memory(), values))

    # ---- the step ----

    def step(self, grads: dict[int, np.ndarray], grad_scale: float = 1.0, found_inf: bool = False) -> None:
        """`grads` by id of the parameter, float32 in row-major order."""
        if found_inf and not self.form.capturable:
            return
        with np.errstate(all="ignore"):
            for place, group, param in self.placed():
                grad = grads.get(id(param))
                if grad is not None:
                    state = self.follow(param)
                    self.refresh(param, state)
                    if not found_inf:
                        self._update(place, group.settings, param, state, grad, grad_scale)
        for group in self.groups:
            group.step += not found_inf

    def _update(
        self, place: int, settings: Settings, param: Param, state: State, grad: np.ndarray, grad_scale: float
    ) -> None:
        state.step = np.float32(state.step + np.float32(1))
        kinds, master = state.kinds, state.kinds.get("master_param")

        def drawn(tensor: str, dtype: torch.dtype) -> np.ndarray | None:
            if not self.form.is_random(tensor, dtype):
                return None
            return payload_judge.random_bits(self.form.seed, place, TENSORS.index(tensor), int(state.step), param.order)

        if master is None:
            before = param.in_memory()
        elif master.dtype is INT16:
            before = formats.joined(param.weights[param.order], master.patterns)
        else:
            before = master.values()
        moments = kinds["exp_avg"].values(), kinds["exp_avg_sq"].values()
        after, *moments = adam(before, grad[param.order], *moments, settings, int(state.step), grad_scale)
        for name, values in zip(TENSORS[:2], moments, strict=True):
            dtype = kinds[name].dtype
            kinds[name] = held(dtype, values, root=name == "exp_avg_sq", random=drawn(name, dtype))
        if master is not None and master.dtype is INT16:
            weights, low = formats.split(after)
            kinds["master_param"] = Held(INT16, low)
        else:
            if master is not None:
                kinds["master_param"] = held(master.dtype, after)
                after = kinds["master_param"].values()
            weights = formats.weight(param.dtype, after, drawn("param", param.dtype))
        param.weights[param.order] = weights

    # ---- checkpoints ----

    def save(self) -> Saved:
        saved = Saved(
            [len(group.params) for group in self.groups],
            [replace(group.settings) for group in self.groups],
            [group.step for group in self.groups],
        )
        for place, _, param in self.placed():
            if param.requires_grad or param.state is not None:
                state = self.follow(param)
                state = copy.deepcopy(state)  # a save writes no live master
                self.refresh(param, state)
                values = {
                    name: _row_major(h.patterns if h.dtype is INT16 else h.values(), state.order)
                    for name, h in state.kinds.items()
                }
                saved.states[place] = state.step, values
        return saved

    def refuses(self, saved: Saved) -> bool:
        """Whether a load must be an error, and change nothing."""
        if saved.sizes != [len(group.params) for group in self.groups]:
            return True
        for place, _, param in self.placed():
            _, values = saved.states.get(place, (None, {}))
            for name, dtype in self.form.kinds(param.dtype).items():
                if name in values and (values[name].dtype == np.uint16) != (dtype is INT16):
                    return True
        return False

    def load(self, saved: Saved) -> None:
        for place, _, param in self.placed():
            if place not in saved.states:
                param.state = None
                continue
            state = self.follow(param)
            state.step, values = saved.states[place]
            for name, old in state.kinds.items():
                if name not in values:
                    state.kinds[name] = self.new(param, name, old.dtype)
                elif old.dtype is INT16:
                    state.kinds[name] = Held(INT16, values[name][param.order])
                else:
                    with np.errstate(all="ignore"):
                        state.kinds[name] = held(old.dtype, values[name][param.order], root=name == "exp_avg_sq")
        for group, settings, step in zip(self.groups, saved.settings, saved.steps, strict=True):
            # In which form weight decay is taken is the optimizer's, not the checkpoint's.
            group.settings = replace(settings, decoupled=group.settings.decoupled)
            group.step = step


def _row_major(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    rows = np.empty_like(values)
    rows[order] = values
    return rows


def _reordered(values: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return _row_major(values, old)[new]
