"""Edits of sources. C++ text is seen as tokens, so that an edit finds its place whatever the formatting; Python text is
taken as it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Edit", "EditError", "Token", "tokens"]

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<directive>(?<![^\n])[ ]*\#(?:[^\n\\]|\\.|\\\n)*)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>0[xX][0-9a-fA-F]+[uUlL]*|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[uUlLfF]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<operator><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|::|.)""",
    re.S | re.X,
)


class EditError(Exception):
    """An edit does not apply to the sources as they are now."""


@dataclass(frozen=True)
class Token:
    text: str
    kind: str
    start: int
    end: int


def tokens(text: str) -> list[Token]:
    """Tokens without comments and white space; a preprocessor directive is one token."""
    return [
        Token(m[0].strip(), m.lastgroup, m.start(), m.end()) for m in _TOKEN.finditer(text) if m.lastgroup != "skip"
    ]


@dataclass(frozen=True)
class Edit:
    """Replaces the one place where `old` stands in a file by `new`: in C++ token by token."""

    path: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """The text with the edit made; EditError unless `old` is there exactly once."""
        if self.path.endswith(".py"):
            self._check_one(text.count(self.old))
            return text.replace(self.old, self.new)
        wanted = [t.text for t in tokens(self.old)]
        there = tokens(text)
        words = [t.text for t in there]
        found = [k for k in range(len(words) - len(wanted) + 1) if words[k : k + len(wanted)] == wanted]
        self._check_one(len(found))
        first, last = there[found[0]], there[found[0] + len(wanted) - 1]
        return text[: first.start] + self.new + text[last.end :]

    def _check_one(self, places: int) -> None:
        if places != 1:
            raise EditError(f"{self.path} has {places} places, not one, that read: {self.old}")

    def apply(self, root: Path) -> None:
        path = root / self.path
        path.write_text(self.applied(path.read_text()))
