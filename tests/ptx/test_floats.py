"""Single floating-point instructions against references that share nothing with the interpreter."""

import math
from fractions import Fraction

import numpy as np
import pytest

from .handwritten import apply
from .memory import Fault
from .references import (
    NAN,
    ORDER,
    PREDICATE,
    bits64,
    compare,
    encode,
    floats32,
    floats64,
    reference,
    round_to,
    value,
)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(("name", "arity"), [("add", 2), ("sub", 2), ("mul", 2), ("div", 2), ("fma", 3), ("rcp", 1)])
def test_arithmetic_rounds_once_to_nearest_even(name, arity, size):
    make, count = (floats32, 1000) if size == 32 else (floats64, 400)
    inputs = [make(seed, count) for seed in range(arity)]
    if name == "fma":  # a third of them cancel all but the rounding error of the product
        third = count // 3
        with np.errstate(all="ignore"):
            kind = f"f{size // 8}"
            product = inputs[0][:third].view(kind) * inputs[1][:third].view(kind)
        inputs[2][:third] = (-product).view(inputs[2].dtype)
    operands = ", ".join(f"${k}" for k in range(arity + 1))
    dtypes = " ".join([f"u{size // 8}"] * (arity + 1))
    got = apply(f"{name}.rn.f{size} {operands}", dtypes, *inputs)
    compare(got, [reference(name, size, *map(int, lane)) for lane in zip(*inputs, strict=True)], *inputs)


def test_fma_is_not_rounded_twice():
    """Products half way between two FP32 numbers, moved off by less than FP64 can add to them."""
    rng = np.random.default_rng(20)
    a, b = (1 + (2 * rng.integers(0, 800, 400) + 1) * 2.0**-12 for _ in range(2))
    c = rng.choice([-1.0, 1.0], 400) * 2.0 ** rng.integers(-149, -60, 400)
    bits = [x.astype(np.float32).view(np.uint32) for x in (a, b, c)]
    got = apply("fma.rn.f32 $0, $1, $2, $3", "u4 u4 u4 u4", *bits)
    compare(got, [reference("fma", 32, *map(int, lane)) for lane in zip(*bits, strict=True)], *bits)


@pytest.mark.parametrize("size", [32, 64])
def test_sqrt_is_the_nearest(size):
    bits = floats32(3, 2000) if size == 32 else floats64(3, 2000)
    got = apply(f"sqrt.rn.f{size} $0, $1", f"u{size // 8} u{size // 8}", bits)
    mantissa = 24 if size == 32 else 53
    for b, g in zip(bits.tolist(), got.tolist(), strict=True):
        x, y = value(b, size), value(g, size)
        if math.isnan(x) or (x < 0):
            assert g == NAN if size == 32 else math.isnan(y)
        elif x == 0 or math.isinf(x):
            assert g == b
        else:
            # |sqrt(x) - y| < half a unit in the last place: a root never lies half way.
            unit = Fraction(2) ** (math.frexp(y)[1] - mantissa)
            assert (Fraction(y) - unit / 2) ** 2 < Fraction(x) < (Fraction(y) + unit / 2) ** 2


HALVES = {
    # significant bits, exponents of the last place and of the first, where infinity is, and patterns near the largest
    "bf16": (8, -133, 127, 0x7F80, [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000]),
    "f16": (11, -24, 15, 0x7C00, [0x477FEFFF, 0x477FF000, 0x477FE000, 0xC77FF000, 0x33000000, 0x33000001, 0x33C00000]),
}


def stored_half(x: float, sign: int, kind: str) -> int:
    """The bits of a number in 16 bits, to nearest even, by exact fractions."""
    mantissa, smallest, largest, infinity, _ = HALVES[kind]
    if math.isnan(x):
        return 0x7FFF
    rounded, overflow = (Fraction(0), True) if math.isinf(x) else round_to(Fraction(x), mantissa, smallest, largest)
    if overflow:
        return infinity | sign << 15
    units = abs(rounded) / Fraction(2) ** smallest  # of the last place of a denormal
    exponent = max(units.numerator.bit_length() - mantissa, 0)
    return int(units / 2**exponent) + (exponent << (mantissa - 1)) | sign << 15


@pytest.mark.parametrize("kind", HALVES)
def test_sixteen_bits_are_the_nearest_and_nan_is_7fff(kind):
    bits = np.concatenate([floats32(7, 900), np.arange(0x3F7F7F00, 0x3F808100, 257, dtype=np.uint32)])
    tiny = np.random.default_rng(21).integers(0x32000000, 0x39000000, 600, dtype=np.uint32)  # FP16's denormals
    bits = np.concatenate([bits, tiny, tiny & 0xFFFFF000, np.uint32(HALVES[kind][4])])
    for target in (80, 90):
        got = apply(f"cvt.rn.{kind}.f32 $0, $1", "u2 u4", bits, target=target)
        compare(got, [stored_half(value(b, 32), b >> 31, kind) for b in bits.tolist()], bits)


@pytest.mark.parametrize("kind", HALVES)
def test_a_pair_of_sixteen_bits_has_its_first_source_above(kind):
    a, b = floats32(8, 500), floats32(9, 500)
    got = apply(f"cvt.rn.{kind}x2.f32 $0, $1, $2", "u4 u4 u4", a, b)
    upper = apply(f"cvt.rn.{kind}.f32 $0, $1", "u2 u4", a)
    lower = apply(f"cvt.rn.{kind}.f32 $0, $1", "u2 u4", b)
    assert (got >> 16 == upper).all() and (got & 0xFFFF == lower).all()


def test_every_float16_is_read_exactly():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for part in np.split(bits, 64):
        got = apply("cvt.f32.f16 $0, $1", "u4 u2", part)
        for b, g in zip(part.tolist(), got.tolist(), strict=True):
            sign, exponent, mantissa = b >> 15, b >> 10 & 31, b & 1023
            if exponent == 31:
                want = NAN if mantissa else 0x7F800000 | sign << 31
            else:
                exact = Fraction(mantissa + (1024 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 25)
                want = encode(-exact if sign else exact, 32, bool(sign))
            assert g == want, hex(b)


def test_floats_become_wider_and_narrower():
    narrow = floats32(10, 500)
    wide = apply("cvt.f64.f32 $0, $1", "u8 u4", narrow)
    for b, w in zip(narrow.tolist(), wide.tolist(), strict=True):
        x = value(b, 32)
        assert math.isnan(value(w, 64)) if math.isnan(x) else w == bits64(x)
    doubles = floats64(11, 500)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        doubles[:250] = floats32(12, 250).view(np.float32).astype(np.float64).view(np.uint64) + np.uint64(1 << 28)
    got = apply("cvt.rn.f32.f64 $0, $1", "u4 u8", doubles)
    want = []
    for b in doubles.tolist():
        x = value(b, 64)
        if math.isnan(x):
            want.append(NAN)
        elif math.isinf(x):
            want.append(0x7F800000 | (b >> 63) << 31)
        else:
            want.append(encode(Fraction(x), 32, math.copysign(1, x) < 0))
    compare(got, want, doubles)


@pytest.mark.parametrize("to", ["f32", "f64"])
@pytest.mark.parametrize("of", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_become_the_nearest_float(to, of):
    rng = np.random.default_rng(13)
    dtype = np.dtype(f"{'i' if of[0] == 's' else 'u'}{int(of[1:]) // 8}")
    limits = np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, 500, dtype=dtype, endpoint=True)
    values[:8] = [limits.min, limits.max, 0, 1, limits.max - 1, limits.max // 2, limits.max // 2 + 1, 3]
    if dtype.itemsize == 8:  # just beside the half way between two floats
        values[8:200] = (
            (values[8:200] & ~dtype.type(0xFFFFFFFFF)) + dtype.type(0x800000000) + np.arange(-96, 96).astype(dtype)
        )
    size = int(to[1:])
    got = apply(f"cvt.rn.{to}.{of} $0, $1", f"u{size // 8} {dtype.str[1:]}", values)
    compare(got, [encode(Fraction(int(v)), size, False) for v in values])


@pytest.mark.parametrize("of", ["f32", "f64"])
@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64"])
def test_floats_become_integers_toward_zero_and_within_range(to, of):
    size = int(of[1:])
    bits = floats32(14, 1000) if size == 32 else floats64(14, 1000)
    scaled = np.random.default_rng(15).standard_normal(300) * 2.0 ** np.random.default_rng(16).integers(-2, 70, 300)
    bits[:300] = scaled.astype(f"f{size // 8}").view(bits.dtype)
    bits = np.array([b for b in bits.tolist() if not math.isnan(value(b, size))], bits.dtype)
    dtype = np.dtype(f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}")
    limits = np.iinfo(dtype)
    got = apply(f"cvt.rzi.{to}.{of} $0, $1", f"{dtype.str[1:]} u{size // 8}", bits)
    for b, g in zip(bits.tolist(), got.tolist(), strict=True):
        x = value(b, size)
        want = (
            (limits.max if x > 0 else limits.min) if math.isinf(x) else min(max(math.trunc(x), limits.min), limits.max)
        )
        assert g == want, x


def test_nan_does_not_become_an_integer():
    with pytest.raises(Fault, match="NaN"):
        apply("cvt.rzi.u64.f32 $0, $1", "u8 u4", np.uint32([0x7FC00000]))


@pytest.mark.parametrize("size", [32, 64])
def test_comparison_of_floats_and_nan(size):
    make = floats32 if size == 32 else floats64
    a, b = make(17, 400), make(18, 400)
    b[::3] = a[::3]
    pairs = [(value(int(i), size), value(int(j), size)) for i, j in zip(a, b, strict=True)]
    dtypes = f"u4 u{size // 8} u{size // 8}"
    for name, holds in ORDER.items():
        # Python's != holds for NaN; PTX's ne is ordered and does not.
        ordered = [int(holds(x, y) and x == x and y == y) for x, y in pairs]
        assert apply(PREDICATE.format(name, f"f{size}"), dtypes, a, b).tolist() == ordered, name
        unordered = [int(holds(x, y) or x != x or y != y) for x, y in pairs]
        assert apply(PREDICATE.format(name + "u", f"f{size}"), dtypes, a, b).tolist() == unordered, name
    nan = [int(x != x or y != y) for x, y in pairs]
    assert apply(PREDICATE.format("nan", f"f{size}"), dtypes, a, b).tolist() == nan
    assert apply(PREDICATE.format("num", f"f{size}"), dtypes, a, b).tolist() == [1 - n for n in nan]
