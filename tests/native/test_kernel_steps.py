"""What the scalars of a step are: counters, bias correction, and settings at their ends."""

from __future__ import annotations

from array import array
from dataclasses import replace
from fractions import Fraction
from math import isqrt

import numpy as np
import pytest
import torch
from statestream import kernels

from native import storage_judge
from native.kernel_runner import (
    ADAMW,
    ALL_BF16,
    ALL_DTYPES,
    ALL_F32,
    CPU,
    F32,
    I16,
    State,
    Values,
    as_float32,
    assert_same_bits,
    bits,
    difference,
    random_values,
    update,
    updated,
)

L2 = replace(ADAMW, decoupled=False)


def filled(n: int, weight: float, grad: float, exp_avg: float = 0.0, exp_avg_sq: float = 0.0) -> Values:
    return Values(*(torch.full((n,), x) for x in (weight, grad, exp_avg, exp_avg_sq)))


# Counters --------------------------------------------------------------------------------------------------


def test_a_call_adds_exactly_one_to_each_rows_own_counter():
    rows = [State.of(random_values(n, seed=n), ALL_F32, step) for n, step in ((5, 0), (0, 41), (70, 999_999))]
    for call in range(1, 4):
        update(rows, ALL_F32)
        assert [row.step.item() for row in rows] == [call, 41 + call, 999_999 + call]


def test_a_counter_is_left_alone_without_advance_and_used_as_it_stands():
    before = State.of(random_values(100, seed=1), ALL_F32, step=5)
    for _ in range(3):
        resting = before.clone()
        update(resting, ALL_F32, advance=False)
        assert resting.step.item() == 5
    counted_before = before.clone()
    counted_before.step.fill_(4.0)
    assert_same_bits(resting, updated(counted_before, ALL_F32))


def test_each_row_is_corrected_by_its_own_count():
    values = random_values(64, seed=2)
    counts = [1, 1, 30, 1, 2, 2, 500_000, 30]
    rows = [State.of(values, ALL_F32, count - 1) for count in counts]
    update(rows, ALL_F32)
    for row, count in zip(rows, counts, strict=True):
        assert_same_bits(row, updated(State.of(values, ALL_F32, count - 1), ALL_F32), count)
    assert difference(rows[0], rows[2]) and difference(rows[2], rows[6])


def ulps_apart(got: float, want: Fraction) -> float:
    return float(abs(Fraction(got) - want) / Fraction(float(np.spacing(np.float32(float(want))))))


@pytest.mark.parametrize("t", [1, 2, 3, 10, 100, 999, 1000, 12_345, 100_000, 999_999, 1_000_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999), (0.9, 0.0), (0.999, 0.9999), (0.9999999, 0.9999999)])
def test_bias_correction_is_right_up_to_a_million_steps(betas, t):
    """With weight 0 and grad, exp_avg and exp_avg_sq of 1 the new weight is -lr * sqrt(1-beta2^t) / (1-beta1^t)."""
    beta1, beta2 = betas
    options = replace(ADAMW, beta1=beta1, beta2=beta2, eps=0.0, weight_decay=0.0)
    after = updated(State.of(filled(3, 0.0, 1.0, 1.0, 1.0), ALL_F32, step=t - 1), ALL_F32, options)
    assert after.exp_avg.tolist() == after.exp_avg_sq.tolist() == [1.0] * 3

    lr, bc1, bc2 = Fraction(float(np.float32(options.lr))), one_minus_power(beta1, t), one_minus_power(beta2, t)
    root = Fraction(isqrt(bc2.numerator * BITS**2 // bc2.denominator), BITS)
    assert ulps_apart(-after.param[0].item(), lr * root / bc1) <= 2.0


BITS = 2**400
"""Denominator of the exact arithmetic below: errors of 2^-400 count for nothing."""


def one_minus_power(beta: float, t: int) -> Fraction:
    power = Fraction(1)
    for bit in f"{t:b}":
        power *= power * (Fraction(beta) if bit == "1" else 1)
        power = Fraction(round(power * BITS), BITS)
    return 1 - power


def test_without_bias_correction_the_count_does_not_matter():
    before = State.of(random_values(100, seed=3), ALL_F32)
    options = replace(ADAMW, bias_correction=False)
    first = updated(before, ALL_F32, options)
    before.step.fill_(77.0)
    later = updated(before, ALL_F32, options)
    assert later.step.item() == 78
    later.step.fill_(1.0)
    assert_same_bits(first, later)


# Closed forms ----------------------------------------------------------------------------------------------


def fp32_weight(state: State, dtypes) -> torch.Tensor:
    if dtypes.master is F32:
        return state.master
    if dtypes.master is I16:
        return as_float32(state.joined_master())
    return state.param.float()


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
def test_decay_comes_before_the_step(dtypes, isa):
    """lr 0.1, weight_decay 0.5, grad 1, first step: 1 * (1 - 0.05) - 0.1 is 0.85; decay last would be 0.855."""
    options = replace(ADAMW, lr=0.1, weight_decay=0.5)
    after = updated(State.of(filled(37, 1.0, 1.0), dtypes), dtypes, options)
    weight = fp32_weight(after, dtypes)
    bare_bfloat16 = dtypes.param is torch.bfloat16 and dtypes.master is None
    tolerance = 2.0**-9 if bare_bfloat16 else 2e-7
    assert weight.tolist() == pytest.approx([0.85] * 37, abs=tolerance)
    assert after.exp_avg.float().tolist() == pytest.approx([0.1] * 37, rel=2.0**-8)
    assert after.exp_avg_sq.float().tolist() == pytest.approx([0.001] * 37, rel=2.0**-8)


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
def test_l2_decay_goes_through_the_moments(dtypes, isa):
    """grad 1 + 0.5 * weight 1: exp_avg 0.15, exp_avg_sq 0.00225, first step of size lr whatever the gradient."""
    options = replace(L2, lr=0.1, weight_decay=0.5)
    after = updated(State.of(filled(37, 1.0, 1.0), dtypes), dtypes, options)
    assert after.exp_avg.float().tolist() == pytest.approx([0.15] * 37, rel=2.0**-8)
    assert after.exp_avg_sq.float().tolist() == pytest.approx([0.00225] * 37, rel=2.0**-8)
    assert fp32_weight(after, dtypes).tolist() == pytest.approx([0.9] * 37, abs=2.0**-9)


def test_the_largest_step_of_a_first_step_is_lr():
    for grad in (1e-6, -3.0, 1e6):
        after = updated(State.of(filled(9, 0.0, grad), ALL_F32), ALL_F32, replace(ADAMW, eps=0.0))
        assert after.param.tolist() == pytest.approx([-1e-3 if grad > 0 else 1e-3] * 9, rel=3e-7)


@pytest.mark.parametrize("weight, decoupled", [(1.5, True), (1.5, False), (0.0, True)])
def test_without_memory_a_step_is_the_gradients_sign(weight, decoupled, isa):
    """betas 0: exp_avg is the gradient, exp_avg_sq its square, whatever step it is."""
    options = replace(ADAMW, beta1=0.0, beta2=0.0, weight_decay=0.0, decoupled=decoupled)
    for t in (1, 1000):
        after = updated(State.of(filled(20, weight, -3.0, -3.5, 12.0), ALL_F32, t - 1), ALL_F32, options)
        assert after.exp_avg.tolist() == [-3.0] * 20
        assert after.exp_avg_sq.tolist() == [9.0] * 20
        assert after.param.tolist() == pytest.approx([weight + 1e-3] * 20, rel=1e-6)


# Settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.1, 1e-3, 3e-4, 0.3])
def test_lr_is_rounded_to_fp32_first(lr):
    before = State.of(random_values(2000, seed=5), ALL_F32, step=2)
    as_double = updated(before, ALL_F32, replace(ADAMW, lr=lr, weight_decay=0.37))
    rounded = float(np.float32(lr))
    assert rounded != lr
    as_float = updated(before, ALL_F32, replace(ADAMW, lr=rounded, weight_decay=0.37))
    assert_same_bits(as_double, as_float)
    next_one = float(np.nextafter(np.float32(lr), np.float32(1)))
    assert difference(as_double, updated(before, ALL_F32, replace(ADAMW, lr=next_one, weight_decay=0.37)))


@pytest.mark.parametrize("options", [ADAMW, L2], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtypes", ALL_DTYPES[::3], ids=str)
def test_maximizing_is_minimizing_the_negative(dtypes, options, isa):
    before = State.of(random_values(500, seed=6, specials=0.02), dtypes, step=1)
    flipped = before.clone()
    flipped.grad.neg_()
    want = updated(flipped, dtypes, options)
    want.grad = before.grad
    assert_same_bits(updated(before, dtypes, replace(options, maximize=True)), want)


@pytest.mark.parametrize("options", [ADAMW, L2], ids=["adamw", "l2"])
@pytest.mark.parametrize("scale", [2.0**-10, 2.0, 65536.0])
def test_a_grad_scale_that_is_a_power_of_two_changes_no_bit(scale, options, isa):
    before = State.of(random_values(500, seed=7), ALL_BF16, step=1)
    scaled = before.clone()
    scaled.grad *= scale
    got = updated(scaled, ALL_BF16, options, grad_scale=scale)
    want = updated(before, ALL_BF16, options)
    got.grad = want.grad
    assert_same_bits(got, want)


def test_without_weight_decay_adam_and_adamw_are_one(isa):
    before = State.of(random_values(1000, seed=8, specials=0.02), ALL_F32, step=3)
    no_decay = replace(ADAMW, weight_decay=0.0)
    assert_same_bits(updated(before, ALL_F32, no_decay), updated(before, ALL_F32, replace(no_decay, decoupled=False)))


def test_lr_zero_moves_the_moments_and_not_the_weight(isa):
    before = State.of(random_values(1000, seed=9), ALL_F32, step=3)
    after = updated(before, ALL_F32, replace(ADAMW, lr=0.0))
    np.testing.assert_array_equal(bits(after.param), bits(before.param))
    moving = updated(before, ALL_F32)
    np.testing.assert_array_equal(bits(after.exp_avg), bits(moving.exp_avg))
    np.testing.assert_array_equal(bits(after.exp_avg_sq), bits(moving.exp_avg_sq))
    assert storage_judge.is_nan(bits(after.param)).sum() == 0


# Scalars in tensors ----------------------------------------------------------------------------------------


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def updated_with(state: State, scalars: kernels.DeviceScalars, grad_scale: float = 1.0) -> State:
    copy = state.clone()
    rows = array("q", kernels.row(copy.param, copy.grad, copy.exp_avg, copy.exp_avg_sq, None, copy.step))
    kernels.adam(CPU, rows, ALL_F32.formats, ADAMW, grad_scale=grad_scale, scalars=scalars)
    return copy


def test_lr_and_grad_scale_in_tensors_are_those_in_numbers():
    before = State.of(random_values(200, seed=10), ALL_F32, step=4)
    want = updated(before, ALL_F32, replace(ADAMW, lr=0.1), grad_scale=48.0)
    scalars = kernels.DeviceScalars(lr=scalar(0.1), grad_scale=scalar(16.0), found_inf=scalar(0.0))
    assert_same_bits(updated_with(before, scalars, grad_scale=3.0), want)


def test_found_inf_leaves_all_as_it_was_counters_too():
    before = State.of(random_values(200, seed=11), ALL_F32, step=4)
    for found in (1.0, 2.0, float("nan")):
        assert_same_bits(updated_with(before, kernels.DeviceScalars(found_inf=scalar(found))), before)


@pytest.mark.parametrize("found_inf, counted", [(None, 1), (0.0, 1), (1.0, 0)])
def test_counters_alone_advance_unless_an_infinity_was_found(found_inf, counted):
    steps = [scalar(0.0), scalar(41.0)]
    kernels.advance_steps(CPU, steps, None if found_inf is None else scalar(found_inf))
    assert [step.item() for step in steps] == [counted, 41 + counted]


@pytest.mark.parametrize("name", ["lr", "grad_scale", "found_inf"])
@pytest.mark.parametrize("wrong", [torch.tensor(1.0, dtype=torch.float64), torch.ones(2)], ids=["float64", "two"])
def test_a_scalar_of_another_kind_is_refused_by_name(name, wrong):
    with pytest.raises(ValueError, match=name):
        kernels.DeviceScalars(**{name: wrong})
