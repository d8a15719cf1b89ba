"""The bits that DESIGN's rule promises, from fractions rounded one operation at a time.

adam_judge says whether the rule is Adam. This says whether each operation is there, in its order, each
rounded once: what makes every processor agree. Finite, nonzero numbers within FP32's range only.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

import numpy as np
from statestream.kernels import AdamOptions


def rounded(x: Fraction) -> Fraction:
    """The FP32 number nearest to x, ties to even; denormals included."""
    if not x:
        return x
    quantum = _quantum(_floor_log2(abs(x)))
    # Python rounds a fraction's ties to even.
    nearest = round(x / quantum) * quantum
    assert abs(nearest) < Fraction(2) ** 128, "overflow is outside this judge"
    return nearest


def rounded_sqrt(x: Fraction) -> Fraction:
    """The FP32 number nearest to the square root of x > 0. No FP32 number's root is a tie."""
    exponent = _floor_log2(x) // 2
    quantum = _quantum(exponent)
    units = x / quantum**2
    root = isqrt(units.numerator // units.denominator)
    return (root + (units > (root + Fraction(1, 2)) ** 2)) * quantum


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if x >= Fraction(2) ** guess else guess - 1


def _quantum(exponent: int) -> Fraction:
    return Fraction(2) ** (max(exponent, -126) - 23)


def _float(x: float) -> Fraction:
    return Fraction(float(np.float32(x)))


def contract_step(
    p: float, g: float, m: float, v: float, options: AdamOptions, t: int, grad_scale: float = 1.0
) -> tuple[float, float, float]:
    """Weight, exp_avg and exp_avg_sq after step t, as DESIGN section 2 writes the rule."""
    lr = float(np.float32(options.lr))
    bc1 = bc2 = 1.0
    if options.bias_correction:
        bc1 = float(1 - Fraction(options.beta1) ** t)
        bc2 = float(1 - Fraction(options.beta2) ** t)
    one_minus_beta1, one_minus_beta2 = _float(1 - options.beta1), _float(1 - options.beta2)
    step_size, inv_sqrt_bc2 = _float(lr / bc1), _float(1 / np.sqrt(bc2))
    decay, weight_decay = _float(1 - lr * options.weight_decay), _float(options.weight_decay)
    eps, inv_grad_scale = _float(options.eps), _float(1 / grad_scale)

    p, g, m, v = (Fraction(float(x)) for x in (p, g, m, v))
    g = rounded(g * inv_grad_scale)
    if options.maximize:
        g = -g
    if options.decoupled:
        p = rounded(p * decay)
    else:
        g = rounded(weight_decay * p + g)
    if options.beta1 < 0.5:
        m = rounded(_float(options.beta1) * rounded(m - g) + g)
    else:
        m = rounded(one_minus_beta1 * rounded(g - m) + m)
    if options.beta2 < 0.5:
        square = rounded(g * g)
        v = rounded(_float(options.beta2) * rounded(v - square) + square)
    else:
        v = rounded(one_minus_beta2 * rounded(g * g - v) + v)
    denominator = rounded(rounded_sqrt(v) * inv_sqrt_bc2 + eps)
    p = rounded(p - step_size * rounded(m / denominator))
    return float(p), float(m), float(v)
