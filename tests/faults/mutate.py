"""Random small changes of the kernels and launchers: operators, comparisons, constants, indices, statements."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .source import Token, tokens

__all__ = ["SOURCES", "Mutation", "mutations"]

SOURCES = (
    "csrc/cuda/adam_kernel.cuh",
    "csrc/cuda/vectors.cuh",
    "csrc/cuda/adam.cu",
    "csrc/cuda/convert.cu",
    "csrc/cuda/launch.h",
    "csrc/cuda/elements.cuh",
    "csrc/cuda/generic_kernel.cuh",
    "csrc/cuda/generic_convert.cuh",
    "csrc/cuda/generic.cu",
)

_SWAPS = {
    "<": ["<=", ">"],
    "<=": ["<", ">="],
    ">": [">=", "<"],
    ">=": [">", "<="],
    "==": ["!="],
    "!=": ["=="],
    "+": ["-"],
    "-": ["+"],
    "*": ["+", "/"],
    "/": ["*"],
    "%": ["/"],
    "<<": [">>"],
    ">>": ["<<"],
    "&": ["|"],
    "|": ["&"],
    "&&": ["||"],
    "||": ["&&"],
    "+=": ["-=", "="],
    "|=": ["&=", "="],
    "++": ["--"],
}
_NAMES = {
    "min": ["max"],
    "max": ["min"],
    "exp_avg": ["exp_avg_sq"],
    "exp_avg_sq": ["exp_avg"],
    "begin": ["end"],
    "end": ["begin"],
    "head": ["tail", "0"],
    "from": ["to"],
    "low": ["high"],
    "high": ["low"],
    "true": ["false"],
    "false": ["true"],
    "blockIdx": ["threadIdx"],
    "threadIdx": ["blockIdx"],
    "count": ["kVector"],
    "lane": ["0"],
    "stochastic": ["false"],
}

_NOT_DROPPED = re.compile(
    "return|const|constexpr|static_assert|using|struct|for|if|else|switch|case|default|auto|int|float|int64_t|"
    "uint32_t|bool|static|std|typename|void|extern"
)
"""What a statement begins with that cannot be left out, or declares something."""


@dataclass(frozen=True)
class Mutation:
    path: str
    start: int
    """Characters [start, end) of the file become `new`."""
    end: int
    new: str
    old: str
    line: str
    """The line as it was, for people."""

    def apply(self, root: Path) -> None:
        path = root / self.path
        text = path.read_text()
        path.write_text(text[: self.start] + self.new + text[self.end :])

    def __str__(self) -> str:
        return f"{Path(self.path).name}: `{self.line}`: `{self.old}` -> `{self.new.strip() or 'nothing'}`"


def mutations(root: Path, seed: int, sources: Sequence[str] = SOURCES) -> Iterator[Mutation]:
    """Every mutation of the sources in a random order that depends on the seed and these files alone.

    Some do not compile. Each kind of change (operator, constant, name, index, statement) is as likely
    as any other, however many places it has.
    """
    kinds: dict[str, list[Mutation]] = {}
    for path in sources:
        text = (root / path).read_text()
        for kind, start, end, new in _sites(text):
            line = text[text.rfind("\n", 0, start) + 1 : text.find("\n", start)].strip()
            kinds.setdefault(kind, []).append(Mutation(path, start, end, new, text[start:end], line))
    rng = random.Random(seed)
    for kind in sorted(kinds):
        rng.shuffle(kinds[kind])
    while kinds:
        kind = rng.choice(sorted(kinds))
        yield kinds[kind].pop()
        if not kinds[kind]:
            del kinds[kind]


def _sites(text: str) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, end, new) of every place and change."""
    words = [t for t in tokens(text) if t.kind != "directive"]
    for k, token in enumerate(words):
        if _is_not_code(words, k):
            continue
        # Binary operators have space on both sides here (clang-format); templates and pointers do not.
        binary = text[token.start - 1].isspace() and text[token.end].isspace()
        if token.kind == "operator" and token.text in _SWAPS and (binary or token.text == "++"):
            for new in _SWAPS[token.text]:
                yield "operator", token.start, token.end, new
        elif token.kind == "operator" and token.text == "!":
            yield "operator", token.start, token.end, ""
        elif token.kind == "number":
            for new in _other_numbers(token.text):
                yield "constant", token.start, token.end, new
        elif token.text in _NAMES and (words[k + 1].text != "(" or token.text in ("min", "max")):
            for new in _NAMES[token.text]:
                yield "name", token.start, token.end, new
        elif token.text == "]" and _is_index(words, k):
            yield "index", token.start, token.end, " + 1]"
            yield "index", token.start, token.end, " - 1]"
    yield from _statements(words)


def _is_not_code(words: list[Token], k: int) -> bool:
    """Within a static_assert, launch bounds or a template's parameters, which change no result."""
    back = [t.text for t in words[max(0, k - 14) : k]]
    for name in ("static_assert", "__launch_bounds__"):
        if name in back and ";" not in back[back.index(name) :] and "{" not in back[back.index(name) :]:
            return True
    return False


def _other_numbers(text: str) -> list[str]:
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)", text)
    if not match:
        return []
    value = int(match[1], 0)
    form = "0x{:x}{}" if match[1][:2] in ("0x", "0X") else "{}{}"
    return [form.format(v, match[2]) for v in (value + 1, value - 1) if v >= 0]


def _is_index(words: list[Token], k: int) -> bool:
    """Whether the bracket that closes at k holds an index and not the size of an array or a capture."""
    depth, j = 1, k - 1
    while depth and j > 0:
        depth += {"]": 1, "[": -1}.get(words[j].text, 0)
        j -= 1
    inside = words[j + 2 : k]
    before = words[j]
    size = len(inside) == 1 and re.match(r"k[A-Z]", inside[0].text)
    return bool(inside) and not size and (before.kind == "name" or before.text in ")]") and before.text != "return"


def _statements(words: list[Token]) -> Iterator[tuple[str, int, int, str]]:
    """Assignments and calls that may be left out."""
    begin = 0
    for k, token in enumerate(words):
        if token.text in "{}" or (token.text == ":" and words[k - 1].kind == "name"):
            begin = k + 1
        elif token.text == ";":
            statement = words[begin:k]
            depth = sum({"(": 1, ")": -1}.get(t.text, 0) for t in statement)
            assigns = any(t.text in ("=", "+=", "-=", "|=") for t in statement)
            starts = [t.text for t in statement[:2]]
            plain = len(statement) > 2 and statement[0].kind in ("name", "operator") and depth == 0
            keyword = starts[:1] and _NOT_DROPPED.fullmatch(starts[0])
            call = len(starts) == 2 and starts[1] in ("(", ".", "->", "::", "[")
            if plain and not keyword and (call or (assigns and len(starts) == 2 and starts[1] in ("=", "+=", "|="))):
                yield "statement", statement[0].start, token.end, ";"
            begin = k + 1
