"""Values out of a state dict, which may come from anywhere: each is looked at before any is used, and none of them gets
to run code of its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from statestream.tensors.local import is_fake, local_of

__all__ = [
    "FLOATS",
    "MOST_STEPS",
    "as_state_dict",
    "check_has_data",
    "check_settings",
    "check_states_are_listed",
    "checked_groups",
    "count_of",
    "named_in_errors",
    "plain_tensor",
    "readable",
]

FLOATS = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""What numbers may be saved as: each of them is converted by torch, which does not convert every dtype that it has."""

MOST_STEPS = 2**30
"""Counts from here on are no counts: the random bits of an update know 30 bits of it, and a float32 stops at 2^24."""


@contextmanager
def named_in_errors(place: str) -> Iterator[None]:
    """Whatever goes wrong in a look at a value is a ValueError that names the place."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ValueError, RuntimeError)) and place in str(error):
            raise
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error


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
                raise ValueError(f"{_shown(found)} is not {len(own)} numbers")
            for new in found if several else [found] if _is_number(own) else []:
                if not _is_number(new) or math.isnan(new):
                    raise ValueError(f"{_shown(new)} is not a number")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = readable(value, "it")
        return value.numel() == 1 and value.dtype in FLOATS and not is_fake(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain_tensor(value: Any, what: str) -> Tensor:
    """`value` itself, or seen as a plain tensor where its class would be asked about every use of it. ValueError for
    what is no tensor of numbers in memory, or a DTensor of them."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{what}: expected a tensor, found {type(value).__name__}")
    cls = type(value)
    if cls.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # torch's own are DTensors, fake tensors, results of collectives.
        if not cls.__module__.startswith("torch."):
            raise ValueError(f"{what}: a tensor of class {cls.__name__} has no plain values; give a plain tensor")
    elif cls not in (Tensor, torch.nn.Parameter):
        with torch._C.DisableTorchFunctionSubclass():
            value = Tensor.as_subclass(value, Tensor)
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise ValueError(f"{what}: layout {layout} cannot be read")
    return value


def check_has_data(local: Tensor, what: str) -> None:
    """ValueError where the (local) tensor's memory does not reach to its last element: it was freed, or cut off."""
    if local.numel() == 0 or is_fake(local):
        return
    last = local.storage_offset() + sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True))
    held = local.untyped_storage().nbytes()
    if (last + 1) * local.element_size() > held:
        raise ValueError(
            f"{what}: {(last + 1) * local.element_size()} bytes are wanted for shape {tuple(local.shape)}, its memory "
            f"has {held}"
        )


def readable(value: Any, what: str) -> Tensor:
    """`value` as a plain tensor that can be read to its end."""
    value = plain_tensor(value, what)
    check_has_data(local_of(value), what)
    return value


def count_of(value: Any, what: str, live: Any = None) -> float:
    """A step count out of any of the forms it is saved in: int, float, tensor of one element. Where neither it nor the
    `live` tensor that it is for has data, there is nothing to read, and it is 0."""
    number, cause = math.nan, None
    if isinstance(value, Tensor):
        value = readable(value, what)
    try:
        if isinstance(value, Tensor):
            local = local_of(value)
            if isinstance(live, Tensor) and is_fake(local) and is_fake(live):
                return 0.0
            number = float(local.item()) if value.numel() == 1 else math.nan
        elif not isinstance(value, (str, bytes, bytearray)):
            number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        cause = error
    if not 0 <= number < MOST_STEPS or number != math.floor(number):
        try:
            raise ValueError(f"{what}: {_shown(value)} is not a count of steps") from cause
        finally:
            del cause  # its traceback holds this frame, which would hold it
    return number


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
