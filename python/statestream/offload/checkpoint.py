"""State dicts of an offloaded optimizer, out of host memory and into it. Not a byte of state goes to the device."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.arguments import HOW_TORCH_RUNS
from statestream.checkpoint.state_dict import check_settings, check_states_are_listed, checked_groups
from statestream.offload.adam.strategy import AdamStrategy
from statestream.offload.host.store import compact_copy
from statestream.offload.one_pass import OnePassStrategy
from statestream.offload.per_parameter.strategy import PerParameterStrategy
from statestream.optimizer_hooks import call_hooks, through_hooks, without_load_hooks
from statestream.tensors.local import is_fake, local_of
from statestream.tensors.sharding import shard_of
from statestream.tensors.validate import (
    FLOATS,
    check_has_data,
    count_of,
    named_in_errors,
    plain_tensor,
)

__all__ = ["export_state", "load_state"]


def export_state(strategy: AdamStrategy | PerParameterStrategy | OnePassStrategy, snapshot: bool) -> dict[str, Any]:
    inner = strategy.inner
    if isinstance(strategy, AdamStrategy):
        return strategy.state_dict(snapshot)
    if isinstance(strategy, PerParameterStrategy):
        strategy.take_back(strategy.members.values())
    state_dict = inner.state_dict()
    if not snapshot:
        return state_dict
    return {key: compact_copy(value) for key, value in state_dict.items()}


def load_state(strategy: AdamStrategy | PerParameterStrategy | OnePassStrategy, state_dict: dict[str, Any]) -> None:
    if isinstance(strategy, AdamStrategy):
        strategy.adopt()
        with strategy.inner_hooks.lent():
            strategy.inner.load_state_dict(state_dict)
    else:
        _load_in_place(strategy, state_dict)


@dataclass
class _Load:
    param: Tensor
    state: dict[str, Any]


@dataclass
class _Local:
    """A saved value and its local part, for a state whose place is known."""

    value: Tensor
    local: Tensor


def _load_in_place(strategy: PerParameterStrategy | OnePassStrategy, state_dict: dict[str, Any]) -> None:
    """As torch's load_state_dict, for an optimizer that is not FusedAdam. But all is checked before anything is
    written, and state keeps its place and its dtype."""
    inner = strategy.inner
    with strategy.inner_hooks.lent():
        state_dict = through_hooks(inner._optimizer_load_state_dict_pre_hooks, inner, state_dict)
    groups = checked_groups(state_dict)
    lengths = [len(g["params"]) for g in groups]
    wanted = [len(g["params"]) for g in inner.param_groups]
    if lengths != wanted:
        raise ValueError(f"the state dict has groups of {lengths} parameters, the optimizer of {wanted}")
    states, pairs = state_dict["state"], _pairs(groups, inner)
    check_states_are_listed(states, pairs)
    if isinstance(strategy, PerParameterStrategy):
        strategy.reserve([param for key, (param, _, _) in pairs.items() if states.get(key)])
    for number, (saved, group) in enumerate(zip(groups, inner.param_groups, strict=True)):
        check_settings(saved, group, number)
    loads, names = [], strategy.names()
    for key, (param, saved, group) in pairs.items():
        label = names[id(param)]
        with named_in_errors(label):
            if states.get(key):
                loads.append(_Load(param, _checked_state(strategy, states[key], param, saved, group, label)))
    if isinstance(strategy, PerParameterStrategy):
        strategy.make_room([load.param for load in loads])
    kept = [{k: g[k] for k in HOW_TORCH_RUNS if k in g} for g in inner.param_groups]
    others = {k: v for k, v in states.items() if k not in pairs}
    before = {key: inner.__dict__[key] for key in ("state", "param_groups")}
    try:
        with without_load_hooks(inner):
            torch.optim.Optimizer.load_state_dict(inner, {"state": others, "param_groups": groups})
    except BaseException:  # it makes new ones, and puts them in place before an optimizer's own __setstate__ runs
        inner.__dict__.update(before)
        raise
    strategy.torn[:] = [names[id(load.param)] for load in loads]  # until all is written
    for group, options in zip(inner.param_groups, kept, strict=True):
        group.update(options)
    for load in loads:
        inner.state[load.param] = _filled(strategy, load)
    inner.__setstate__({})  # brings the state of older versions of an optimizer up to date
    strategy.loaded()
    strategy.torn.clear()
    call_hooks(inner._optimizer_load_state_dict_post_hooks, inner)


Pairs = dict[Any, tuple[Tensor, Mapping[str, Any], dict[str, Any]]]
"""Parameters by their numbers in the state dict, each with its group there and here."""


def _pairs(groups: list[Mapping[str, Any]], inner: torch.optim.Optimizer) -> Pairs:
    pairs: Pairs = {}
    for number, (saved, group) in enumerate(zip(groups, inner.param_groups, strict=True)):
        for i, (key, param) in enumerate(zip(saved["params"], group["params"], strict=True)):
            if pairs.setdefault(key, (param, saved, group))[0] is not param:
                raise ValueError(f"parameter {i} of group {number}: the state dict has {key!r} for another one too")
    return pairs


def _checked_state(
    strategy: PerParameterStrategy | OnePassStrategy,
    state: Any,
    param: Tensor,
    saved: Mapping[str, Any],
    group: dict[str, Any],
    label: str,
) -> dict[str, Any]:
    """A parameter's state, each value as it will be held or as a _Local; ValueError for what does not fit."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of {label}: expected a dict, found {type(state).__name__}")
    checked = {name: _checked(strategy, value, name, param, label) for name, value in state.items()}
    # Which states there are may hang on which settings are zero or off.
    alike = all(bool(saved[k]) == bool(v) for k, v in group.items() if k in saved and isinstance(v, (bool, int, float)))
    if isinstance(strategy, PerParameterStrategy) and alike:
        for name in strategy.kinds_to_load(param):
            if name not in checked:
                raise ValueError(f"{name} of {label} is missing from the state dict")
    _check_taken(strategy.inner, param, checked, group)
    return checked


def _check_taken(inner: torch.optim.Optimizer, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Has the optimizer bring a twin's state up to date, as it will its own: what it misses it says here."""
    twin = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    values = {name: value.local if isinstance(value, _Local) else value for name, value in state.items()}
    twin.__dict__.update(state=defaultdict(dict, {param: values}), param_groups=[{**group, "params": [param]}])
    twin.__setstate__({})


def _checked(strategy: PerParameterStrategy | OnePassStrategy, value: Any, name: str, param: Tensor, label: str) -> Any:
    what = f"{name} of {label}"
    kind = strategy.kinds_to_load(param).get(name) if isinstance(strategy, PerParameterStrategy) else None
    if kind is not None or isinstance(value, Tensor):
        value = plain_tensor(value, what)
    if name == "step" and kind is None and (not isinstance(value, Tensor) or value.numel() == 1):
        count_of(value, what, local_of(param))
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if kind is not None and value.shape == param.shape:
        local = shard_of(value, param, name, label)
    else:
        local = local_of(value)
    check_has_data(local, what)
    if is_fake(local) and not is_fake(local_of(param)):
        raise ValueError(f"{what}: a tensor on {local.device} without data in the state dict")
    if kind is None:
        return value if isinstance(strategy, OnePassStrategy) else value.detach().clone().cpu()
    if tuple(local.shape) != kind.shape:
        raise ValueError(f"{what}: local shape {tuple(local.shape)} in the state dict, {kind.shape} in the optimizer")
    if local.dtype is not kind.dtype and not (local.dtype in FLOATS and kind.dtype in FLOATS):
        raise ValueError(f"{what}: {local.dtype} in the state dict, {kind.dtype} in the optimizer")
    return _Local(value, local)


def _filled(strategy: PerParameterStrategy | OnePassStrategy, load: _Load) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in load.state.items():
        if isinstance(value, _Local):
            state[name] = strategy.fill(load.param, name, value.local)
        elif isinstance(value, Tensor) and isinstance(strategy, OnePassStrategy):
            state[name] = strategy.host_tensor(load.param, name, value)
        else:
            state[name] = value
    return state
