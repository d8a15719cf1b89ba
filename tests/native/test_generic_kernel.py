"""Every combination of formats that has no kernel of its own: what a step stores, with every instruction set."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from native.kernel_runner import (
    ADAMW,
    ALL_DTYPES,
    BF16,
    GENERIC_DTYPES,
    ISAS,
    PAYLOADS,
    Dtypes,
    State,
    assert_same_bits,
    bits,
    random_values,
    updated,
    use_isa,
)
from native.step_judge import TENSORS, stored_step

OPTIONS = (
    ADAMW,
    replace(ADAMW, decoupled=False, weight_decay=0.1, maximize=True),
    replace(ADAMW, beta1=0.3, beta2=0.4, lr=0.1, bias_correction=False),
    replace(ADAMW, eps=0.0, lr=0.3, weight_decay=0.5),
)
ELEMENTS = 3 * 256 + 77


def flags_taken(dtypes: Dtypes) -> list[int]:
    """Each set of flags that a call of these formats takes."""
    taken = [
        1 << tensor
        for tensor, name in enumerate(TENSORS)
        if getattr(dtypes, name) is BF16 or (name != "param" and getattr(dtypes, name) in PAYLOADS)
        if name != "param" or dtypes.master is None
    ]
    return [sum(flag for k, flag in enumerate(taken) if chosen >> k & 1) for chosen in range(1 << len(taken))]


@functools.cache
def wide_values(seed: int):
    values = random_values(ELEMENTS, seed=seed, specials=0.02)
    # A block that is zeros, and one whose largest are above what any scale reaches.
    for tensor in (values.grad, values.exp_avg, values.exp_avg_sq):
        tensor[256:512] = 0.0
    values.exp_avg_sq[600] = values.exp_avg[601] = values.weight[602] = float(np.finfo(np.float32).max)
    return values


def check(dtypes: Dtypes, index: int, isa: str, stochastic: int) -> None:
    options = OPTIONS[index % len(OPTIONS)]
    before = State.of(wide_values(index % 7), dtypes, step=index % 50)
    before.ordinal, seed = 3 + index, 2**64 - 1 - 12345 * index
    want = stored_step(before, dtypes, options, seed=seed, stochastic=stochastic)
    with use_isa(isa):
        after = updated(before, dtypes, options, seed=seed, stochastic=stochastic)
    assert_same_bits(after, want, f"{dtypes} {isa} stochastic {stochastic} {options}")


@pytest.mark.parametrize("index", range(len(GENERIC_DTYPES)), ids=lambda i: str(GENERIC_DTYPES[i]))
def test_a_step_stores_what_an_fp32_step_computes_rounded_once(index):
    """To nearest but for exp_avg_sq in a scaled format, and with every flag that the formats take."""
    dtypes = GENERIC_DTYPES[index]
    flags = flags_taken(dtypes)
    for isa in ISAS:
        for stochastic in {flags[0], flags[-1], flags[index % len(flags)]}:
            check(dtypes, index, isa, stochastic)


@pytest.mark.parametrize("dtypes", [d for d in ALL_DTYPES if len(flags_taken(d)) > 1], ids=str)
def test_flags_round_the_formats_of_hot_kernels_by_random_bits(dtypes, isa):
    for index, stochastic in enumerate(flags_taken(dtypes)):
        check(dtypes, index, isa, stochastic)


@pytest.mark.parametrize("dtypes", [d for d in ALL_DTYPES if len(flags_taken(d)) > 1], ids=str)
def test_a_flag_changes_the_tensor_it_names_and_no_other(dtypes, isa):
    before = State.of(random_values(ELEMENTS, seed=3), dtypes, step=2)
    nearest = updated(before, dtypes)
    for stochastic in flags_taken(dtypes)[1:]:
        after = updated(before, dtypes, stochastic=stochastic)
        for name, tensor in after.tensors():
            same = np.array_equal(bits(tensor), bits(getattr(nearest, name)))
            named = name in TENSORS and stochastic >> TENSORS.index(name) & 1
            assert same != bool(named), (name, stochastic)
