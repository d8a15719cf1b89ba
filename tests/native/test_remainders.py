"""int16 remainders: a BF16 weight and 16 low bits are an FP32 master, exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from native import storage_judge
from native.kernel_runner import (
    ADAMW,
    ALL_F32,
    BF16,
    F32,
    I16,
    Dtypes,
    State,
    Values,
    as_bfloat16,
    as_float32,
    assert_same_bits,
    bits,
    random_values,
    update,
    updated,
)

REMAINDERS = Dtypes(BF16, F32, F32, F32, I16)
MASTERS = Dtypes(BF16, F32, F32, F32, F32)
LOW_HALVES = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
EVERY_HALF = np.arange(0x10000, dtype=np.uint32)
STILL = replace(ADAMW, lr=0.0, weight_decay=0.0)
"""With zero gradients and moments such a step moves nothing: it only joins and splits."""


def at_rest(param: torch.Tensor, low: np.ndarray) -> State:
    zeros = torch.zeros(low.size)
    remainder = torch.from_numpy(low.astype(np.uint16).view(np.int16))
    return State(param, zeros, zeros.clone(), zeros.clone(), remainder, torch.tensor(0.0))


@pytest.mark.parametrize("options", [STILL, replace(STILL, decoupled=False), replace(ADAMW, weight_decay=0.0)], ids=str)
def test_every_finite_master_beside_a_boundary_survives_a_still_step(options, isa):
    """Every high half, so every sign, denormal and zero and the largest numbers, with each low half."""
    masters = (EVERY_HALF[:, None] << 16 | LOW_HALVES).ravel()
    masters = masters[masters >> 23 & 0xFF != 0xFF]
    weight, low = storage_judge.split(masters)
    before = at_rest(as_bfloat16(weight), low)
    after = updated(before, REMAINDERS, options)
    # The split itself is the judge's; that the kernel's is the same is what this compares.
    np.testing.assert_array_equal(bits(after.param), weight)
    np.testing.assert_array_equal(bits(after.master), low)
    np.testing.assert_array_equal(after.joined_master(), masters)
    assert after.step.item() == 1


def test_infinities_and_nans_stay_what_they_are(isa):
    masters = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF] * 9, np.uint32)
    after = updated(at_rest(as_bfloat16(masters >> 16), masters * 0), REMAINDERS, STILL)
    infinite = np.isin(masters, [0x7F800000, 0xFF800000])
    np.testing.assert_array_equal(after.joined_master()[infinite], masters[infinite])
    of_nan_weights = storage_judge.is_nan(masters & 0xFFFF0000)
    assert (bits(after.param)[of_nan_weights] == storage_judge.QUIET_NAN_16).all()
    assert (bits(after.master) == 0).all()


@pytest.mark.parametrize("options", [ADAMW, replace(ADAMW, decoupled=False, maximize=True)], ids=["adamw", "l2 max"])
def test_twenty_steps_are_those_of_an_fp32_master(options, isa):
    """Each BF16 weight is its master by its own rounding rule."""
    n, rng = 3001, np.random.default_rng(4)
    values = random_values(n, seed=4)
    with_low, with_master, plain = (State.of(values, d) for d in (REMAINDERS, MASTERS, ALL_F32))
    for _ in range(20):
        grad = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
        for state, dtypes in ((with_low, REMAINDERS), (with_master, MASTERS), (plain, ALL_F32)):
            state.grad.copy_(grad)
            update(state, dtypes, options)
        masters = bits(with_master.master)
        np.testing.assert_array_equal(masters, bits(plain.param))
        np.testing.assert_array_equal(with_low.joined_master(), masters)
        np.testing.assert_array_equal(bits(with_low.param), storage_judge.split(masters)[0])
        np.testing.assert_array_equal(bits(with_master.param), storage_judge.round_to_bfloat16(masters))
        for name in ("exp_avg", "exp_avg_sq"):
            np.testing.assert_array_equal(bits(getattr(with_low, name)), bits(getattr(with_master, name)))


def test_a_master_half_way_between_two_weights_goes_away_from_zero_with_remainders_and_to_even_without(isa):
    halfway = EVERY_HALF[EVERY_HALF >> 7 & 0xFF != 0xFF] << 16 | 0x8000
    state = at_rest(torch.zeros(halfway.size, dtype=BF16), 0 * halfway)
    state.master = as_float32(halfway)
    to_even = updated(state, MASTERS, STILL)
    np.testing.assert_array_equal(bits(to_even.param), (halfway >> 16) + (halfway >> 16 & 1))
    np.testing.assert_array_equal(bits(to_even.master), halfway)
    weight, low = storage_judge.split(halfway)
    away = updated(at_rest(as_bfloat16(weight), low), REMAINDERS, STILL)
    np.testing.assert_array_equal(bits(away.param), (halfway >> 16) + 1)


def test_an_fp32_master_ignores_the_weight_beside_it(isa):
    before = State.of(random_values(333, seed=5), MASTERS)
    want = updated(before, MASTERS)
    before.param.fill_(float("nan"))
    assert_same_bits(updated(before, MASTERS), want)


@pytest.mark.parametrize("low", [*LOW_HALVES.tolist(), "random"], ids=lambda x: x if x == "random" else f"{x:04x}")
def test_a_weight_written_from_outside_is_off_by_at_most_half_an_ulp_and_never_nan(low, isa):
    """Every BF16 weight there is, over low bits that were another weight's."""
    written = EVERY_HALF.astype(np.uint16)
    old_low = np.random.default_rng(6).integers(0, 0x10000, written.size) if low == "random" else low + 0 * written
    after = updated(at_rest(as_bfloat16(written), old_low), REMAINDERS, STILL)
    number = ~storage_judge.is_nan(EVERY_HALF << 16)
    assert not storage_judge.is_nan(after.joined_master())[number].any()

    finite = EVERY_HALF >> 7 & 0xFF != 0xFF
    wanted = as_float32(EVERY_HALF[finite] << 16).double()
    # The distance to the next BF16 number of larger magnitude.
    ulp = as_float32((EVERY_HALF[finite] & 0x7F80) << 16).double().clamp_min(2.0**-126) * 2.0**-7
    master = as_float32(after.joined_master()[finite]).double()
    assert bool(((master - wanted).abs() <= ulp / 2).all())

    # Of an infinity written over a weight that had been rounded up, the pair is that of the largest
    # numbers: they round to infinity too.
    infinite = number & ~finite
    assert bool((as_float32(after.joined_master()[infinite]).abs() >= 3.38e38).all())
    np.testing.assert_array_equal(bits(after.param)[number], written[number])


def test_a_zero_written_from_outside_is_zero(isa):
    low = np.arange(0x8000, 0x10000)
    for zero in (0x0000, 0x8000):
        after = updated(at_rest(as_bfloat16(np.full(low.size, zero)), low), REMAINDERS, STILL)
        np.testing.assert_array_equal(after.joined_master(), np.full(low.size, zero << 16))


def test_masters_hold_what_bf16_weights_lose(isa):
    """Updates under half an ulp of the weight: a BF16 weight stays, its master or remainders move."""
    n, steps = 40, 100
    ones, zeros = torch.ones(n), torch.zeros(n)
    options = replace(ADAMW, lr=1e-4, weight_decay=0.0)
    for dtypes, moved in ((Dtypes(BF16, F32, F32, F32), False), (MASTERS, True), (REMAINDERS, True)):
        state = State.of(Values(ones, ones, zeros, zeros), dtypes)
        for _ in range(steps):
            update(state, dtypes, options)
        want = 1 - steps * 1e-4 if moved else 1.0
        assert state.param.float().tolist() == pytest.approx([want] * n, abs=2.0**-8 if moved else 0.0)
        if dtypes.master is I16:
            assert as_float32(state.joined_master()).tolist() == pytest.approx([want] * n, abs=1e-5)
