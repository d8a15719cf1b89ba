"""Floating point, and conversion from and to it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import exact
from ..memory import Fault
from ..operands import DTYPES
from .opcodes import Code, Step, convert, elementwise, need_target, opcode


@opcode(r"(?P<name>add|sub|mul|div)\.rn\.(?P<type>f32|f64)")
def _float_binary(code: Code, name: str, type: str) -> Step:
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    return elementwise(code, type, lambda a, b: exact.canonical_nan(operation(a, b)), 2)


@opcode(r"fma\.rn\.(?P<type>f32|f64)")
def _fma(code: Code, type: str) -> Step:
    operation = exact.fma32 if type == "f32" else exact.fma64
    return elementwise(code, type, lambda a, b, c: exact.canonical_nan(operation(a, b, c)), 3)


@opcode(r"sqrt\.rn\.(?P<type>f32|f64)")
def _sqrt(code: Code, type: str) -> Step:
    return elementwise(code, type, lambda a: exact.canonical_nan(np.sqrt(a)), 1)


@opcode(r"rcp\.rn\.(?P<type>f32|f64)")
def _rcp(code: Code, type: str) -> Step:
    one = DTYPES[type].type(1)
    return elementwise(code, type, lambda a: exact.canonical_nan(one / a), 1)


@opcode(r"(?P<name>neg|abs)\.(?P<type>s16|s32|s64|f32|f64)")
def _sign(code: Code, name: str, type: str) -> Step:
    return elementwise(code, type, np.negative if name == "neg" else np.abs, 1)


@opcode(r"cvt\.(?P<to>[us](?:8|16|32|64))\.(?P<of>[us](?:8|16|32|64))")
def _cvt_integers(code: Code, to: str, of: str) -> Step:
    return convert(code, to, of, lambda a: a.astype(DTYPES[to]))


@opcode(r"cvt\.rn\.(?P<to>f32|f64)\.(?P<of>[us](?:8|16|32|64))")
def _cvt_to_float(code: Code, to: str, of: str) -> Step:
    return convert(code, to, of, lambda a: a.astype(DTYPES[to]))


@opcode(r"cvt\.rzi\.(?P<to>[us](?:32|64))\.(?P<of>f32|f64)")
def _cvt_to_integer(code: Code, to: str, of: str) -> Step:
    def truncate(a):
        if np.isnan(a).any():
            raise Fault("NaN to an integer: the result is not the same everywhere")
        return exact.truncate_to_integer(a, DTYPES[to])

    return convert(code, to, of, truncate)


@opcode(r"cvt\.f64\.f32")
def _cvt_widen(code: Code) -> Step:
    return convert(code, "f64", "f32", lambda a: a.astype(np.float64))


@opcode(r"cvt\.rn\.f32\.f64")
def _cvt_narrow(code: Code) -> Step:
    return convert(code, "f32", "f64", lambda a: exact.canonical_nan(a.astype(np.float32)))


@opcode(r"cvt\.rn\.bf16\.f32")
def _cvt_bfloat16(code: Code) -> Step:
    need_target(code, 80)
    return convert(code, "b16", "f32", exact.bfloat16_bits)


@opcode(r"cvt\.rn\.bf16x2\.f32")
def _cvt_bfloat16_pair(code: Code) -> Step:
    need_target(code, 80)
    return _pair(code, exact.bfloat16_bits)


def _pair(code: Code, bits_of: Callable) -> Step:
    """d = two numbers of 16 bits, the first source above."""
    code.expect(3)
    to, high, low = code.destination(0, "b32"), code.source(1, "f32"), code.source(2, "f32")

    def run(block, lanes):
        upper = bits_of(high(block, lanes)).astype(np.uint32) << np.uint32(16)
        to(block, lanes, upper | bits_of(low(block, lanes)))

    return run


@opcode(r"cvt\.rn\.f16\.f32")
def _cvt_float16(code: Code) -> Step:
    return convert(code, "b16", "f32", exact.float16_bits)


@opcode(r"cvt\.rn\.f16x2\.f32")
def _cvt_float16_pair(code: Code) -> Step:
    need_target(code, 80)
    return _pair(code, exact.float16_bits)


@opcode(r"cvt\.f32\.f16")
def _cvt_from_float16(code: Code) -> Step:
    return convert(code, "f32", "b16", lambda a: exact.canonical_nan(a.view(np.float16).astype(np.float32)))
