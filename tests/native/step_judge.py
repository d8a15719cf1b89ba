"""What a step must store in any formats: the FP32 step that other tests judge, each result then stored by the
judges of storage and payloads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from statestream.kernels import AdamOptions

from native import payload_judge, storage_judge
from native.kernel_runner import (
    ALL_F32,
    F16,
    F32,
    I16,
    PAYLOADS,
    Dtypes,
    State,
    as_bfloat16,
    as_float32,
    as_payloads,
    bits,
    updated,
)

TENSORS = ("exp_avg", "exp_avg_sq", "param")
"""In the order of their numbers in a random key, and of the flags of `stochastic`."""


def stored_step(
    before: State,
    dtypes: Dtypes,
    options: AdamOptions,
    *,
    seed: int = 0,
    stochastic: int = 0,
    indices: np.ndarray | None = None,
) -> State:
    """The state after one update. `indices` are the elements' global ones; by default 0, 1, 2, ..."""
    n = before.param.numel()
    if dtypes.master is I16:
        weight = before.joined_master().view(np.float32)
    else:
        weight = before.values("param" if dtypes.master is None else "master")
    numbers = (weight, before.values("grad"), before.values("exp_avg"), before.values("exp_avg_sq"))
    tensors = (torch.from_numpy(np.array(x, np.float32)) for x in numbers)
    exact = updated(State(*tensors, None, before.step), ALL_F32, options)

    def drawn(name: str) -> np.ndarray | None:
        tensor = TENSORS.index(name)
        always = name == "exp_avg_sq" and dtypes.exp_avg_sq in PAYLOADS
        if not always and not stochastic >> tensor & 1:
            return None
        where = np.arange(n) if indices is None else indices
        return payload_judge.random_bits(seed, before.ordinal, tensor, int(exact.step.item()), where)

    scales: dict[str, torch.Tensor] = {}

    def stored(name: str, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
        random = None if name == "master" else drawn(name)
        if dtype in PAYLOADS:
            root = name == "exp_avg_sq"
            payloads, scale = payload_judge.stored_tensor(PAYLOADS[dtype], x.numpy(), root=root, random=random)
            scales[name] = torch.from_numpy(scale)
            return as_payloads(payloads, dtype)
        if dtype is F32:
            return as_float32(storage_judge.store_float32(bits(x)))
        if random is None:
            return as_bfloat16(storage_judge.round_to_bfloat16(bits(x)))
        return as_bfloat16(storage_judge.round_to_bfloat16_randomly(bits(x), random))

    want = replace(before, step=exact.step)
    for name in ("exp_avg", "exp_avg_sq"):
        setattr(want, name, stored(name, getattr(dtypes, name), getattr(exact, name)))
    if dtypes.master is I16:
        high, low = storage_judge.split(bits(exact.param))
        want.param, want.master = as_bfloat16(high), torch.from_numpy(low.view(np.int16))
    else:
        weight = exact.param
        if dtypes.master is not None:
            want.master = stored("master", dtypes.master, weight)
        if dtypes.master is F16:
            # A parameter is its master as stored, rounded.
            loaded = payload_judge.loaded_tensor(
                payload_judge.FP16, bits(want.master), scales["master"].numpy(), root=False
            )
            weight = torch.from_numpy(loaded)
        want.param = as_float16(weight) if dtypes.param is F16 else stored("param", dtypes.param, weight)
    want.scales = scales
    return want


def as_float16(x: torch.Tensor) -> torch.Tensor:
    """IEEE's half, by numpy; any NaN the quiet one."""
    with np.errstate(over="ignore"):
        patterns = x.numpy().astype(np.float16).view(np.uint16)
    return as_payloads(np.where(np.isnan(x.numpy()), payload_judge.QUIET_NAN[payload_judge.FP16], patterns), F16)
