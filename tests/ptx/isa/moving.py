"""Moves, selection, loads and stores."""

from __future__ import annotations

import numpy as np

from ..operands import DTYPES, address, destination, source, vector
from ..parse import PtxError
from .opcodes import Code, Step, elementwise, opcode


@opcode(r"mov\.(?P<type>[usb](?:16|32|64)|f32|f64|pred)")
def _mov(code: Code, type: str) -> Step:
    code.expect(2)
    if isinstance(code.operands[1], tuple):
        return _pack(code, type)
    if isinstance(code.operands[0], tuple):
        return _unpack(code, type)
    to, read = code.destination(0, type), code.source(1, type)

    def run(block, lanes):
        to(block, lanes, read(block, lanes))

    return run


def _part_type(code: Code, type_name: str, names: tuple[str, ...]) -> str:
    if type_name[0] != "b" or len(names) not in (2, 4):
        raise PtxError("only mov.b packs and unpacks, two or four parts")
    return f"b{int(type_name[1:]) // len(names)}"


def _pack(code: Code, type_name: str) -> Step:
    part = _part_type(code, type_name, code.operands[1])
    to = code.destination(0, type_name)
    parts = [source(code.kernel, name, part) for name in code.operands[1]]
    whole, bits = DTYPES[type_name], DTYPES[part].itemsize * 8

    def run(block, lanes):
        value = np.zeros(1, whole)
        for k, read in enumerate(parts):
            value = value | (read(block, lanes).astype(whole) << whole.type(bits * k))
        to(block, lanes, value)

    return run


def _unpack(code: Code, type_name: str) -> Step:
    part = _part_type(code, type_name, code.operands[0])
    parts = [destination(code.kernel, name, part) for name in code.operands[0]]
    read = code.source(1, type_name)
    whole, dtype = DTYPES[type_name], DTYPES[part]

    def run(block, lanes):
        value = read(block, lanes)
        for k, to in enumerate(parts):
            to(block, lanes, (value >> whole.type(dtype.itemsize * 8 * k)).astype(dtype))

    return run


@opcode(r"selp\.(?P<type>[usb](?:16|32|64)|f32|f64)")
def _selp(code: Code, type: str) -> Step:
    code.expect(4)
    to, when = code.destination(0, type), code.source(3, "pred")
    a, b = code.source(1, type), code.source(2, type)

    def run(block, lanes):
        to(block, lanes, np.where(when(block, lanes), a(block, lanes), b(block, lanes)))

    return run


_LOAD_CACHE = r"(?:\.(?:ca|cg|cs|lu))?"
_STORE_CACHE = r"(?:\.(?:wb|cg|cs|wt))?"
_EVICTION = r"(?:\.L1::(?:evict_normal|evict_unchanged|evict_first|evict_last|no_allocate))?"
_PREFETCH = r"(?:\.L2::(?:64B|128B|256B))?"
_ELEMENT = r"(?P<type>[usb](?:8|16|32|64)|f32|f64)"


@opcode(
    rf"ld(?:\.(?P<space>global|shared|param))?{_LOAD_CACHE}(?P<nc>\.nc)?{_EVICTION}{_PREFETCH}"
    rf"(?:\.v(?P<count>[24]))?\.{_ELEMENT}"
)
def _ld(code: Code, space: str | None, nc: str | None, count: str | None, type: str) -> Step:
    code.expect(2)
    if nc and space != "global":
        raise PtxError("the read-only path is of global memory")
    parts = [destination(code.kernel, name, type, wider=True) for name in vector(code.operands[0], count)]
    where = address(code.kernel, code.operands[1])
    dtype = DTYPES[type]
    width = dtype.itemsize * len(parts)

    def run(block, lanes):
        memory, addresses = _in_space(block, space, where(block, lanes))
        values = memory.load(addresses, width, block.access(lanes, bool(nc)))
        values = np.ascontiguousarray(values).view(dtype)
        for k, to in enumerate(parts):
            to(block, lanes, values[:, k])

    return run


@opcode(rf"st(?:\.(?P<space>global|shared))?{_STORE_CACHE}(?:\.v(?P<count>[24]))?\.{_ELEMENT}")
def _st(code: Code, space: str | None, count: str | None, type: str) -> Step:
    code.expect(2)
    parts = [source(code.kernel, name, type, wider=True) for name in vector(code.operands[1], count)]
    where = address(code.kernel, code.operands[0])
    dtype = DTYPES[type]

    def run(block, lanes):
        memory, addresses = _in_space(block, space, where(block, lanes))
        values = np.empty((addresses.size, len(parts)), dtype)
        for k, read in enumerate(parts):
            values[:, k] = read(block, lanes)
        memory.store(addresses, values.view(np.uint8), block.access(lanes))

    return run


_WINDOWS = {"param": 1 << 61, "shared": 1 << 60, "global": 0}
"""What turns an address of a space into a generic one: no other address reaches so high."""


def _in_space(block, space: str | None, addresses: np.ndarray):
    if space is not None:
        return block.spaces[space], addresses
    for name, window in _WINDOWS.items():
        inside = addresses >= np.uint64(window)
        if inside.all():
            return block.spaces[name], addresses - np.uint64(window)
        if inside.any():
            raise PtxError("one generic access of several spaces")
    raise AssertionError("every address is in the last window")


@opcode(r"cvta(?P<to>\.to)?\.(?P<space>global|shared|param)\.u64")
def _cvta(code: Code, to: str | None, space: str) -> Step:
    window = np.uint64(_WINDOWS[space])
    return elementwise(code, "u64", (lambda a: a - window) if to else (lambda a: a + window), 1)
