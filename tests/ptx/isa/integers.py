"""Integers and bits."""

from __future__ import annotations

import numpy as np

from .. import exact
from ..memory import Fault
from ..operands import DTYPES
from ..parse import PtxError
from .opcodes import Code, Step, elementwise, opcode


@opcode(r"(?P<name>add|sub|min|max|mul\.lo)\.(?P<type>[us](?:16|32|64))")
def _integer_binary(code: Code, name: str, type: str) -> Step:
    table = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "mul.lo": np.multiply}
    return elementwise(code, type, table[name], 2)


@opcode(r"(?P<name>div|rem)\.(?P<type>[us](?:16|32|64))")
def _integer_divide(code: Code, name: str, type: str) -> Step:
    def divide(a, b):
        if (b == 0).any():
            raise Fault("integer division by zero")
        if DTYPES[type].kind == "i" and ((b == -1) & (a == np.iinfo(DTYPES[type]).min)).any():
            raise Fault("integer division overflows")
        remainder = np.fmod(a, b)  # truncates, as PTX does; numpy's // and % floor
        return remainder if name == "rem" else (a - remainder) // b

    return elementwise(code, type, divide, 2)


@opcode(r"mul\.hi\.(?P<type>[us](?:16|32|64))")
def _multiply_high(code: Code, type: str) -> Step:
    return elementwise(code, type, exact.multiply_high, 2)


def _widened(type_name: str) -> str:
    return f"{type_name[0]}{2 * int(type_name[1:])}"


@opcode(r"mul\.wide\.(?P<type>[us](?:16|32))")
def _multiply_wide(code: Code, type: str) -> Step:
    wide = DTYPES[_widened(type)]
    return elementwise(code, type, lambda a, b: a.astype(wide) * b.astype(wide), 2, _widened(type))


@opcode(r"mad\.(?P<form>lo|wide)\.(?P<type>[us](?:16|32|64))")
def _multiply_add(code: Code, form: str, type: str) -> Step:
    code.expect(4)
    if form == "wide" and type.endswith("64"):
        raise PtxError("mad.wide is of 16 or 32 bits")
    result = type if form == "lo" else _widened(type)
    dtype = DTYPES[result]
    to, c = code.destination(0, result), code.source(3, result)
    a, b = code.source(1, type), code.source(2, type)

    def run(block, lanes):
        to(block, lanes, a(block, lanes).astype(dtype) * b(block, lanes).astype(dtype) + c(block, lanes))

    return run


@opcode(r"(?P<name>and|or|xor)\.(?P<type>b16|b32|b64|pred)")
def _logic(code: Code, name: str, type: str) -> Step:
    table = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return elementwise(code, type, table[name], 2)


@opcode(r"not\.(?P<type>b16|b32|b64|pred)")
def _not(code: Code, type: str) -> Step:
    return elementwise(code, type, np.bitwise_not, 1)


@opcode(r"(?P<name>shl|shr)\.(?P<type>[usb](?:16|32|64))")
def _shift(code: Code, name: str, type: str) -> Step:
    if name == "shl" and type[0] != "b":
        raise PtxError("shl is of bits")
    code.expect(3)
    to, value, amount = code.destination(0, type), code.source(1, type), code.source(2, "u32")
    dtype = DTYPES[type]
    bits = dtype.itemsize * 8

    def run(block, lanes):
        a, by = value(block, lanes), amount(block, lanes)
        inside = np.minimum(by, bits - 1).astype(dtype)
        if name == "shr" and dtype.kind == "i":
            return to(block, lanes, a >> inside)  # the sign, however far
        shifted = a << inside if name == "shl" else a >> inside
        return to(block, lanes, np.where(by >= bits, dtype.type(0), shifted))

    return run


@opcode(r"prmt\.b32")
def _permute_bytes(code: Code) -> Step:
    """Each nibble of the selector names a byte of {b, a}; its top bit asks for that byte's sign instead."""

    def permute(a, b, selector):
        pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(1, np.uint32)
        for k in range(4):
            nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
            byte = ((pair >> (np.uint64(8) * (nibble & 7))) & np.uint64(0xFF)).astype(np.uint32)
            sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
            result = result | (np.where(nibble & 8, sign, byte) << np.uint32(8 * k))
        return result

    return elementwise(code, "b32", permute, 3)
