"""Zeros, infinities, NaNs, overflow; and what BF16 moments cannot follow."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from native.kernel_runner import (
    ADAMW,
    ALL_BF16,
    ALL_DTYPES,
    ALL_F32,
    BF16,
    F32,
    Dtypes,
    State,
    Values,
    bits,
    random_values,
    update,
    updated,
)

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-8, 1e-30])
def test_a_row_never_touched_stays_and_only_decays(dtypes, eps, isa):
    """Embedding rows without gradient: moments exactly zero, the weight times 1 - lr * weight_decay."""
    values = random_values(200, seed=1)
    for tensor in (values.grad, values.exp_avg, values.exp_avg_sq):
        tensor.zero_()
    before = State.of(values, dtypes)
    still = replace(ADAMW, eps=eps, weight_decay=0.0)
    halved = replace(ADAMW, eps=eps, lr=1.0, weight_decay=0.5)
    for options, factor in ((still, 1.0), (halved, 0.5)):
        after = updated(before, dtypes, options)
        assert (bits(after.exp_avg) == 0).all() and (bits(after.exp_avg_sq) == 0).all()
        np.testing.assert_array_equal(bits(after.param), bits(before.param * factor))


def test_zeros_are_not_slow(isa):
    """No zero may fall into the slow path that a denormal takes, which is 2.7 times as long where it was measured."""
    n = 1 << 18
    usual = State.of(random_values(n, seed=2), ALL_F32)
    zeros = State.of(Values(*(torch.zeros(n) for _ in range(4))), ALL_F32)

    def time_of(state: State) -> float:
        began = time.perf_counter()
        update(state, ALL_F32)
        return time.perf_counter() - began

    # By turns, so that a machine that is busy for a while is so for both.
    times = [(time_of(zeros), time_of(usual)) for _ in range(30)]
    assert min(zero for zero, _ in times) < 1.5 * min(other for _, other in times)


@pytest.mark.parametrize("dtypes", ALL_DTYPES[::3], ids=str)
@pytest.mark.parametrize("grad", [INF, -INF, NAN])
def test_an_infinite_or_nan_gradient_reaches_the_weight_and_its_neighbours_nothing(grad, dtypes, isa):
    before = State.of(random_values(75, seed=3), dtypes, step=1)
    clean = updated(before, dtypes)
    hit = [0, 17, 31, 74]
    before.grad[hit] = grad
    after = updated(before, dtypes)
    second = updated(after, dtypes)
    for (name, got), (_, untouched) in zip(after.tensors(), clean.tensors(), strict=True):
        others = np.delete(np.arange(75), hit)
        if name != "grad":
            np.testing.assert_array_equal(bits(got)[others], bits(untouched)[others])
    for state in (after, second):
        assert bool(state.param[hit].isnan().all())
        assert not bool(state.exp_avg[hit].isfinite().any())
        assert not bool(state.exp_avg_sq[hit].isfinite().any())
    if grad != grad:
        assert bool(after.exp_avg[hit].isnan().all()) and bool(after.exp_avg_sq[hit].isnan().all())
    else:
        assert after.exp_avg[hit].tolist() == [grad] * 4 and after.exp_avg_sq[hit].tolist() == [INF] * 4


def test_a_gradient_whose_square_overflows_is_as_in_torch_for_one_step(isa):
    """exp_avg_sq is infinite, so the weight keeps still; the next step is NaN: it does not go unnoticed."""
    before = State.of(Values(*(torch.full((20,), x) for x in (1.0, 1e30, 0.0, 0.0))), ALL_F32)
    options = replace(ADAMW, weight_decay=0.0)
    after = updated(before, ALL_F32, options)
    assert after.exp_avg_sq.tolist() == [INF] * 20
    assert after.param.tolist() == [1.0] * 20
    assert bool(updated(after, ALL_F32, options).param.isnan().all())


@pytest.mark.parametrize("dtypes", [ALL_F32, ALL_BF16], ids=str)
def test_eps_zero_divides_zero_by_zero_as_torch_does_and_nothing_else(dtypes, isa):
    values = random_values(60, seed=4)
    for tensor in (values.grad, values.exp_avg, values.exp_avg_sq):
        tensor[::2] = 0.0
    after = updated(State.of(values, dtypes), dtypes, replace(ADAMW, eps=0.0))
    assert bool(after.param[::2].isnan().all())
    assert bool(after.param[1::2].isfinite().all())


@pytest.mark.parametrize("weight", [INF, -INF, NAN])
@pytest.mark.parametrize("dtypes", ALL_DTYPES[::4], ids=str)
def test_a_weight_that_is_not_finite_stays_what_it_is(weight, dtypes, isa):
    values = random_values(40, seed=5)
    values.weight.fill_(weight)
    after = updated(State.of(values, dtypes), dtypes)
    assert after.param.float().tolist() == pytest.approx([weight] * 40, nan_ok=True)
    assert bool(after.exp_avg.isfinite().all()) and bool(after.exp_avg_sq.isfinite().all())


def test_a_result_beyond_bfloat16_is_stored_as_infinity(isa):
    largest = Values(*(torch.full((33,), x) for x in (3.3895314e38, 0.0, 0.0, 1.0)))
    pushed = replace(ADAMW, lr=-1.0, weight_decay=0.003)
    assert bool(updated(State.of(largest, ALL_F32), ALL_F32, pushed).param.isfinite().all())
    assert updated(State.of(largest, ALL_BF16), ALL_BF16, pushed).param.tolist() == [INF] * 33


# What BF16 loses -------------------------------------------------------------------------------------------


def after_constant_gradient(dtypes: Dtypes, grad: float, steps: int, beta2: float = 0.999) -> State:
    state = State.of(Values(*(torch.full((16,), x) for x in (0.0, grad, 0.0, 0.0))), dtypes)
    options = replace(ADAMW, beta2=beta2, weight_decay=0.0)
    for _ in range(steps):
        update(state, dtypes, options)
    return state


@pytest.mark.parametrize("grad", [2.0**-20, 3e-7, 1e-3])
def test_bfloat16_moments_stall_under_a_constant_gradient(grad, isa):
    """A BF16 moment stops when what a step would add is under half its ulp.

    exp_avg_sq then stands far below the gradient's square and the weight goes too far; FP32 moments
    arrive. What stochastic rounding would keep is measured against these figures.
    """
    steps = 2000
    grad = float(torch.tensor(grad).to(BF16))
    low, high = after_constant_gradient(ALL_BF16, grad, steps), after_constant_gradient(ALL_F32, grad, steps)
    arrived = 1 - 0.999**steps  # of the square, had nothing been rounded
    assert (high.exp_avg_sq / grad**2).tolist() == pytest.approx([arrived] * 16, rel=1e-5)
    assert (high.exp_avg / grad).tolist() == pytest.approx([1.0] * 16, rel=1e-5)

    v, m = float(low.exp_avg_sq[0]), float(low.exp_avg[0])
    half_ulp_v, half_ulp_m = (2.0 ** (np.floor(np.log2(x)) - 8) for x in (v, m))
    assert 0.001 * (grad**2 - v) <= half_ulp_v
    assert 0.1 * (grad - m) <= half_ulp_m
    print(f"grad {grad:.3g}: BF16 exp_avg_sq {v / grad**2:.3f} of the square, exp_avg {m / grad:.3f} of the gradient")
    assert 0.1 < v / grad**2 < 0.5
    assert 0.95 < m / grad < 1.0
    after = updated(low, ALL_BF16)
    for name in ("exp_avg", "exp_avg_sq"):
        np.testing.assert_array_equal(bits(getattr(after, name)), bits(getattr(low, name)))


def test_only_the_moment_that_is_bfloat16_stalls(isa):
    grad = 2.0**-20
    mixed = after_constant_gradient(Dtypes(F32, F32, BF16, F32), grad, 2000)
    assert (mixed.exp_avg_sq / grad**2).tolist() == pytest.approx([1 - 0.999**2000] * 16, rel=1e-5)
    assert 0.95 < float(mixed.exp_avg[0]) / grad < 1.0
