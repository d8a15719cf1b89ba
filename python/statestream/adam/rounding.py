"""Which tensors an update rounds by random bits, and by which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.formats import Role, formats_of
from statestream.kernels import Formats
from statestream.state.state_format import StateFormat

__all__ = ["Rounding"]

PARAM = "param"
_FLAGS = {
    "exp_avg": kernels.STOCHASTIC_EXP_AVG,
    "exp_avg_sq": kernels.STOCHASTIC_EXP_AVG_SQ,
    PARAM: kernels.STOCHASTIC_PARAM,
}
_SHORT = frozenset(f.code for f in formats_of(Role.MOMENT).values() if f.is_short)


@dataclass(frozen=True)
class Rounding:
    """`flags` of statestream.kernels; `asked_for_param`: whether the parameter was named, rather than everything."""

    seed: int = 0
    flags: int = 0
    asked_for_param: bool = False

    @classmethod
    def checked(cls, stochastic_rounding: Any, seed: Any, state_format: StateFormat) -> Rounding:
        """Of FusedAdam's arguments. ValueError for a name that is not known, or of a tensor that is not rounded so."""
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed: {seed!r} is not valid; give an integer from 0 up to, not including, 2**64")
        reasons = {name: why for name in _FLAGS if (why := _why_not(name, state_format))}
        if isinstance(stochastic_rounding, bool):
            names = [name for name in _FLAGS if name not in reasons] if stochastic_rounding else []
            return cls(seed, sum(_FLAGS[name] for name in names))
        names = _names(stochastic_rounding)
        for name in names:
            if name not in _FLAGS:
                raise ValueError(f"stochastic_rounding: {name!r} is not known; use 'exp_avg', 'exp_avg_sq' or 'param'")
            if name in reasons:
                raise ValueError(f"stochastic_rounding: {name!r} is not rounded so: {reasons[name]}")
        return cls(seed, sum(_FLAGS[name] for name in names), PARAM in names)

    def check(self, local: Tensor, name: str) -> None:
        """ValueError for a (local) parameter that is not rounded as it was asked for."""
        if self.asked_for_param and local.dtype is torch.float16:
            raise ValueError(
                f"{name}: float16 parameters are rounded to nearest; leave 'param' out of stochastic_rounding, or use "
                "bfloat16 parameters or masters"
            )

    def of(self, formats: Formats) -> int:
        """The flags of what these formats round."""
        flags = 0
        if formats.exp_avg in _SHORT:
            flags |= kernels.STOCHASTIC_EXP_AVG
        if formats.exp_avg_sq in _SHORT:
            flags |= kernels.STOCHASTIC_EXP_AVG_SQ
        if formats.param == kernels.BFLOAT16 and formats.master == kernels.NONE:
            flags |= kernels.STOCHASTIC_PARAM
        return flags & self.flags


def _why_not(name: str, state_format: StateFormat) -> str | None:
    if name == PARAM:
        kept = "remainders keep" if state_format.remainders else "a master keeps"
        return (
            f"{kept} the bits that it lacks; leave it out, or use master_weights=False"
            if state_format.master_weights
            else None
        )
    dtype = getattr(state_format, name)
    return f"it is stored as {dtype}, exactly" if dtype is torch.float32 else None


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(
            f"stochastic_rounding: {value!r} is not valid; give True, False, or a list of 'exp_avg', 'exp_avg_sq' and "
            "'param'"
        )
    return tuple(dict.fromkeys(value))
