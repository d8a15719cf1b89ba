"""The bits of a step are those of DESIGN's rule, every operation rounded once, with every instruction set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from native.contract_judge import contract_step, rounded, rounded_sqrt
from native.kernel_runner import ADAMW, ALL_F32, State, Values, bits, random_values, updated

L2 = replace(ADAMW, decoupled=False, weight_decay=0.1)
CASES = {
    "adamw, first step": (ADAMW, 1, 1.0),
    "adamw, step 1000": (ADAMW, 1000, 1.0),
    "adamw maximizing": (replace(ADAMW, maximize=True), 7, 1.0),
    "adam with l2": (L2, 7, 1.0),
    "adam with l2 maximizing, scaled": (replace(L2, maximize=True), 7, 3.0),
    "no bias correction": (replace(ADAMW, bias_correction=False), 7, 1.0),
    "no bias correction, l2": (replace(L2, bias_correction=False), 7, 1.0),
    "grad_scale 1000": (ADAMW, 3, 1000.0),
    "large lr and decay": (replace(ADAMW, lr=0.1, weight_decay=0.5), 2, 1.0),
    "eps 0": (replace(ADAMW, eps=0.0), 5, 1.0),
    "eps 0.01": (replace(ADAMW, eps=0.01), 5, 1.0),
    "betas 0.3 0.999": (replace(ADAMW, beta1=0.3), 5, 1.0),
    "betas 0.9 0.2": (replace(ADAMW, beta2=0.2), 5, 1.0),
    "betas 0 0.99": (replace(ADAMW, beta1=0.0, beta2=0.99), 5, 1.0),
    "betas 0.95 0.98": (replace(ADAMW, beta1=0.95, beta2=0.98), 50, 1.0),
}


def tiny_values(n: int, seed: int) -> Values:
    """Gradients whose squares, and moments that, are denormal or nearly so."""
    rng = np.random.default_rng(seed)
    scaled = [rng.standard_normal(n) * s for s in (1e-37, 1e-21, 1e-38)] + [np.abs(rng.standard_normal(n)) * 1e-40]
    return Values(*(torch.from_numpy(x.astype(np.float32)) for x in scaled))


ELEMENTS = 37
"""Two of the widest vectors and a tail."""


@functools.cache
def promised(case: str, make: Callable[[int, int], Values]) -> np.ndarray:
    """FP32 bits, a row an element: weight, exp_avg, exp_avg_sq."""
    options, t, grad_scale = CASES[case]
    values = make(ELEMENTS, t)
    numbers = zip(values.weight, values.grad, values.exp_avg, values.exp_avg_sq, strict=True)
    return np.array([contract_step(*x, options, t, grad_scale) for x in numbers], np.float32).view(np.uint32)


# With eps 0 the tiny ones would divide by next to nothing and overflow.
@pytest.mark.parametrize(
    "case, make",
    [*((case, random_values) for case in CASES), *((case, tiny_values) for case in CASES if case != "eps 0")],
)
def test_every_operation_is_rounded_once_in_the_written_order(case, make, isa):
    options, t, grad_scale = CASES[case]
    before = State.of(make(ELEMENTS, t), ALL_F32, step=t - 1)
    after = updated(before, ALL_F32, options, grad_scale=grad_scale)
    for column, got in enumerate((after.param, after.exp_avg, after.exp_avg_sq)):
        np.testing.assert_array_equal(bits(got), promised(case, make)[:, column])


def test_the_contracts_rounding_is_ieee():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(500) * 10.0 ** rng.uniform(-44, 30, 500)).astype(np.float32)
    y = rng.standard_normal(500).astype(np.float32)
    for a, b in zip(x, y, strict=True):
        assert float(rounded(Fraction(float(a)) * Fraction(float(b)))) == float(a * b)
        assert float(rounded(Fraction(float(a)) / Fraction(float(b)))) == float(a / b)
        assert float(rounded_sqrt(Fraction(abs(float(a))))) == float(np.sqrt(abs(a))) or a == 0
    assert rounded(Fraction(2**24 + 1)) == 2**24
    assert rounded(Fraction(2**24 + 3)) == 2**24 + 4
