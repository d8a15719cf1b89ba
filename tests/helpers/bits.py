"""Comparison of optimizers by bits: dtype, layout and every bit, so that NaN equals itself and -0.0 is not 0.0."""

from __future__ import annotations

from typing import Any

import torch
from statestream import FusedAdam
from torch import Tensor

__all__ = ["differences", "same_bits", "snapshot"]

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits; the layout may differ."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    integer = _AS_INTEGER[a.element_size()]
    return torch.equal(a.detach().contiguous().view(integer), b.detach().contiguous().view(integer))


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all that a run consists of: parameters, state as stored, scales, counters, group settings.

    Reads state of parameters that have some; does not bring state into being.
    """
    found: dict[str, Any] = {}
    states = dict(optimizer.state.items())  # asking the optimizer's own dict would make them
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"group {g} {key}"] = _copy(value)
        for p, param in enumerate(group["params"]):
            found[f"group {g} param {p}"] = _copy(param)
            for name, value in (states.get(param) or {}).items():
                found[f"group {g} param {p} {name}"] = _copy(value)
            for name, value in _scales(optimizer, param).items():
                found[f"group {g} param {p} scales of {name}"] = _copy(value)
    return found


def _scales(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    optimizer = getattr(optimizer, "inner", optimizer)
    return optimizer.backend.scales.get(param, {}) if isinstance(optimizer, FusedAdam) else {}


def differences(a: dict[str, Any], b: dict[str, Any], *, ignoring: tuple[str, ...] = ()) -> list[str]:
    """Names of what two snapshots differ in; entries whose last word is in `ignoring` are passed over."""
    names = [name for name in {**a, **b} if name.rsplit(" ", 1)[-1] not in ignoring]
    return [name for name in names if name not in a or name not in b or not _same(a[name], b[name])]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        return False
    if isinstance(a, Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and a == b
