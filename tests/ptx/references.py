"""What instructions should give, by Python's integers and exact fractions: nothing of the interpreter's arithmetic."""

import math
import struct
from fractions import Fraction

import numpy as np

SPECIAL32 = [0x0, 0x80000000, 0x1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF]
SPECIAL32 += [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x3F800001, 0x3F7FFFFF, 0x33800000]
NAN = 0x7FFFFFFF


def floats32(seed: int, count: int) -> np.ndarray:
    """Bits of FP32 numbers: any pattern, close magnitudes so that sums cancel, and specials."""
    rng = np.random.default_rng(seed)
    near = (rng.integers(0x3F000000, 0x40800000, count) | (rng.integers(0, 2, count) << 31)).astype(np.uint32)
    bits = np.where(rng.random(count) < 0.5, near, rng.integers(0, 2**32, count, dtype=np.uint32))
    bits[rng.random(count) < 0.2] = rng.choice(np.array(SPECIAL32, np.uint32), 1)[0]
    spread = rng.choice(np.array(SPECIAL32, np.uint32), count)
    return np.where(rng.random(count) < 0.25, spread, bits).astype(np.uint32)


def floats64(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**64, count, dtype=np.uint64)
    near = rng.integers(0x3FE0000000000000, 0x4010000000000000, count, dtype=np.uint64)
    bits = np.where(rng.random(count) < 0.6, near, bits)
    special = [0, 1 << 63, 1, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x7FEFFFFFFFFFFFFF]
    spread = rng.choice(np.array(special, np.uint64), count)
    return np.where(rng.random(count) < 0.2, spread, bits)


def value(bits: int, size: int) -> float:
    return struct.unpack("<d" if size == 64 else "<f", struct.pack("<Q" if size == 64 else "<I", bits))[0]


def bits64(x: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def round_to(exact: Fraction, mantissa: int, smallest: int, largest: int) -> tuple[Fraction, bool]:
    """To nearest even with `mantissa` bits, exponents from `smallest` (of the last place) up to
    `largest` (of the first); whether that overflows."""
    if not exact:
        return exact, False
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - mantissa + 1, smallest)
    rounded = round(magnitude / unit) * unit  # Python rounds a Fraction's half to even
    return (rounded if exact > 0 else -rounded), rounded >= Fraction(2) ** (largest + 1)


def encode(exact: Fraction, size: int, zero_sign: bool) -> int:
    """The bits of the FP32 or FP64 number nearest to a fraction."""
    mantissa, smallest, largest = (24, -149, 127) if size == 32 else (53, -1074, 1023)
    rounded, overflow = round_to(exact, mantissa, smallest, largest)
    negative = exact < 0 or (not exact and zero_sign)
    if overflow:
        number = -math.inf if negative else math.inf
    else:
        number = float(rounded)
    number = math.copysign(number, -1 if negative else 1)
    return struct.unpack("<I", struct.pack("<f", number))[0] if size == 32 else bits64(number)


def reference(name: str, size: int, *bits: int) -> int | None:
    """An IEEE operation to nearest even on bit patterns; None for an FP64 NaN, which has no one pattern."""
    nan = NAN if size == 32 else None
    xs = [value(b, size) for b in bits]
    if any(math.isnan(x) for x in xs):
        return nan
    if all(math.isfinite(x) for x in xs):
        a, b, c = ([Fraction(x) for x in xs] + [Fraction(0)] * 2)[:3]
        sign = [math.copysign(1, x) < 0 for x in xs]
        if name == "fma":
            zero = (sign[0] ^ sign[1]) and sign[2] if not (a * b and c) else False
            return encode(a * b + c, size, zero)
        if name in ("add", "sub"):
            other = sign[1] ^ (name == "sub")
            return encode(a + b if name == "add" else a - b, size, not a and not b and sign[0] and other)
        if name == "mul":
            return encode(a * b, size, sign[0] ^ sign[1])
        if name == "div" and b:
            return encode(a / b, size, sign[0] ^ sign[1])
        if name == "rcp" and a:
            return encode(1 / a, size, sign[0])
    # What is left has an infinity or a division by zero: signs and NaN by the rules.
    return infinite(name, size, xs)


def infinite(name: str, size: int, xs: list[float]) -> int | None:
    nan = NAN if size == 32 else None

    def out(x: float) -> int | None:
        if math.isnan(x):
            return nan
        return struct.unpack("<I", struct.pack("<f", x))[0] if size == 32 else bits64(x)

    def times(a: float, b: float) -> float:
        if math.isinf(a) or math.isinf(b):
            return math.nan if a == 0 or b == 0 else math.copysign(math.inf, math.copysign(1, a) * math.copysign(1, b))
        return 1.0  # finite: only its finiteness matters below

    if name in ("div", "rcp"):
        a, b = (1.0, xs[0]) if name == "rcp" else xs
        sign = math.copysign(1, a) * math.copysign(1, b)
        if math.isinf(b):
            return out(math.nan if math.isinf(a) else math.copysign(0.0, sign))
        return out(math.nan if a == 0 else math.copysign(math.inf, sign))
    if name == "mul":
        return out(times(*xs))
    if name == "sub":
        return out(xs[0] - xs[1])
    if name == "add":
        return out(xs[0] + xs[1])
    return out(times(xs[0], xs[1]) + xs[2])


def compare(got: np.ndarray, want: list, *inputs) -> None:
    for k, (g, w) in enumerate(zip(got.tolist(), want, strict=True)):
        if w is None:
            assert math.isnan(value(g, 64)), (k, hex(g))
        else:
            assert g == w, f"lane {k}: {[hex(int(i[k])) for i in inputs]} gave {g:#x}, not {w:#x}"


def integers(bits: int, signed: bool, seed: int, count: int = 300) -> list[int]:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    limits = np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True).tolist()
    return [limits.min, limits.max, 0, 1, limits.max - 1, 2, 3, 7, *values][:count]


def wrap(x: int, bits: int, signed: bool) -> int:
    x %= 2**bits
    return x - 2**bits if signed and x >> (bits - 1) else x


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ORDER = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
PREDICATE = "setp.{}.{} %p0, $1, $2; selp.u32 $0, 1, 0, %p0"
