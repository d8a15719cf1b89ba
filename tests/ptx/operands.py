"""Operands of instructions as functions that read and write the lanes of a block.

A register must be as wide as the instruction's type; loads, stores and conversions may use a wider
one (PTX ISA, "Operand Size Exceeding Instruction-Type Size").
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .parse import TYPE_BITS, Address, Kernel, Operand, PtxError

__all__ = ["DTYPES", "Destination", "Source", "address", "destination", "label", "source", "vector"]

Source = Callable[..., np.ndarray]
"""(block, lanes) -> one value a lane, or one for all of them."""
Destination = Callable[..., None]
"""(block, lanes, values)"""

_KINDS = {"u": "u", "b": "u", "s": "i", "f": "f"}
DTYPES = {name: np.dtype(f"{_KINDS[name[0]]}{bits // 8}") for name, bits in TYPE_BITS.items() if name[0] in "usf"}
DTYPES |= {f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES["pred"] = np.dtype(bool)

_SPECIAL = re.compile(r"%(?:n?tid|n?ctaid)\.[xyz]|%laneid")


def source(kernel: Kernel, operand: Operand, type_name: str, *, wider: bool = False) -> Source:
    if not isinstance(operand, str):
        raise PtxError(f"{operand} is not one value")
    dtype = DTYPES[type_name]
    if operand in kernel.registers:
        return _register_source(kernel, operand, dtype, wider)
    if _SPECIAL.fullmatch(operand):
        if dtype.itemsize != 4:
            raise PtxError(f"{operand} has 32 bits")
        return lambda block, lanes: block.special(operand, lanes).view(dtype)
    for variables in (kernel.params, kernel.shared):
        if operand in variables:
            if dtype.itemsize != 8:
                raise PtxError(f"an address has 64 bits, {type_name} does not")
            value = np.array([variables[operand].address], np.uint64).view(dtype)
            return lambda block, lanes: value
    value = _immediate(operand, dtype)
    return lambda block, lanes: value


def _register_source(kernel: Kernel, name: str, dtype: np.dtype, wider: bool) -> Source:
    bits = 1 if dtype.kind == "b" else dtype.itemsize * 8
    if kernel.registers[name] == bits:
        return lambda block, lanes: block.read(name, lanes).view(dtype)
    if not wider or kernel.registers[name] < bits or bits == 1 or dtype.kind == "f":
        raise PtxError(f"{name} has {kernel.registers[name]} bits where {bits} are expected")
    low = np.dtype(f"u{dtype.itemsize}")
    return lambda block, lanes: block.read(name, lanes).astype(low).view(dtype)


def _immediate(text: str, dtype: np.dtype) -> np.ndarray:
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        value = np.array([int(match[1], 16)], np.uint32)
    elif match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        value = np.array([int(match[1], 16)], np.uint64)
    elif dtype.kind == "b" and text in ("0", "-1"):  # as nvcc writes false and true
        return np.array([text == "-1"])
    elif re.fullmatch(r"-?(?:\d+|0[xX][0-9a-fA-F]+)", text) and dtype.kind in "iu":
        number = int(text, 0)
        bits = dtype.itemsize * 8
        if not -(2 ** (bits - 1)) <= number < 2**bits:
            raise PtxError(f"{text} does not fit {bits} bits")
        return np.array([number % 2**bits], f"u{dtype.itemsize}").view(dtype)
    else:
        raise PtxError(f"{text} is neither a register, a variable nor a number of this type")
    if value.itemsize != dtype.itemsize:
        raise PtxError(f"{text} has another size than the instruction")
    return value.view(dtype)


def destination(kernel: Kernel, operand: Operand, type_name: str, *, wider: bool = False) -> Destination:
    if operand == "_":
        return lambda block, lanes, values: None
    if not isinstance(operand, str) or operand not in kernel.registers:
        raise PtxError(f"{operand} is not a register")
    dtype = DTYPES[type_name]
    bits = 1 if dtype.kind == "b" else dtype.itemsize * 8
    register_bits = kernel.registers[operand]
    if register_bits == bits:
        raw = dtype if bits == 1 else np.dtype(f"u{dtype.itemsize}")

        def write(block, lanes, values):
            if values.dtype.itemsize != raw.itemsize:
                raise AssertionError(f"{values.dtype} for {type_name}")
            block.write(operand, lanes, np.ascontiguousarray(values).view(raw))

        return write
    if not wider or register_bits < bits or bits == 1 or dtype.kind == "f":
        raise PtxError(f"{operand} has {register_bits} bits where {bits} are expected")
    stored = np.dtype(f"u{register_bits // 8}")
    # From a signed type numpy extends the sign, as PTX does.
    return lambda block, lanes, values: block.write(operand, lanes, values.astype(stored))


def address(kernel: Kernel, operand: Operand) -> Source:
    if not isinstance(operand, Address):
        raise PtxError(f"{operand} is not an address")
    base = source(kernel, operand.base, "u64")
    offset = np.uint64(operand.offset % 2**64)

    def run(block, lanes):
        addresses = base(block, lanes) + offset
        count = block.threads if isinstance(lanes, slice) else lanes.size
        return np.broadcast_to(addresses, count) if addresses.size != count else addresses

    return run


def vector(operand: Operand, count: str | None) -> tuple[str, ...]:
    """The names of a vector of `count`, or of the one value that is there without .vN."""
    if count is None and isinstance(operand, str):
        return (operand,)
    if count is None or not isinstance(operand, tuple) or len(operand) != int(count):
        raise PtxError(f"{operand} is not a vector of {count or 1}")
    return operand


def label(kernel: Kernel, operand: Operand) -> int:
    if operand not in kernel.labels:
        raise PtxError(f"no label {operand}")
    return kernel.labels[operand]
