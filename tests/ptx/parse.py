"""PTX text to kernels: parameters, registers, shared variables and instructions, nothing executed.

Covers what nvcc writes for this project and refuses the rest (PTX ISA 9.0, "Directives"): a directive
that is not understood is a PtxError, so that nothing is left out of a run unseen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["TYPE_BITS", "Address", "Instruction", "Kernel", "PtxError", "Variable", "parse"]


class PtxError(Exception):
    """The text uses something that this interpreter does not know."""


TYPE_BITS = {f"{kind}{bits}": bits for kind in "usb" for bits in (8, 16, 32, 64)}
TYPE_BITS |= {"f32": 32, "f64": 64, "bf16": 16, "bf16x2": 32, "pred": 1}


@dataclass(frozen=True)
class Address:
    """[base+offset]; base is a register or the name of a variable."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]
"""A name or number, an address, or the names of a vector."""


@dataclass(frozen=True)
class Instruction:
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None = None
    guard_negated: bool = False


@dataclass(frozen=True)
class Variable:
    """A parameter or a shared variable, sizes in bytes."""

    offset: int
    """Where it lies among its like with nothing left between them but what alignment needs."""
    size: int
    address: int
    """Where it is in its space here: far from the others, so that running past one meets nothing."""


@dataclass(eq=False)
class Kernel:
    name: str
    target: int
    """The number of compute_NN that the text was made for."""
    params: dict[str, Variable] = field(default_factory=dict)
    param_bytes: int = 0
    shared: dict[str, Variable] = field(default_factory=dict)
    shared_bytes: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    """Bits of each register; 1 for a predicate."""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """The index of the instruction that follows each label."""
    max_threads: int | None = None


_GAP = 1 << 20
"""Between variables of a space; more than the largest and a multiple of every alignment."""

_NAME = r"[%$\w.]+"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_VERSION = re.compile(r"\.(version|address_size)\s+([\d.]+)\s")
_TARGET = re.compile(r"\.target\s+sm_(\d+)a?\s")
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([$\w]+)\s*\(([^)]*)\)\s*([^{]*)\{")
_PERFORMANCE = re.compile(r"\.(maxntid|reqntid|minnctapersm|maxnreg)\s+(\d+(?:\s*,\s*\d+)*)\s*")
_VARIABLE = re.compile(r"(?:\.align\s+(\d+)\s+)?\.([usbf]\d+)\s+(?:\.ptr\b[\s.\w]*\s)?([$\w]+)(?:\[(\d+)\])?")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)(%\w+)\s+")
_OPERAND = re.compile(rf"\s*(\{{[^}}]*\}}|\[[^\]]*\]|-?{_NAME}(?:\|{_NAME})?)\s*(,|$)")
_ADDRESS = re.compile(rf"\[\s*({_NAME})\s*(?:\+\s*(-?\d+))?\s*\]")


def parse(text: str) -> dict[str, Kernel]:
    """Every kernel (.entry) of a module by its mangled name."""
    text = _COMMENT.sub(" ", text)
    kernels: dict[str, Kernel] = {}
    target = 0
    at = 0
    while text[at:].strip():
        at = _skip_space(text, at)
        if match := _VERSION.match(text, at):
            at = match.end()
        elif match := _TARGET.match(text, at):
            target, at = int(match[1]), match.end()
        elif match := _ENTRY.match(text, at):
            kernel = Kernel(match[1], target)
            _parse_params(kernel, match[2])
            _parse_performance(kernel, match[3])
            at = _parse_body(kernel, text, match.end())
            kernels[kernel.name] = kernel
        else:
            raise PtxError(f"unknown at module level: {_line(text, at)}")
    return kernels


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _line(text: str, at: int) -> str:
    return text[at : at + 200].split("\n")[0].strip()


def _place(into: dict[str, Variable], used: int, declaration: str) -> int:
    """Adds one declared variable after `used` bytes; the bytes used then."""
    match = _VARIABLE.fullmatch(declaration.strip())
    if not match:
        raise PtxError(f"unknown declaration: {declaration.strip()}")
    element = TYPE_BITS[match[2]] // 8
    size = element * int(match[4] or 1)
    align = int(match[1] or element)
    offset = -(-used // align) * align
    if match[3] in into or size > _GAP:
        raise PtxError(f"declared twice, or too large: {declaration.strip()}")
    into[match[3]] = Variable(offset, size, offset + _GAP * len(into))
    return offset + size


def _parse_params(kernel: Kernel, text: str) -> None:
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        if not declaration.startswith(".param"):
            raise PtxError(f"unknown parameter: {declaration}")
        kernel.param_bytes = _place(kernel.params, kernel.param_bytes, declaration.removeprefix(".param"))


def _parse_performance(kernel: Kernel, text: str) -> None:
    if unknown := _PERFORMANCE.sub("", text).strip():
        raise PtxError(f"unknown directive of {kernel.name}: {unknown}")
    for name, numbers in _PERFORMANCE.findall(text):
        if name in ("maxntid", "reqntid"):
            sizes = [int(n) for n in numbers.split(",")]
            if any(n != 1 for n in sizes[1:]):
                raise PtxError(f"{kernel.name} is for blocks of more than one dimension")
            kernel.max_threads = sizes[0]


def _parse_body(kernel: Kernel, text: str, at: int) -> int:
    """Statements up to the brace that closes the body; where the text goes on."""
    depth = 1
    while depth:
        at = _skip_space(text, at)
        if at == len(text):
            raise PtxError(f"{kernel.name} is not closed")
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            at += 1
        elif match := _LABEL.match(text, at):
            if match[1] in kernel.labels:
                raise PtxError(f"label {match[1]} twice in {kernel.name}")
            kernel.labels[match[1]] = len(kernel.instructions)
            at = match.end()
        else:
            end = text.find(";", at)
            if end < 0:
                raise PtxError(f"no end of statement: {_line(text, at)}")
            _parse_statement(kernel, " ".join(text[at:end].split()))
            at = end + 1
    return at


def _parse_statement(kernel: Kernel, statement: str) -> None:
    if statement.startswith(".reg"):
        _declare_registers(kernel, statement.removeprefix(".reg").strip())
    elif statement.startswith(".shared"):
        kernel.shared_bytes = _place(kernel.shared, kernel.shared_bytes, statement.removeprefix(".shared"))
    elif statement.startswith(".pragma"):
        # Hints to the assembler: not to unroll, and which bytes of the next load are of use. It loads all of them.
        if not re.fullmatch(r'\.pragma "(nounroll|used_bytes_mask \d+)"', statement):
            raise PtxError(f"unknown pragma: {statement}")
    elif statement.startswith("."):
        raise PtxError(f"unknown directive: {statement}")
    elif statement:
        kernel.instructions.append(_parse_instruction(statement))


def _declare_registers(kernel: Kernel, declaration: str) -> None:
    kind, names = declaration.split(None, 1)
    bits = TYPE_BITS.get(kind.lstrip("."))
    if bits is None:
        raise PtxError(f"unknown register type: {declaration}")
    for name in (part.strip() for part in names.split(",")):
        if match := re.fullmatch(r"([%\w]+)<(\d+)>", name):
            declared = [f"{match[1]}{k}" for k in range(int(match[2]))]
        else:
            declared = [name]
        for register in declared:
            if kernel.registers.setdefault(register, bits) != bits:
                raise PtxError(f"register {register} of {kernel.name} has two sizes")


def _parse_instruction(statement: str) -> Instruction:
    guard = _GUARD.match(statement)
    opcode, _, rest = statement[guard.end() if guard else 0 :].partition(" ")
    operands: list[Operand] = []
    at = 0
    while rest[at:].strip():
        match = _OPERAND.match(rest, at)
        if not match or (match[2] == "," and not rest[match.end() :].strip()):
            raise PtxError(f"operands not understood: {statement}")
        operands.append(_operand(match[1], statement))
        at = match.end()
    return Instruction(
        statement,
        opcode,
        tuple(operands),
        guard[2] if guard else None,
        bool(guard and guard[1]),
    )


def _operand(text: str, statement: str) -> Operand:
    if text[0] == "{":
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text[0] == "[":
        match = _ADDRESS.fullmatch(text)
        if not match:
            raise PtxError(f"address not understood: {statement}")
        return Address(match[1], int(match[2] or 0))
    return text
