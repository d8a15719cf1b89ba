"""State dicts of an offloaded optimizer, out of host memory and into it. Not a byte of state goes to the device."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.offload.element_ranges import ElementRanges
from statestream.offload.one_pass import OnePass
from statestream.offload.store import compact_copy
from statestream.offload.whole_parameters import WholeParameters
from statestream.sharding import local_share
from statestream.tensors import local_of

__all__ = ["export_state", "load_state"]

LOCAL_OPTIONS = ("capturable", "differentiable", "foreach", "fused")
"""Group settings that say how the optimizer runs here; a checkpoint does not change them."""


def export_state(units: ElementRanges | WholeParameters | OnePass, snapshot: bool) -> dict[str, Any]:
    inner = units.inner
    if isinstance(units, ElementRanges):
        units.adopt()  # all in one bank, rather than one by one as they are looked at
        chosen, inner.state_dict_cpu_offload = inner.state_dict_cpu_offload, snapshot
        try:
            return inner.state_dict()
        finally:
            inner.state_dict_cpu_offload = chosen
    if isinstance(units, WholeParameters):
        units.take_back(units.members.values())
    state_dict = inner.state_dict()
    if not snapshot:
        return state_dict
    return {key: compact_copy(value) for key, value in state_dict.items()}


def load_state(units: ElementRanges | WholeParameters | OnePass, state_dict: dict[str, Any]) -> None:
    if isinstance(units, ElementRanges):
        units.adopt()
        units.inner.load_state_dict(state_dict)
    else:
        _load_plain(units, state_dict)


@dataclass
class _Load:
    param: Tensor
    state: dict[str, Any]


def _load_plain(units: WholeParameters | OnePass, state_dict: dict[str, Any]) -> None:
    """torch's protocol, but that state goes to the host memory that is there, in its dtypes."""
    inner = units.inner
    for hook in list(inner._optimizer_load_state_dict_pre_hooks.values()):
        changed = hook(inner, state_dict)
        if changed is not None:
            state_dict = changed
    groups = state_dict["param_groups"]
    lengths = [len(g["params"]) for g in groups]
    wanted = [len(g["params"]) for g in inner.param_groups]
    if lengths != wanted:
        raise ValueError(f"the state dict has groups of {lengths} parameters, the optimizer of {wanted}")
    if isinstance(units, WholeParameters):
        pairs = zip(groups, inner.param_groups, strict=True)
        saved_for = [
            p for s, g in pairs for k, p in zip(s["params"], g["params"], strict=True) if state_dict["state"].get(k)
        ]
        units.reserve(saved_for)
    loads, names = [], units.names()
    for saved, group in zip(groups, inner.param_groups, strict=True):
        for key, param in zip(saved["params"], group["params"], strict=True):
            state = state_dict["state"].get(key)
            if state:
                label = names[id(param)]
                loads.append(_Load(param, {n: _checked(units, v, n, param, label) for n, v in state.items()}))
    kept = [{k: g[k] for k in LOCAL_OPTIONS if k in g} for g in inner.param_groups]
    others = {k: v for k, v in state_dict["state"].items() if k not in {p for g in groups for p in g["params"]}}
    with _without_load_hooks(inner):
        torch.optim.Optimizer.load_state_dict(inner, {"state": others, "param_groups": groups})
    for group, options in zip(inner.param_groups, kept, strict=True):
        group.update(options)
    for load in loads:
        inner.state[load.param] = _filled(units, load)
    inner.__setstate__({})  # brings the state of older versions of an optimizer up to date
    units.loaded()
    for hook in list(inner._optimizer_load_state_dict_post_hooks.values()):
        hook(inner)


def _checked(units: WholeParameters | OnePass, value: Any, name: str, param: Tensor, label: str) -> Any:
    """The local part of a saved value that fits; ValueError naming both shapes otherwise."""
    if not isinstance(value, Tensor) or value.dim() == 0 or isinstance(units, OnePass):
        return value
    member = units.members.get(id(param))
    kind = None if member is None else member.kinds.get(name)
    if value.shape == param.shape:
        local = local_share(value, param, name, label)
    else:
        local = local_of(value)
    if kind is not None and tuple(local.shape) != kind.shape:
        raise ValueError(
            f"{name} of {label}: local shape {tuple(local.shape)} in the state dict, {kind.shape} in the optimizer"
        )
    return value if kind is None else _Local(value, local)


@dataclass
class _Local:
    """A saved value and its local part."""

    value: Tensor
    local: Tensor


def _filled(units: WholeParameters | OnePass, load: _Load) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in load.state.items():
        if isinstance(units, OnePass):
            state[name] = (
                units.host_tensor(load.param, name, value) if isinstance(value, Tensor) else copy.deepcopy(value)
            )
        elif isinstance(value, _Local) or name in units.members[id(load.param)].kinds:
            local = value.local if isinstance(value, _Local) else value
            state[name] = units.fill(load.param, name, local)
        else:
            state[name] = value.detach().clone().cpu() if isinstance(value, Tensor) else copy.deepcopy(value)
    return state


@contextmanager
def _without_load_hooks(inner: torch.optim.Optimizer):
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    saved = {name: getattr(inner, name) for name in names}
    for name in names:
        setattr(inner, name, type(saved[name])())
    try:
        yield
    finally:
        for name, hooks in saved.items():
            setattr(inner, name, hooks)
