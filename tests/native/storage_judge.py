"""What a number becomes when it is stored, decided with integers and fractions.

A BF16 pattern is the high half of the FP32 pattern of the same number. Nearest-even is decided here by
comparing the half that is cut off with one half, or, in `nearest_bfloat16`, by comparing distances between
exact fractions; neither adds a rounding constant and shifts, as fast code does.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

QUIET_NAN_16, QUIET_NAN_32 = 0x7FC0, 0x7FC00000
INFINITY_16 = 0x7F80


def is_nan(patterns: np.ndarray) -> np.ndarray:
    """Of FP32 patterns (uint32): all ones in the exponent, something in the fraction."""
    return ((patterns >> 23 & 0xFF) == 0xFF) & ((patterns & 0x7FFFFF) != 0)


def round_to_bfloat16(patterns: np.ndarray) -> np.ndarray:
    """BF16 patterns (uint16) of FP32 patterns (uint32): nearest, ties to even, any NaN the quiet NaN."""
    high, cut = patterns >> 16, patterns & 0xFFFF
    odd = (high & 1) == 1
    up = (cut > 0x8000) | ((cut == 0x8000) & odd)
    return np.where(is_nan(patterns), QUIET_NAN_16, high + up).astype(np.uint16)


def round_to_bfloat16_randomly(patterns: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The same rounded away from zero where 16 random bits reach what the cut-off half lacks of a unit; to
    nearest where that could make an infinity, and where nothing is finite."""
    high, cut = patterns >> 16, patterns & 0xFFFF
    up = random >= 0x10000 - cut.astype(np.int64)
    ordinary = (patterns & 0x7FFFFFFF) <= 0x7F7F0000
    return np.where(ordinary, high + up, round_to_bfloat16(patterns)).astype(np.uint16)


def store_float32(patterns: np.ndarray) -> np.ndarray:
    """FP32 patterns as they are stored: any NaN is the one quiet NaN."""
    return np.where(is_nan(patterns), np.uint32(QUIET_NAN_32), patterns)


def split(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The BF16 weight and 16-bit remainder (both uint16) of FP32 masters: DESIGN's (x + 0x8000) >> 16."""
    wide = store_float32(patterns).astype(np.uint64)
    return ((wide + 0x8000) // 0x10000).astype(np.uint16), (wide % 0x10000).astype(np.uint16)


def join(weight: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The FP32 pattern (uint32) whose split is (weight, low)."""
    was_rounded_up = low >= 0x8000
    return ((weight.astype(np.int64) - was_rounded_up) % 0x10000 * 0x10000 + low).astype(np.uint32)


def exact(pattern: int) -> Fraction:
    """The number that a finite FP32 pattern stands for."""
    exponent, fraction = pattern >> 23 & 0xFF, pattern & 0x7FFFFF
    assert exponent != 0xFF, "not finite"
    significand = fraction + (0x800000 if exponent else 0)
    value = significand * Fraction(2) ** (max(exponent, 1) - 150)
    return -value if pattern >> 31 else value


def nearest_bfloat16(pattern: int) -> int:
    """The BF16 pattern nearest to a finite FP32 pattern, found by distance among its neighbours.

    Infinity stands where the next number would be, 2^128: IEEE's rule for overflow.
    """
    sign, value = pattern >> 31 << 15, abs(exact(pattern))
    below = pattern >> 16 & 0x7FFF

    def distance(candidate: int) -> Fraction:
        number = Fraction(2) ** 128 if candidate == INFINITY_16 else exact(candidate << 16)
        return abs(number - value)

    # Python sorts (distance, is odd): the nearer first, of two equally near the even one.
    return sign | min((below, below + 1), key=lambda c: (distance(c), c & 1))
