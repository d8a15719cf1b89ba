"""FP16 and FP8 payloads, block scales and Philox, written from their definitions.

A payload is judged by the list of all numbers that its kind has, each made from its fields; the nearest is
found in that list by distance. What a scale may be is found by trying every power of two. float64 holds
every value, distance and square here exactly.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

BLOCK = 256


class Kind(NamedTuple):
    """Sign, exponent and mantissa bits, exponent bias. `infinite`: the highest exponent is infinity and NaN,
    as in IEEE 754; else only the very last pattern is NaN."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinite: bool

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)


FP16 = Kind(5, 10, 15, True)
FP8 = Kind(4, 3, 7, False)
QUIET_NAN = {FP16: 0x7E00, FP8: 0x7F}


@cache
def values(kind: Kind) -> np.ndarray:
    """float64 of every payload, by pattern."""
    patterns = np.arange(1 << kind.bits)
    mantissa = patterns & ((1 << kind.mantissa_bits) - 1)
    exponent = (patterns & (kind.sign - 1)) >> kind.mantissa_bits
    normal = exponent > 0
    significand = mantissa / 2.0**kind.mantissa_bits + normal
    result = np.ldexp(significand, np.where(normal, exponent, 1) - kind.bias)
    top = exponent == (1 << kind.exponent_bits) - 1
    if kind.infinite:
        result[top & (mantissa == 0)] = np.inf
        result[top & (mantissa != 0)] = np.nan
    else:
        result[top & (mantissa == (1 << kind.mantissa_bits) - 1)] = np.nan
    return np.where(patterns & kind.sign, -result, result)


@cache
def magnitudes(kind: Kind) -> np.ndarray:
    """The finite numbers that are not negative, rising: the index is the pattern."""
    positive = values(kind)[: kind.sign]
    return positive[np.isfinite(positive)]


def neighbours(kind: Kind, magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Patterns of the largest number <= magnitude and the smallest >= it; both the largest number beyond it."""
    numbers = magnitudes(kind)
    below = np.searchsorted(numbers, magnitude, side="right") - 1
    above = np.minimum(np.searchsorted(numbers, magnitude, side="left"), numbers.size - 1)
    return below, above


def nearest(kind: Kind, magnitude: np.ndarray) -> np.ndarray:
    """The pattern of the number nearest to a finite magnitude, of two equally near the even pattern."""
    numbers = magnitudes(kind)
    below, above = neighbours(kind, magnitude)
    to_below, to_above = magnitude - numbers[below], numbers[above] - magnitude
    even = np.where(below % 2 == 0, below, above)
    return np.where(to_below < to_above, below, np.where(to_below > to_above, above, even))


def _with_sign_and_specials(kind: Kind, x: np.ndarray, patterns: np.ndarray) -> np.ndarray:
    signed = patterns | np.where(np.signbit(x), kind.sign, 0)
    infinity = ((1 << kind.exponent_bits) - 1) << kind.mantissa_bits
    special = np.where(np.signbit(x), kind.sign, 0) | infinity if kind.infinite else QUIET_NAN[kind]
    return np.where(np.isnan(x), QUIET_NAN[kind], np.where(np.isinf(x), special, signed)).astype(np.uint32)


def stored_nearest(kind: Kind, x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Payloads of FP32 values x under a scale."""
    x = np.asarray(x, np.float32).astype(np.float64)
    return _with_sign_and_specials(kind, x, nearest(kind, np.abs(np.where(np.isfinite(x), x, 0.0)) / scale))


def stored_root_nearest(kind: Kind, v: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Payloads of the roots (in FP32) of second moments v; what is not zero stays so."""
    v = np.asarray(v, np.float32)
    with np.errstate(invalid="ignore"):
        patterns = stored_nearest(kind, np.sqrt(v), scale)
    return np.where((patterns == 0) & (v != 0), 1, patterns).astype(np.uint32)


def stored_stochastic(
    kind: Kind, x: np.ndarray, scale: np.ndarray | float, random: np.ndarray, *, root: bool = False
) -> np.ndarray:
    """The same rounded up where 16 random bits and the first 16 of the part cut off carry into the next number."""
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):
        y = (np.sqrt(x) if root else x).astype(np.float64)
    magnitude = np.abs(np.where(np.isfinite(y), y, 0.0)) / scale
    numbers = magnitudes(kind)
    below, above = neighbours(kind, magnitude)
    gap = np.where(above > below, numbers[above] - numbers[below], 1.0)
    cut_off = np.floor((magnitude - numbers[below]) / gap * 65536)
    up = (above > below) & (cut_off + random >= 65536)
    patterns = _with_sign_and_specials(kind, y, np.where(up, above, below))
    return np.where(root & (patterns == 0) & (x != 0), 1, patterns).astype(np.uint32)


def loaded(kind: Kind, payloads: np.ndarray, scale: np.ndarray | float, *, root: bool) -> np.ndarray:
    """float64 of payloads under a scale: what FP32 must hold exactly."""
    x = values(kind)[payloads] * scale
    return x * x if root else x


@cache
def scale_exponents(kind: Kind, root: bool) -> range:
    """The powers of two that are normal FP32 numbers and at which every payload's value is one in FP32."""

    def exact(exponent: int) -> bool:
        numbers = magnitudes(kind) * 2.0**exponent
        numbers = numbers * numbers if root else numbers
        with np.errstate(over="ignore"):
            return bool((numbers.astype(np.float32).astype(np.float64) == numbers).all())

    good = [exponent for exponent in range(-126, 128) if exact(exponent)]
    assert good == list(range(good[0], good[-1] + 1))
    return range(good[0], good[-1] + 1)


def scale_of(kind: Kind, block: np.ndarray, *, root: bool) -> float:
    """The smallest allowed power of two at which the block's largest finite value (or root) fits."""
    x = np.asarray(block, np.float32)
    with np.errstate(invalid="ignore"):
        x = np.sqrt(x) if root else np.abs(x)
    largest = float(x[np.isfinite(x)].max(initial=0.0))
    if largest == 0.0:
        return 1.0
    exponents = scale_exponents(kind, root)
    fitting = (2.0**e for e in exponents if largest <= magnitudes(kind)[-1] * 2.0**e)
    return next(fitting, 2.0 ** exponents[-1])


def stored_tensor(
    kind: Kind, x: np.ndarray, *, root: bool, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Payloads (uint32) and scales (float32) of a whole tensor, to nearest or by 16 random bits an element."""
    payloads, scales = np.empty(x.size, np.uint32), np.empty(-(-x.size // BLOCK), np.float32)
    for block, begin in enumerate(range(0, x.size, BLOCK)):
        part = slice(begin, begin + BLOCK)
        scale = scale_of(kind, x[part], root=root)
        if random is not None:
            payloads[part] = stored_stochastic(kind, x[part], scale, random[part], root=root)
        else:
            payloads[part] = (stored_root_nearest if root else stored_nearest)(kind, x[part], scale)
        scales[block] = scale
    return payloads, scales


def loaded_tensor(kind: Kind, payloads: np.ndarray, scales: np.ndarray, *, root: bool) -> np.ndarray:
    """float32 of a whole tensor's payloads."""
    each = np.repeat(scales.astype(np.float64), BLOCK)[: payloads.size]
    return loaded(kind, payloads, each, root=root).astype(np.float32)


def philox4x32(counter: list, key: list, rounds: int = 10) -> list:
    """Philox of Salmon et al. 2011, section 3.3: two words multiplied, halves exchanged and mixed with a key
    that grows by a Weyl sequence. Words are integers, or arrays of uint64 that hold 32 bits each."""
    (r0, l0, r1, l1), (k0, k1), mask = counter, key, 2**32 - 1
    for _ in range(rounds):
        high0, low0 = divmod(r0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(r1 * 0xCD9E8D57, 2**32)
        r0, l0, r1, l1 = high1 ^ l0 ^ k0, low1, high0 ^ l1 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [r0, l0, r1, l1]


def random_bits(seed: int, ordinal: int, tensor: int, step: int, indices: np.ndarray) -> np.ndarray:
    """The 16 bits of each element, by its global index."""
    indices = np.asarray(indices, np.uint64)
    group = indices // 8
    rest = [np.full_like(group, ordinal), np.full_like(group, 4 * step + tensor)]
    words = philox4x32([group % 2**32, group // 2**32, *rest], [seed % 2**32, seed // 2**32])
    chosen = np.choose((indices % 8 // 2).astype(np.int64), words)
    return np.where(indices % 2 == 0, chosen % 65536, chosen // 65536).astype(np.uint32)
