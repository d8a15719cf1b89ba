"""torch's state-dict protocol for an optimizer whose state is not kept as it is saved.

torch.optim.Optimizer's own methods run the hooks around unconverted state, and its load casts every
state to the parameter's dtype. Here the hooks see what is saved, and a load is checked as a whole
before anything is written.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from statestream.arguments import HOW_TORCH_RUNS, check_group_options
from statestream.state.format_version import SAYS_NOTHING, Masters, check_held, masters_in
from statestream.state.lazy_state import peek
from statestream.state.state_format import MASTER, STATES, STEP, StateFormat
from statestream.tensors.local import is_fake, local_of, same_layout
from statestream.tensors.quantized import is_quantized
from statestream.tensors.sharding import shard_of
from statestream.tensors.validate import (
    FLOATS,
    check_has_data,
    count_of,
    named_in_errors,
    plain_tensor,
    readable,
    shown,
)

__all__ = [
    "LoadPlan",
    "as_kept",
    "as_state_dict",
    "check_settings",
    "check_states_are_listed",
    "checked_groups",
    "pack_groups",
    "plan_load",
    "take_apart",
    "tensors_of",
    "update_group",
]

_OWN_KEYS = frozenset(("params", "decoupled_weight_decay", "format_version", *HOW_TORCH_RUNS))
"""Group keys that say how this optimizer runs: a checkpoint does not change them."""


def as_state_dict(state_dict: Any) -> dict[str, Any]:
    """A shallow copy. ValueError for what is no dict."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict: expected a dict, found {type(state_dict).__name__}")
    return dict(state_dict)


def checked_groups(state_dict: Any) -> list[Mapping[str, Any]]:
    """The groups of a nested state dict, once it has the form of one: a dict of states, a list of groups, each with a
    list of different numbers or names of parameters."""
    state_dict = as_state_dict(state_dict)
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}; expected 'state' and 'param_groups'")
        found = state_dict[key]
        if not isinstance(found, kind) or isinstance(found, (str, bytes)):
            wanted = "dict" if kind is Mapping else "list"
            raise ValueError(f"{key!r} of the state dict: expected a {wanted}, found {type(found).__name__}")
    groups = list(state_dict["param_groups"])
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise ValueError(f"group {number} of the state dict: expected a dict, found {type(group).__name__}")
        if "params" not in group:
            raise ValueError(f"group {number} of the state dict has no 'params'")
        params = group["params"]
        if not isinstance(params, (list, tuple)):
            raise ValueError(f"'params' of group {number}: expected a list, found {type(params).__name__}")
        for key in params:
            if not isinstance(key, (int, str, tuple)):
                raise ValueError(
                    f"'params' of group {number}: {type(key).__name__} is no number or name of a parameter"
                )
    return groups


def check_states_are_listed(states: Mapping[Any, Any], listed: Collection[Any]) -> None:
    """ValueError for state under a number that no group lists: of other numbers than the groups', or of parameters that
    are missing there. Under a name it may be a user's own."""
    for key in states:
        if not isinstance(key, str) and key not in listed:
            raise ValueError(
                f"the state dict has state of parameter {key!r}, which none of its groups lists; they list "
                f"{', '.join(map(repr, list(listed)[:8])) or 'none'}"
            )


def check_settings(saved: Mapping[str, Any], live: Mapping[str, Any], number: int) -> None:
    """ValueError for a setting of a group that is of another kind than the optimizer's own: no number (or none at all,
    as NaN is) where that has one, no pair of them where that has a pair."""
    for key, own in live.items():
        if key == "params" or key not in saved:
            continue
        with named_in_errors(f"{key} of group {number}"):
            found = readable(saved[key], "it") if isinstance(saved[key], Tensor) else saved[key]
            several = isinstance(own, (tuple, list)) and len(own) > 0 and all(map(_is_number, own))
            if several and (not isinstance(found, (tuple, list)) or len(found) != len(own)):
                raise ValueError(f"{shown(found)} is not {len(own)} numbers")
            for new in found if several else [found] if _is_number(own) else []:
                if not _is_number(new) or math.isnan(new):
                    raise ValueError(f"{shown(new)} is not a number")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = readable(value, "it")
        return value.numel() == 1 and value.dtype in FLOATS and not is_fake(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def pack_groups(groups: list[dict[str, Any]], snapshot: bool) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Groups with parameters as indices, as torch numbers them, and the parameters in that order."""
    index: dict[int, int] = {}
    params: list[Tensor] = []
    packed_groups = []
    start = 0
    for group in groups:
        packed = {k: _plain(v) for k, v in group.items() if k != "params"}
        if snapshot:
            packed = {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in packed.items()}
        for i, param in enumerate(group["params"], start):
            if id(param) not in index:
                index[id(param)] = i
                params.append(param)
        packed["params"] = [index[id(param)] for param in group["params"]]
        start += len(group["params"])
        packed_groups.append(packed)
    return packed_groups, params


@dataclass
class ParamLoad:
    """What one parameter's state becomes. `values` is None where the checkpoint has no state for it; `other` is what
    a user keeps beside it."""

    param: Tensor
    values: dict[str, Tensor] | None
    step: float = 0.0
    other: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoadPlan:
    params: list[ParamLoad] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    other: dict[str, Any] = field(default_factory=dict)
    """State under names that are no parameter's, as a user may keep it: passed on as it is."""


def plan_load(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], state_format: StateFormat, states: dict[Tensor, Any]
) -> LoadPlan:
    """Checks a whole state dict against the optimizer, whose state is `states`, and says what to write; writes nothing.

    Takes FusedAdam's own dict, torch.optim.AdamW's and Adam's, and Transformer Engine's, whose only
    count is the group's `step`; keyed by index or, as DCP leaves it, by parameter name.
    """
    saved_groups = checked_groups(state_dict)
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state dict has {len(saved_groups)} parameter groups, the optimizer has {len(groups)}")
    plan = LoadPlan()
    seen: set[int] = set()
    keys: dict[Any, Tensor] = {}
    unsaid: list[str] = []
    # The peer counts by group alone, this optimizer and torch's by parameter alone.
    listed = [state_dict["state"].get(key) for saved in saved_groups for key in saved["params"]]
    counted = any(isinstance(state, dict) and state.get(STEP) is not None for state in listed)
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {number}: the state dict has {len(saved['params'])} parameters, "
                f"the optimizer has {len(group['params'])}"
            )
        with named_in_errors(f"group {number}"):
            plan.groups.append(_checked_group(saved, group, number))
            held = masters_in(saved.get("format_version"), f"group {number}")
            names = saved.get("param_names") or group.get("param_names") or saved["params"]
            if not isinstance(names, (list, tuple)) or len(names) != len(saved["params"]):
                found = f"{len(names)}" if isinstance(names, (list, tuple)) else type(names).__name__
                raise ValueError(
                    f"group {number}: {found} param_names in the state dict for {len(saved['params'])} params"
                )
        for key, name, param in zip(saved["params"], names, group["params"], strict=True):
            label = _label(name)
            if keys.setdefault(key, param) is not param:
                raise ValueError(f"group {number}: the state dict has {key!r} for more parameters than {label}")
            if id(param) in seen:
                continue
            seen.add(id(param))
            state = state_dict["state"].get(key)
            own = peek(states, param) or {}
            with named_in_errors(label):
                count = None if counted else saved.get(STEP)
                load = _checked_state(state, count, param, label, state_format, own, held)
            plan.params.append(load)
            if saved.get("format_version") == SAYS_NOTHING and isinstance(key, str) and MASTER in (load.values or ()):
                unsaid.append(label)
    check_states_are_listed(state_dict["state"], keys)
    plan.other = {k: v for k, v in state_dict["state"].items() if isinstance(k, str) and k not in keys}
    if unsaid:
        warnings.warn(
            f"master_param of {unsaid[0]} and of {len(unsaid)} parameters in all: the checkpoint is of an earlier "
            "statestream and does not say whether it holds FP32 masters or remainders; if it was saved with another "
            "store_param_remainders, torch.distributed.checkpoint has cast them, and these masters go on from the "
            "weights as they are rounded",
            RuntimeWarning,
            stacklevel=4,
        )
    return plan


def tensors_of(state_dict: Any) -> list[Tensor]:
    """Plain (local) tensors among the states and settings of a state dict, which may be of any form."""
    if not isinstance(state_dict, Mapping):
        return []
    parts = [state_dict.get("state"), state_dict.get("param_groups")]
    lists = [part.values() if isinstance(part, Mapping) else part for part in parts]
    found = [each for part in lists if isinstance(part, Iterable) for each in part if isinstance(each, Mapping)]
    locals_ = [local_of(value) for each in found for value in each.values() if isinstance(value, Tensor)]
    return [t for t in locals_ if type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided]


def take_apart(loads: list[ParamLoad], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Copies the values that are memory of some other live state: the load might write that one first.

    A dict made without state_dict_cpu_offload holds live tensors, and may come back in another order.
    """
    live = {
        local_of(value).untyped_storage()._cdata
        for key, state in states.items()
        if isinstance(key, Tensor)
        for value in state.values()
        if isinstance(value, Tensor) and value.layout is torch.strided
    }
    for load in loads:
        own = states.get(load.param) or {}
        for name, values in (load.values or {}).items():
            if values.untyped_storage()._cdata in live and not _is_same_memory(values, own.get(name)):
                # In host memory: the device may have no room for it.
                load.values[name] = torch.empty_like(values, device="cpu").copy_(values)


def as_kept(value: Any, live: Any) -> Any:
    """A user's value out of a state dict, apart from it, on the device where the live one is."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to(live.device if isinstance(live, Tensor) else value.device, copy=True)


def _is_same_memory(values: Tensor, state: Tensor | None) -> bool:
    if state is None:
        return False
    local = local_of(state)
    return (
        values.storage_offset() == local.storage_offset()
        and values.untyped_storage()._cdata == local.untyped_storage()._cdata
        and values.dtype is local.dtype
        and same_layout(values, local)
    )


def update_group(group: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Takes over a checked group's settings. A tensor stays the tensor it is: CUDA graphs hold it."""
    for key, value in loaded.items():
        if isinstance(group.get(key), Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _plain(setting: Any) -> Any:
    """A setting as a checkpoint may hold it: schedules in NumPy leave NumPy's numbers, which
    torch.load(weights_only=True) refuses."""
    if type(setting) is tuple:
        return tuple(map(_plain, setting))
    if isinstance(setting, bool) or not isinstance(setting, Real):
        return setting
    return int(setting) if isinstance(setting, Integral) else float(setting)


def _label(name: Any) -> str:
    return f"parameter {name}" if isinstance(name, int) else f"'{name}'"


def _checked_group(saved: dict[str, Any], group: dict[str, Any], number: int) -> dict[str, Any]:
    loaded = {
        key: readable(value, f"{key} of group {number}") if isinstance(value, Tensor) else value
        for key, value in saved.items()
        if key not in _OWN_KEYS
    }
    if isinstance(loaded.get("betas"), list):
        loaded["betas"] = tuple(loaded["betas"])
    if loaded.get(STEP) is not None:
        count_of(loaded[STEP], f"step of group {number}", group.get(STEP))
    else:
        loaded.pop(STEP, None)
    check_group_options({**group, **loaded}, where=f" of group {number} in the state dict")
    return {key: _checked_setting(key, value, group, number) for key, value in loaded.items()}


def _checked_setting(key: str, value: Any, group: dict[str, Any], number: int) -> Any:
    """A group's setting as it will be held, apart from every live tensor; shaped as a live one that it is to fill."""
    live, what = group.get(key), f"{key} of group {number}"
    if isinstance(value, Tensor) and is_fake(value) and not any(is_fake(local_of(param)) for param in group["params"]):
        raise ValueError(f"{what}: a tensor on {value.device} without data in the state dict")
    if isinstance(live, Tensor):
        try:
            device = value.device if isinstance(value, Tensor) else "cpu"
            return torch.as_tensor(value, dtype=live.dtype, device=device).detach().reshape(live.shape).clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{what}: {value!r} in the state dict, a tensor of shape {tuple(live.shape)} in the optimizer"
            ) from error
    if not isinstance(value, Tensor):
        return int(value) if key == STEP else copy.deepcopy(value)
    if key == STEP:
        return int(value.item())
    return value.item() if key == "lr" and live is not None else value.detach().clone()


def _checked_state(
    state: Any,
    group_step: Any,
    param: Tensor,
    label: str,
    state_format: StateFormat,
    own: dict[str, Any],
    held: Masters | None,
) -> ParamLoad:
    if state is not None and not isinstance(state, Mapping):
        raise ValueError(f"the state of {label}: expected a dict, found {type(state).__name__}")
    # For a key that the checkpoint lacks DCP's flat load gives {}.
    present = {k: v for k, v in (state or {}).items() if v is not None and not (isinstance(v, dict) and not v)}
    if not present:
        if any(isinstance(v, dict) for v in (state or {}).values()):
            raise ValueError(
                f"{label} has no state in the flat state dict; to let it start anew, load the nested form with "
                "StateDictOptions(strict=False)"
            )
        return ParamLoad(param, None)
    if is_lazy(param):
        raise ValueError(
            f"{label}: it is not initialized, and the state dict has state of it; run the model once before"
        )
    dtypes = state_format.dtypes(param)
    other = {name: value for name, value in present.items() if name not in (STEP, *STATES)}
    for name in sorted(other, key=str):
        if name not in own:
            raise ValueError(
                f"{label}: the state dict has {name!r}, which is no state of Adam; take it out or, if it is yours, put "
                "such a key into the optimizer's state of that parameter first"
            )
    values = {}
    for name in dtypes:
        if name not in present:
            if name == MASTER:
                continue  # made from the parameter
            raise ValueError(f"{name} of {label} is missing from the state dict")
        values[name] = _checked_value(present[name], name, dtypes[name], param, label)
        if name == MASTER:
            of = None if is_quantized(local_of(param)) else param.dtype
            check_held(held, values[name].dtype, of, f"{name} of {label}")
    step = present.get(STEP, group_step)
    if step is None:
        raise ValueError(f"step of {label} is missing from the state dict, and its group has none")
    return ParamLoad(param, values, count_of(step, f"step of {label}", local_of(param)), other)


def _checked_value(value: Any, name: str, dtype: torch.dtype, param: Tensor, label: str) -> Tensor:
    value = plain_tensor(value, f"{name} of {label}")
    if value.shape != param.shape:
        raise ValueError(
            f"{name} of {label}: shape {tuple(value.shape)} in the state dict, {tuple(param.shape)} in the optimizer"
        )
    if (dtype is torch.int16) != (value.dtype is torch.int16) or not (
        value.dtype is torch.int16 or value.dtype in FLOATS
    ):
        wanted = "int16 remainders" if dtype is torch.int16 else "floating-point values"
        raise ValueError(
            f"{name} of {label}: {value.dtype} in the state dict, {wanted} wanted; build the optimizer with "
            f"store_param_remainders={value.dtype is torch.int16} to read it"
        )
    local = shard_of(value, param, name, label)
    check_has_data(local, f"{name} of {label}")
    return local
