"""What each PTX instruction does (PTX ISA 9.0, "Instructions")."""

from __future__ import annotations

from ..memory import Fault
from ..operands import Source, source
from ..parse import Instruction, Kernel, PtxError
from . import comparison, floats, integers, moving, threads  # noqa: F401 - they fill the table
from .opcodes import PATTERNS, Code, Step

__all__ = ["compile_instruction"]


def compile_instruction(kernel: Kernel, instruction: Instruction) -> Step:
    """PtxError names the instruction where it is not known or its operands do not fit it."""
    matches = [(m, build) for pattern, build in PATTERNS if (m := pattern.fullmatch(instruction.opcode))]
    if len(matches) != 1:
        raise PtxError(f"unknown instruction: {instruction.text}")
    match, build = matches[0]
    try:
        step = build(Code(kernel, instruction), **match.groupdict())
    except PtxError as error:
        raise PtxError(f"{error}: {instruction.text}") from None
    if instruction.guard is None:
        return step
    return _guarded(source(kernel, instruction.guard, "pred"), instruction.guard_negated, step)


def _guarded(guard: Source, negated: bool, step: Step) -> Step:
    def run(block, lanes):
        chosen = guard(block, lanes) ^ negated
        inside = block.choose(lanes, chosen)
        moved = step(block, inside) if isinstance(inside, slice) or inside.size else None
        if moved is None:
            return None
        if "barrier" in moved:
            raise Fault("a barrier under a predicate")
        return {**moved, "next": block.choose(lanes, ~chosen)}

    return run
