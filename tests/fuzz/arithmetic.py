"""FP32 arithmetic in NumPy, rounded once an operation, and Adam's rule as docs/numbers.md writes it.

NumPy's float32 sums, products, quotients and roots are IEEE's. It has no fused multiply-add: that is made in float64,
where the product is exact, and the sum rounded to odd, which a second rounding to float32 cannot tell from the exact
sum (Boldo & Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd", 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Settings", "adam", "fma"]


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once to nearest even."""
    product, c = np.float64(1) * a * b, np.float64(1) * c
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)  # Knuth's two-sum: exact
    even = (np.atleast_1d(total).view(np.int64) & 1 == 0).reshape(np.shape(total))
    towards = np.where(lost > 0, np.inf, -np.inf)
    odd = np.where((lost != 0) & even & np.isfinite(total), np.nextafter(total, towards), total)
    return odd.astype(np.float32)


@dataclass
class Settings:
    """A group's settings, as a user gives them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False
    bias_correction: bool = True


def adam(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, settings: Settings, t: int, grad_scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight and moments after update number t, as computed: not yet rounded for storage."""
    beta1, beta2 = settings.betas
    lr = float(np.float32(settings.lr))
    left1 = 1.0 - _power(beta1, t) if settings.bias_correction else 1.0
    left2 = 1.0 - _power(beta2, t) if settings.bias_correction else 1.0
    weight_decay = np.float32(settings.weight_decay)

    g = g * np.float32(1.0 / grad_scale)
    if settings.maximize:
        g = -g
    if settings.decoupled:
        p = p * np.float32(1.0 - lr * settings.weight_decay)
    elif settings.weight_decay:
        g = fma(weight_decay, p, g)
    m = _towards(m, g, beta1)
    if beta2 < 0.5:
        v = _towards(v, g * g, beta2)
    else:
        v = fma(np.float32(1.0 - beta2), fma(g, g, -v), v)
    denominator = fma(np.sqrt(v), np.float32(1.0 / np.sqrt(np.float64(left2))), np.float32(settings.eps))
    return fma(np.float32(-(lr / left1)), m / denominator, p), m, v


def _towards(old: np.ndarray, new: np.ndarray, beta: float) -> np.ndarray:
    """beta * old + (1 - beta) * new, told from the nearer end."""
    if beta < 0.5:
        return fma(np.float32(beta), old - new, new)
    return fma(np.float32(1.0 - beta), new - old, old)


def _power(base: float, n: int) -> float:
    """By repeated squaring from the lowest bit on: each product is rounded, so that the order is part of the rule."""
    power = 1.0
    while n:
        if n % 2:
            power *= base
        base, n = base * base, n // 2
    return power
