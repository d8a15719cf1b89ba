"""What a stored state holds, and how far rounding to it may move a value: from the formats' definitions, with torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decoded", "scale_of_each", "storage_error"]

FP16, FP8 = torch.float16, torch.uint8
BLOCK = 256


def scale_of_each(optimizer: torch.optim.Optimizer, param: Tensor, name: str) -> Tensor | None:
    """For each element of a plain tensor's state the scale of its block of 256 in memory; None where it has none."""
    state = optimizer.state[param][name]
    if state.dtype not in (FP16, FP8):
        return None
    scales = getattr(optimizer, "inner", optimizer).backend.scales[param][name]
    assert scales.dtype is torch.float32 and scales.numel() == -(-state.numel() // BLOCK)
    in_memory = scales.repeat_interleave(BLOCK)[: state.numel()]
    return (
        torch.empty_like(state, dtype=torch.float32)
        .as_strided((state.numel(),), (1,))
        .copy_(in_memory)
        .as_strided(state.shape, state.stride())
    )


def decoded(optimizer: torch.optim.Optimizer, param: Tensor, name: str) -> Tensor:
    """A state's values as float32 (int16 remainders as they are): payload times scale, and of exp_avg_sq the square."""
    state, scale = optimizer.state[param][name], scale_of_each(optimizer, param, name)
    if scale is None:
        return state.clone() if state.dtype is torch.int16 else state.to(torch.float32, copy=True)
    payload = state.view(torch.float8_e4m3fn) if state.dtype is FP8 else state
    value = payload.float() * scale
    return value * value if name == "exp_avg_sq" else value


def storage_error(
    value: Tensor, dtype: torch.dtype, *, scale: Tensor | None = None, root: bool = False, by_random_bits: bool = False
) -> Tensor:
    """The most that rounding `value` to `dtype` may move it: half a unit in the last place to nearest, a whole one by
    random bits, twice that near a power of two, a subnormal's step near zero."""
    times = 2.0 if by_random_bits else 1.0
    if scale is None:
        bits, least = {torch.float32: (24, -126), torch.bfloat16: (8, -126), FP16: (11, -14)}[dtype]
        return times * (value.abs().double() * 2.0**-bits + 2.0 ** (least - bits + 1))
    held = value.double().abs().sqrt() if root else value.double().abs()
    bits, least = {FP16: (11, -14), FP8: (4, -6)}[dtype]
    moved = times * (held * 2.0**-bits + scale.double() * 2.0 ** (least - bits + 1)) + held * 2.0**-23
    return 2 * held * moved + moved**2 if root else moved
