"""Comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..operands import destination
from ..parse import PtxError
from .opcodes import Code, Step, opcode

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, type_name: str) -> Callable:
    if type_name[0] == "f":
        if name in ("num", "nan"):
            return lambda a, b: (np.isnan(a) | np.isnan(b)) ^ (name == "num")
        # An unordered comparison (equ, neu, ...) holds where either side is NaN, an ordered one never.
        unordered = len(name) == 3
        compare = _COMPARE[name[:2]]
        return lambda a, b: np.where(np.isnan(a) | np.isnan(b), unordered, compare(a, b))
    known = ("eq", "ne") if type_name[0] == "b" else _COMPARE
    if name in _UNSIGNED_NAMES and type_name[0] == "u":
        name = _UNSIGNED_NAMES[name]
    if name not in known:
        raise PtxError(f"{name} does not compare {type_name}")
    return _COMPARE[name]


@opcode(
    r"setp\.(?P<name>(?:eq|ne|lt|le|gt|ge)u?|lo|ls|hi|hs|num|nan)(?:\.(?P<join>and|or|xor))?"
    r"\.(?P<type>[usb](?:16|32|64)|f32|f64)"
)
def _setp(code: Code, name: str, join: str | None, type: str) -> Step:
    code.expect(4 if join else 3)
    compare = _comparison(name, type)
    a, b = code.source(1, type), code.source(2, type)
    with_predicate = code.source(3, "pred") if join else None
    results = [destination(code.kernel, part, "pred") for part in str(code.operands[0]).split("|")]

    def run(block, lanes):
        holds = compare(a(block, lanes), b(block, lanes))
        values = [holds, ~holds]
        if with_predicate:
            other = with_predicate(block, lanes)
            values = [_COMBINE[join](value, other) for value in values]
        for to, value in zip(results, values, strict=False):
            to(block, lanes, value)

    return run
