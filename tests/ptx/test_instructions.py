"""Single instructions against references that share nothing with the interpreter's arithmetic:
Python's integers and exact fractions, rounded by struct's conversion or by hand."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from .handwritten import apply, run
from .memory import Fault

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


def test_bfloat16_is_the_nearest_and_nan_is_7fff():
    bits = np.concatenate([floats32(7, 900), np.arange(0x3F7F7F00, 0x3F808100, 257, dtype=np.uint32)])
    bits = np.concatenate([bits, np.uint32([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000])])
    for opcode, target in (("cvt.rn.bf16.f32", 80), ("cvt.rn.bf16.f32", 90)):
        got = apply(f"{opcode} $0, $1", "u2 u4", bits, target=target)
        want = []
        for b in bits.tolist():
            x = value(b, 32)
            if math.isnan(x):
                want.append(0x7FFF)
            elif math.isinf(x):
                want.append(b >> 16)
            else:
                rounded, overflow = round_to(Fraction(x), 8, -133, 127)
                number = math.inf if overflow else float(abs(rounded))
                want.append(struct.unpack("<I", struct.pack("<f", number))[0] >> 16 | (b >> 31) << 15)
        compare(got, want, bits)


def test_a_bfloat16_pair_has_its_first_source_above():
    a, b = floats32(8, 500), floats32(9, 500)
    got = apply("cvt.rn.bf16x2.f32 $0, $1, $2", "u4 u4 u4", a, b)
    upper = apply("cvt.rn.bf16.f32 $0, $1", "u2 u4", a)
    lower = apply("cvt.rn.bf16.f32 $0, $1", "u2 u4", b)
    assert (got >> 16 == upper).all() and (got & 0xFFFF == lower).all()


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


INTEGER = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: (a * b) >> bits,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "div": lambda a, b, bits: trunc_div(a, b),
    "rem": lambda a, b, bits: a - b * trunc_div(a, b),
}


@pytest.mark.parametrize("type_name", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", INTEGER)
def test_integers_wrap(name, type_name):
    bits, signed = int(type_name[1:]), type_name[0] == "s"
    a, b = integers(bits, signed, 1), integers(bits, signed, 2)[::-1]
    if name in ("div", "rem"):
        b = [x if x not in (0, -1) else 5 for x in b]
    dtype = f"{'i' if signed else 'u'}{bits // 8}"
    got = apply(f"{name}.{type_name} $0, $1, $2", f"{dtype} {dtype} {dtype}", np.array(a, dtype), np.array(b, dtype))
    assert got.tolist() == [wrap(INTEGER[name](x, y, bits), bits, signed) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("type_name", ["u16", "s16", "u32", "s32"])
def test_wide_products_lose_nothing(type_name):
    bits, signed = int(type_name[1:]), type_name[0] == "s"
    a, b, c = integers(bits, signed, 3), integers(bits, signed, 4)[::-1], integers(2 * bits, signed, 5)
    narrow, wide = (f"{'i' if signed else 'u'}{size // 8}" for size in (bits, 2 * bits))
    x, y, z = np.array(a, narrow), np.array(b, narrow), np.array(c, wide)
    got = apply(f"mul.wide.{type_name} $0, $1, $2", f"{wide} {narrow} {narrow}", x, y)
    assert got.tolist() == [i * j for i, j in zip(a, b, strict=True)]
    got = apply(f"mad.wide.{type_name} $0, $1, $2, $3", f"{wide} {narrow} {narrow} {wide}", x, y, z)
    assert got.tolist() == [wrap(i * j + k, 2 * bits, signed) for i, j, k in zip(a, b, c, strict=True)]


def test_division_by_zero_is_a_fault():
    one, zero = np.uint32([1]), np.uint32([0])
    with pytest.raises(Fault, match="by zero"):
        apply("div.u32 $0, $1, $2", "u4 u4 u4", one, zero)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_bits(bits):
    dtype = f"u{bits // 8}"
    a, b = integers(bits, False, 6), integers(bits, False, 7)[::-1]
    x, y = np.array(a, dtype), np.array(b, dtype)
    three = f"{dtype} {dtype} {dtype}"
    for name, of in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        got = apply(f"{name}.b{bits} $0, $1, $2", three, x, y)
        assert got.tolist() == [of(i, j) for i, j in zip(a, b, strict=True)]
    assert apply(f"not.b{bits} $0, $1", f"{dtype} {dtype}", x).tolist() == [2**bits - 1 - i for i in a]


def test_prmt_picks_bytes_or_their_signs():
    a, b = integers(32, False, 18), integers(32, False, 19)[::-1]
    selectors = [0x3210, 0x7654, 0x5410, 4180, 0xFEDC, 0xBA98, 0x0, *integers(16, False, 20, 400)][: len(a)]
    got = apply("prmt.b32 $0, $1, $2, $3", "u4 u4 u4 u4", np.uint32(a), np.uint32(b), np.uint32(selectors))
    for x, y, selector, g in zip(a, b, selectors, got.tolist(), strict=True):
        pool = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        picked = [pool[selector >> 4 * k & 7] for k in range(4)]
        signed = [(255 if byte > 127 else 0) if selector >> 4 * k & 8 else byte for k, byte in enumerate(picked)]
        assert g == int.from_bytes(bytes(signed), "little")


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_past_the_width_leave_zero_or_the_sign(bits):
    amounts = [*range(bits + 3), 255, 2**31, 2**32 - 1]
    for type_name, signed in ((f"b{bits}", False), (f"u{bits}", False), (f"s{bits}", True)):
        values = (integers(bits, signed, 8) * 2)[: len(amounts)]
        dtype = f"{'i' if signed else 'u'}{bits // 8}"
        x, by = np.array(values, dtype), np.array(amounts, np.uint32)
        got = apply(f"shr.{type_name} $0, $1, $2", f"{dtype} {dtype} u4", x, by)
        assert got.tolist() == [v >> min(s, bits) for v, s in zip(values, amounts, strict=True)]
        if type_name[0] == "b":
            got = apply(f"shl.{type_name} $0, $1, $2", f"{dtype} {dtype} u4", x, by)
            assert got.tolist() == [wrap(v << min(s, bits), bits, False) for v, s in zip(values, amounts, strict=True)]


ORDER = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
PREDICATE = "setp.{}.{} %p0, $1, $2; selp.u32 $0, 1, 0, %p0"


@pytest.mark.parametrize("name", ORDER)
def test_comparison_of_integers(name):
    for type_name in ("u16", "s16", "u32", "s32", "u64", "s64"):
        bits, signed = int(type_name[1:]), type_name[0] == "s"
        a, b = integers(bits, signed, 9), integers(bits, signed, 10)
        b[::3] = a[::3]
        dtype = f"{'i' if signed else 'u'}{bits // 8}"
        want = [int(ORDER[name](i, j)) for i, j in zip(a, b, strict=True)]
        names = [name] + ([{"lt": "lo", "le": "ls", "gt": "hi", "ge": "hs"}.get(name, name)] if not signed else [])
        for spelled in names:
            got = apply(
                PREDICATE.format(spelled, type_name), f"u4 {dtype} {dtype}", np.array(a, dtype), np.array(b, dtype)
            )
            assert got.tolist() == want, spelled


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


def test_predicates_combine():
    a, b, c = (np.array(integers(32, True, seed)) % 3 for seed in (11, 12, 13))
    for join, of in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        text = (
            f"setp.eq.s32 %p2, $3, 0; setp.lt.{join}.s32 %p0|%p1, $1, $2, %p2;"
            "selp.u32 %r8, 1, 0, %p0; selp.u32 %r9, 2, 0, %p1; or.b32 $0, %r8, %r9"
        )
        got = apply(text, "u4 i4 i4 i4", a, b, c)
        want = [of(int(x < y), int(z == 0)) + 2 * of(int(x >= y), int(z == 0)) for x, y, z in zip(a, b, c, strict=True)]
        assert got.tolist() == want, join
    got = apply(
        "setp.eq.s32 %p0, $1, 0; setp.eq.s32 %p1, $2, 0; and.pred %p2, %p0, %p1; not.pred %p3, %p2;"
        "selp.b32 $0, 1, 0, %p3",
        "u4 i4 i4",
        a,
        b,
    )
    assert got.tolist() == [int(not (x == 0 and y == 0)) for x, y in zip(a, b, strict=True)]


def test_signs():
    bits = floats32(19, 300)
    x = bits.tolist()
    assert apply("neg.f32 $0, $1", "u4 u4", bits).tolist() == [b ^ 0x80000000 for b in x]
    assert apply("abs.f32 $0, $1", "u4 u4", bits).tolist() == [b & 0x7FFFFFFF for b in x]
    a = integers(32, True, 14)
    assert apply("neg.s32 $0, $1", "i4 i4", np.int32(a)).tolist() == [wrap(-i, 32, True) for i in a]
    assert apply("abs.s32 $0, $1", "i4 i4", np.int32(a)).tolist() == [wrap(abs(i), 32, True) for i in a]


@pytest.mark.parametrize("to", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("of", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integers_change_size_and_sign(to, of):
    """The value is cut to the source type, then extended or cut to the other."""
    register = max(int(of[1:]), 16)
    values = integers(register, False, 15)
    size = int(to[1:])
    got = apply(f"cvt.{to}.{of} $0, $1", f"u{size // 8} u{register // 8}", np.array(values, f"u{register // 8}"))
    want = [wrap(wrap(v, int(of[1:]), of[0] == "s"), size, False) for v in values]
    assert got.tolist() == want


def test_mov_packs_and_unpacks_from_the_low_end():
    a, b = np.array(integers(16, False, 16), np.uint16), np.array(integers(16, False, 17)[::-1], np.uint16)
    packed = apply("mov.b32 $0, {$1, $2}", "u4 u2 u2", a, b)
    assert packed.tolist() == [int(x) | int(y) << 16 for x, y in zip(a, b, strict=True)]
    assert apply("mov.b32 {_, $0}, $1", "u2 u4", packed).tolist() == b.tolist()
    assert apply("mov.b32 {$0, %h9}, $1", "u2 u4", packed).tolist() == a.tolist()
    got = apply("mov.b32 %r9, {$1, $2}; mov.b64 $0, {%r9, %r9}", "u8 u2 u2", a, b)
    assert got.tolist() == [int(p) | int(p) << 32 for p in packed]
    four = apply("mov.b64 $0, {$1, $2, $2, $1}", "u8 u2 u2", a, b)
    assert four.tolist() == [int(x) | int(y) << 16 | int(y) << 32 | int(x) << 48 for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(("load", "extended"), [("u8", 0xF0), ("s8", 0xFFFFFFF0), ("u16", 0x80F0), ("s16", 0xFFFF80F0)])
def test_narrow_loads_extend_into_wider_registers(load, extended):
    memory, out = np.uint16([0x80F0]), np.zeros(1, np.uint32)
    body = (
        f"ld.param.u64 %d0, [a0]; ld.global.{load} %r0, [%d0]; ld.param.u64 %d1, [a1]; st.global.u32 [%d1], %r0; ret;"
    )
    run(body, memory, out, threads=1)
    assert out[0] == extended


def test_narrow_stores_cut_wider_registers():
    out = np.zeros(2, np.uint16)
    run("ld.param.u64 %d0, [a0]; mov.u32 %r0, 0x12345678; st.global.u16 [%d0+2], %r0; ret;", out, threads=1)
    assert out.tolist() == [0, 0x5678]


@pytest.mark.parametrize(
    ("opcode", "count", "size"), [("v2.u16", 2, 2), ("cs.v4.b32", 4, 4), ("v2.b64", 2, 8), ("v2.f32", 2, 4)]
)
def test_vectors_keep_their_order(opcode, count, size):
    letter = {2: "h", 4: "f" if "f32" in opcode else "r", 8: "d"}[size]
    names = ", ".join(f"%{letter}{8 + k}" for k in range(count))
    swapped = ", ".join(f"%{letter}{8 + k}" for k in reversed(range(count)))
    width = count * size
    body = f"""
    mov.u32 %r0, %tid.x; ld.param.u64 %d0, [a0]; mad.wide.u32 %d2, %r0, {width}, %d0;
    ld.param.u64 %d1, [a1]; mad.wide.u32 %d3, %r0, {width}, %d1;
    ld.global.{opcode} {{{names}}}, [%d2]; st.global.{opcode} [%d3], {{{swapped}}}; ret;
    """
    raw = np.zeros(2 * 32 * width + 64, np.uint8)
    start = -raw.ctypes.data % 64
    data = raw[start : start + 32 * width].view(f"u{size}")
    out = raw[start + 32 * width : start + 64 * width].view(f"u{size}")
    data[:] = np.arange(data.size) * 257 % 65521
    run(body, data, out)
    assert (out.reshape(-1, count) == data.reshape(-1, count)[:, ::-1]).all()
