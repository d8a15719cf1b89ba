"""The table of opcodes and what its entries are made with.

An opcode is looked up with every one of its modifiers: what no pattern spells out is a PtxError. So
approximate, flushing and contractible forms (add.f32 without .rn may be fused by the assembler) are
refused rather than guessed.

A step takes the block and the lanes that stand at the instruction. It returns None to go on, or where
the lanes go: {"next" | "return" | "barrier" | index of an instruction: lanes}.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..operands import Destination, Source, destination, source
from ..parse import Instruction, Kernel, PtxError

__all__ = ["PATTERNS", "Code", "Step", "convert", "elementwise", "need_target", "opcode"]

Step = Callable[..., "dict | None"]


@dataclass(frozen=True)
class Code:
    """One instruction of one kernel, about to become a step."""

    kernel: Kernel
    instruction: Instruction

    @property
    def operands(self):
        return self.instruction.operands

    def expect(self, count: int) -> None:
        if len(self.operands) != count:
            raise PtxError(f"{count} operands expected")

    def source(self, k: int, type_name: str, *, wider: bool = False) -> Source:
        return source(self.kernel, self.operands[k], type_name, wider=wider)

    def destination(self, k: int, type_name: str, *, wider: bool = False) -> Destination:
        return destination(self.kernel, self.operands[k], type_name, wider=wider)


PATTERNS: list[tuple[re.Pattern, Callable]] = []


def opcode(pattern: str):
    """Adds the builder of a step; the pattern's named groups are its keywords."""

    def register(build: Callable) -> Callable:
        PATTERNS.append((re.compile(pattern), build))
        return build

    return register


def elementwise(code: Code, type_name: str, function: Callable, inputs: int, result: str | None = None) -> Step:
    """d = function(a, b, ...), all of one type but the result."""
    code.expect(inputs + 1)
    to = code.destination(0, result or type_name)
    sources = [code.source(k + 1, type_name) for k in range(inputs)]

    def run(block, lanes):
        to(block, lanes, function(*(read(block, lanes) for read in sources)))

    return run


def convert(code: Code, to: str, of: str, function: Callable) -> Step:
    """d = function(a) between types; either register may be wider than its type."""
    code.expect(2)
    write, read = code.destination(0, to, wider=True), code.source(1, of, wider=True)

    def run(block, lanes):
        write(block, lanes, function(read(block, lanes)))

    return run


def need_target(code: Code, number: int) -> None:
    if code.kernel.target < number:
        raise PtxError(f"needs compute_{number}")
