"""Arithmetic of PTX on numpy arrays where numpy's own is not the same to the last bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

__all__ = [
    "NAN32",
    "bfloat16_bits",
    "canonical_nan",
    "denormals_are_kept",
    "float16_bits",
    "fma32",
    "fma64",
    "multiply_high",
    "truncate_to_integer",
]

NAN32 = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
"""Single-precision arithmetic makes this NaN, whichever went in (PTX ISA, "Floating-Point Instructions")."""


def denormals_are_kept() -> bool:
    """False where this process flushes denormals (torch.set_flush_denormal): then numpy cannot judge."""
    tiny = np.full(1, 1, np.uint32).view(np.float32)
    return bool((tiny * np.float32(2)).view(np.uint32)[0] == 2)


def canonical_nan(values: np.ndarray) -> np.ndarray:
    """FP32 results with every NaN as hardware makes it; other dtypes as they are."""
    if values.dtype != np.float32:
        return values
    nan = np.isnan(values)
    return np.where(nan, NAN32, values) if nan.any() else values


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c in FP32, rounded once.

    The product of two FP32 numbers is exact in FP64. The sum is rounded there to odd, from which
    rounding to FP32 is right because FP64 has more than two bits beyond it (Boldo & Melquiond 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c.astype(np.float64), np.broadcast_shapes(product.shape, c.shape))
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & ((bits & 1) == 0)
    bits = np.where(inexact, np.where((lost > 0) == (total > 0), bits + 1, bits - 1), bits)
    return bits.view(np.float64).astype(np.float32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c in FP64, rounded once: by exact fractions, slow."""
    a, b, c = np.broadcast_arrays(a, b, c)
    plain = a * b + c
    factors = np.isfinite(a) & np.isfinite(b)
    # Of finite factors the product is finite too, though a * b may not be.
    plain = np.where(factors & ~np.isfinite(c), c, plain)
    for i in np.flatnonzero(factors & np.isfinite(c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:  # an exact zero has its sign from the plain sum
            try:
                plain[i] = float(exact)
            except OverflowError:
                plain[i] = np.inf if exact > 0 else -np.inf
    return plain


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16.f32: nearest even, NaN becomes 0x7fff."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), np.uint64(0x7FFF), rounded).astype(np.uint16)


def float16_bits(values: np.ndarray) -> np.ndarray:
    """cvt.rn.f16.f32: nearest even, NaN becomes 0x7fff."""
    return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the double-width product of integers."""
    bits = a.dtype.itemsize * 8
    product = a.astype(object) * b.astype(object)
    return np.array([(int(p) >> bits) & (2**bits - 1) for p in product], f"u{bits // 8}").view(a.dtype)


def truncate_to_integer(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """cvt.rzi: toward zero, out of range to the nearest integer there is. The caller refuses NaN."""
    limits = np.iinfo(dtype)
    whole = np.trunc(values.astype(np.float64))
    # float(limits.max) may round up to one past it, which >= catches.
    inside = (whole >= float(limits.min)) & (whole < float(limits.max))
    result = np.where(inside, whole, 0).astype(dtype)
    result = np.where(whole >= float(limits.max), dtype.type(limits.max), result)
    return np.where(whole < float(limits.min), dtype.type(limits.min), result)
