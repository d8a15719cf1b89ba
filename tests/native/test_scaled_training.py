"""Thousands of steps with scaled moments beside FP32 ones: updates stay what they are, and never explode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.random import Generator

from native.kernel_runner import ADAMW, ALL_F32, F16, F32, U8, Dtypes, State, Values, update

STEPS, ELEMENTS = 3000, 1024
BARE = replace(ADAMW, lr=1.0, weight_decay=0.0)
"""A weight of zero is then, after a step, the update itself, bare."""


def updates(
    moments: torch.dtype, grads: Callable[[Generator, int], np.ndarray], stochastic: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Updates of each step with these moments and with FP32 ones. Every tenth gradient is zero."""
    rng = np.random.default_rng(0)
    dtypes = Dtypes(F32, F32, moments, moments)
    zeros = Values(*(torch.zeros(ELEMENTS) for _ in range(4)))
    low, high = State.of(zeros, dtypes), State.of(zeros, ALL_F32)
    for step in range(STEPS):
        grad = torch.from_numpy(grads(rng, step).astype(np.float32) * (step % 10 != 9))
        for state in (low, high):
            state.grad.copy_(grad)
            state.param.zero_()
        update(low, dtypes, BARE, seed=1, stochastic=stochastic)
        update(high, ALL_F32, BARE)
        yield low.param.double().numpy(), high.param.double().numpy()


def spread(decades: float) -> np.ndarray:
    """Magnitudes over so many decades, both ends in every block."""
    exponents = np.random.default_rng(1).uniform(-decades, 0, ELEMENTS)
    exponents[::256], exponents[1::256] = 0, -decades
    return 10.0**exponents


def one_sign(decades: float) -> Callable[[Generator, int], np.ndarray]:
    magnitudes = spread(decades)
    return lambda rng, step: (np.abs(rng.standard_normal(ELEMENTS)) + 0.1) * magnitudes


def any_sign(decades: float) -> Callable[[Generator, int], np.ndarray]:
    magnitudes = spread(decades)
    return lambda rng, step: rng.standard_normal(ELEMENTS) * magnitudes


def any_magnitude_each_step(rng: Generator, step: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], ELEMENTS) * 10.0 ** rng.uniform(-4, 0, ELEMENTS)


def any_row_at_any_step(rng: Generator, step: int) -> np.ndarray:
    """Most elements have no gradient, as an embedding's; the largest of a block comes and goes."""
    return np.where(rng.random(ELEMENTS) < 0.02, any_sign(4)(rng, step), 0.0)


@pytest.mark.parametrize("stochastic", [pytest.param(0, marks=pytest.mark.long), 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("moments, factor", [(F16, 1.1), (U8, 4.0)], ids=["fp16", "fp8"])
def test_updates_of_gradients_over_four_decades_are_those_of_fp32_moments(moments, factor, stochastic):
    """Each element at each step, where no moment cancels. Ten times is what may not be; this is what is."""
    lowest, highest = np.inf, 0.0
    for low, high in updates(moments, one_sign(4), stochastic):
        ratio = low / high
        lowest, highest = min(lowest, ratio.min()), max(highest, ratio.max())
    print(f"updates are {lowest:.3f} to {highest:.3f} of FP32's")
    assert lowest > 1 / factor and highest < factor


CASES = {
    "any sign": any_sign(4),
    "seven decades": any_sign(7),
    "seven decades of one sign": one_sign(7),
    "any magnitude each step": any_magnitude_each_step,
    "sparse": any_row_at_any_step,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("moments", [pytest.param(F16, marks=pytest.mark.long), U8], ids=["fp16", "fp8"])
def test_no_update_is_more_than_ten_times_fp32s(moments, case):
    """Where a first moment cancels, FP32's update of that step is nothing: told in the largest of the element so
    far. Nothing explodes, however small a gradient is beside the largest of its block."""
    largest = np.zeros(ELEMENTS)
    worst = 0.0
    for low, high in updates(moments, CASES[case]):
        largest = np.maximum(largest, np.abs(high))
        assert (low[largest == 0] == 0).all()
        worst = max(worst, (np.abs(low) / np.where(largest > 0, largest, 1)).max())
    print(f"{case}: at most {worst:.2f} of FP32's largest")
    assert worst < 10
