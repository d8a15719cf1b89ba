"""Single integer instructions, moves and narrow accesses against Python's integers."""

import numpy as np
import pytest

from .handwritten import apply, run
from .memory import Fault
from .parse import PtxError
from .references import ORDER, PREDICATE, floats32, integers, trunc_div, wrap

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


def test_predicates_are_set_to_false_and_true():
    text = "mov.pred %p0, 0; mov.pred %p1, -1; selp.b32 $0, 1, 2, %p0; @%p1 add.u32 $0, $0, $1"
    assert apply(text, "u4 u4", np.uint32([10, 20])).tolist() == [12, 22]
    with pytest.raises(PtxError):
        apply("mov.pred %p0, 2; mov.b32 $0, $1", "u4 u4", np.uint32([10, 20]))


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
