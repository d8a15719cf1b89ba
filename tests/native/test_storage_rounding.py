"""How FP32 results are stored, judged apart from how they are computed."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import replace

import numpy as np
import pytest
import torch
from statestream import kernels

from native import storage_judge
from native.kernel_runner import (
    ADAMW,
    ALL_DTYPES,
    ALL_F32,
    BF16,
    CHUNK,
    F32,
    I16,
    Dtypes,
    State,
    as_bfloat16,
    as_float32,
    assert_same_bits,
    bits,
    random_values,
    updated,
)

EVERY_HALF = np.arange(0x10000, dtype=np.uint32)
CUT_OFF_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""The exact number, its neighbours, and both sides of the halfway case."""


def boundary_patterns() -> np.ndarray:
    """FP32 patterns beside every BF16 number and every halfway case: normal, denormal, infinite, NaN."""
    return np.concatenate([EVERY_HALF << 16 | cut for cut in CUT_OFF_HALVES]).astype(np.uint32)


def encoded(patterns: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    stored = torch.empty(patterns.size, dtype=dtype)
    kernels.encode(as_float32(patterns), stored)
    return bits(stored)


def decoded(stored: torch.Tensor) -> np.ndarray:
    values = torch.full((stored.numel(),), 7.0)
    kernels.decode(stored, values)
    return bits(values)


def test_every_bfloat16_pattern_decodes_to_its_own_number(isa):
    want = storage_judge.store_float32(EVERY_HALF << 16)
    np.testing.assert_array_equal(decoded(as_bfloat16(EVERY_HALF)), want)


def test_every_boundary_encodes_to_the_nearest_even_bfloat16(isa):
    patterns = boundary_patterns()
    np.testing.assert_array_equal(encoded(patterns, BF16), storage_judge.round_to_bfloat16(patterns))


def test_float32_is_stored_as_it_is_and_any_nan_as_the_quiet_nan(isa):
    patterns = boundary_patterns()
    np.testing.assert_array_equal(encoded(patterns, F32), storage_judge.store_float32(patterns))
    np.testing.assert_array_equal(decoded(as_float32(patterns)), storage_judge.store_float32(patterns))


@pytest.mark.parametrize("n", [1, 7, 15, 16, 17, 31, 33, 257, 2 * CHUNK + 5])
def test_a_slice_of_any_length_converts_as_the_whole_does_and_no_further(n, isa):
    patterns = np.random.default_rng(n).integers(0, 2**32, n, dtype=np.uint32)
    stored = torch.full((n + 64,), 3.0, dtype=BF16)
    kernels.encode(as_float32(patterns), stored[32 : n + 32])
    np.testing.assert_array_equal(bits(stored[32 : n + 32]), storage_judge.round_to_bfloat16(patterns))
    values = torch.full((n + 64,), 3.0)
    kernels.decode(stored[32 : n + 32], values[32 : n + 32])
    np.testing.assert_array_equal(
        bits(values[32 : n + 32]), storage_judge.round_to_bfloat16(patterns).astype(np.uint32) << 16
    )
    for tensor in (stored, values):
        assert bool((tensor[:32] == 3).all()) and bool((tensor[n + 32 :] == 3).all())


def test_the_fast_judge_agrees_with_exact_fractions_and_with_torch():
    rng = np.random.default_rng(1)
    corners = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7F, 0x8000, 0x8001, 0xFF7F]
    patterns = [high << 16 | cut for high in corners for cut in CUT_OFF_HALVES]
    patterns += [p for p in rng.integers(0, 2**32, 2000).tolist() if p >> 23 & 0xFF != 0xFF]
    fast = storage_judge.round_to_bfloat16(np.array(patterns, np.uint32))
    assert [storage_judge.nearest_bfloat16(p) for p in patterns] == fast.tolist()
    everything = boundary_patterns()
    by_torch = bits(as_float32(everything).to(BF16))
    numbers = ~storage_judge.is_nan(everything)
    np.testing.assert_array_equal(storage_judge.round_to_bfloat16(everything)[numbers], by_torch[numbers])


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
def test_a_step_stores_what_an_fp32_step_computes_rounded_once(dtypes, isa):
    """The weight moves by the moments as computed: a step that used the stored ones would differ."""
    n = 5000
    before = State.of(random_values(n, seed=11, specials=0.03), dtypes, step=4)
    if dtypes.master is F32:
        weight = before.master
    elif dtypes.master is I16:
        weight = as_float32(before.joined_master())
    else:
        weight = before.param.float()
    in_fp32 = State(
        weight.clone(), before.grad.float(), before.exp_avg.float(), before.exp_avg_sq.float(), None, before.step
    )
    after, exact = updated(before, dtypes), updated(in_fp32, ALL_F32)

    want = replace(exact, param=exact.param, grad=before.grad)
    for name in ("exp_avg", "exp_avg_sq"):
        if getattr(dtypes, name) is BF16:
            setattr(want, name, as_bfloat16(storage_judge.round_to_bfloat16(bits(getattr(exact, name)))))
    if dtypes.master is I16:
        high, low = storage_judge.split(bits(exact.param))
        want.param, want.master = as_bfloat16(high), torch.from_numpy(low.view(np.int16))
    elif dtypes.param is BF16:
        want.param = as_bfloat16(storage_judge.round_to_bfloat16(bits(exact.param)))
        want.master = exact.param if dtypes.master is F32 else None
    assert_same_bits(after, want)


def denormal_state(dtypes) -> State:
    """Weights, gradients, squares of gradients and moments of which many are denormal; two threads' worth."""
    values = random_values(CHUNK + 5000, seed=2)
    for tensor, scale in ((values.weight, 1e-38), (values.grad, 1e-20), (values.exp_avg, 1e-37)):
        tensor[::7] *= scale
    values.exp_avg_sq[::7] *= 1e-35
    return State.of(values, dtypes, step=1)


DENORMAL_EPS = replace(ADAMW, eps=1e-40)
DENORMAL_LR = replace(ADAMW, lr=1e-40, weight_decay=0.0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "dtypes, options",
    [
        *((dtypes, ADAMW) for dtypes in ALL_DTYPES[::7]),
        pytest.param(ALL_F32, DENORMAL_EPS, id="denormal eps"),
        pytest.param(ALL_F32, DENORMAL_LR, id="denormal lr"),
    ],
    ids=lambda x: str(x) if isinstance(x, Dtypes) else "",
)
def test_flushing_denormals_changes_no_bit_and_stays_on(dtypes, options, threads, isa):
    before = denormal_state(dtypes)
    if options is DENORMAL_LR:
        before.param.zero_()
    want = updated(before, dtypes, options, threads=threads)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    try:
        got = updated(before, dtypes, options, threads=threads)
        still_flushing = (torch.tensor([1e-40]) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want)
    assert still_flushing


def test_denormals_are_still_kept_after_a_step(isa):
    updated(denormal_state(ALL_F32), ALL_F32, threads=2)
    assert (torch.tensor([1e-40]) * 1.0).item() != 0.0


def test_flushing_denormals_changes_no_bit_of_a_conversion(isa, flush_denormals):
    patterns = boundary_patterns()
    np.testing.assert_array_equal(encoded(patterns, BF16), storage_judge.round_to_bfloat16(patterns))
    want = storage_judge.store_float32(EVERY_HALF << 16)
    np.testing.assert_array_equal(decoded(as_bfloat16(EVERY_HALF)), want)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code of a rounding mode is the processor's")
@pytest.mark.parametrize("threads", [1, 3])
def test_the_callers_rounding_mode_changes_no_bit_and_stays(threads, isa):
    before = State.of(random_values(2 * CHUNK, seed=6), ALL_F32, step=6)
    want = updated(before, ALL_F32, grad_scale=3.0, threads=threads)
    libm, upward = ctypes.CDLL("libm.so.6"), 0x800
    libm.fesetround(upward)
    try:
        got = updated(before, ALL_F32, grad_scale=3.0, threads=threads)
        kept = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert_same_bits(got, want)
    assert kept == upward


def test_refresh_takes_the_weight_where_the_master_does_not_round_to_it(isa):
    n = 2 * CHUNK + 9
    rng = np.random.default_rng(8)
    master = boundary_patterns()[rng.integers(0, 6 * 0x10000, n)]
    weight = storage_judge.round_to_bfloat16(master)
    changed = rng.random(n) < 0.3
    weight[changed] = rng.integers(0, 0x10000, changed.sum())
    want = np.where(storage_judge.round_to_bfloat16(master) == weight, master, weight.astype(np.uint32) << 16)
    got = as_float32(master)
    kernels.refresh_master(as_bfloat16(weight), got)
    np.testing.assert_array_equal(bits(got), want)
    assert 0.2 < np.mean(want != master) < 0.4
