"""Random small changes of Python code: conditions, calls and waits left out, arguments, defaults, numbers.

mutmut and cosmic-ray do not serve: neither is told which test file to ask first of a source, and both would have the
whole suite run for each change, or once in a process that then forks with torch's threads in it.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from .mutate import Mutation

__all__ = ["python_mutations"]

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}
_OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Mod: ("%", "//")}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}

Site = tuple[str, int, int, str]
"""Kind of change, where it begins and ends, and what stands there then."""


def python_mutations(root: Path, seed: int, sources: Sequence[str]) -> Iterator[Mutation]:
    """Every change of these files in a random order that depends on the seed and the files alone. Each file is as
    likely as any other, and so in it is each kind of change."""
    rng = random.Random(seed)
    waiting: dict[str, dict[str, list[Mutation]]] = {}
    for path in sources:
        text = (root / path).read_text()
        kinds: dict[str, list[Mutation]] = {}
        for kind, start, end, new in _Sites(text).found:
            line = text[text.rfind("\n", 0, start) + 1 : text.find("\n", start)].strip()
            kinds.setdefault(kind, []).append(Mutation(path, start, end, new, text[start:end], line))
        for kind in sorted(kinds):
            rng.shuffle(kinds[kind])
        if kinds:
            waiting[path] = kinds
    while waiting:
        path = rng.choice(sorted(waiting))
        kind = rng.choice(sorted(waiting[path]))
        yield waiting[path][kind].pop()
        if not waiting[path][kind]:
            del waiting[path][kind]
        if not waiting[path]:
            del waiting[path]


class _Sites(ast.NodeVisitor):
    """Errors' words, annotations and what a module exports are left as they are: no test has to notice those."""

    def __init__(self, text: str):
        self.text = text
        self._lines = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
        self.found: list[Site] = []
        self.visit(ast.parse(text))

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        self.found.append((kind, start, end, new))

    def _start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Columns are counted in bytes."""
        begin = self._lines[line - 1]
        text = self.text[begin : self._lines[line]]
        return begin + len(text.encode()[:column].decode())

    def _said(self, node: ast.AST) -> str:
        return self.text[self._start(node) : self._end(node)]

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negated(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negated(test)
        self.generic_visit(node)

    def _negated(self, test: ast.expr) -> None:
        self._add("condition", self._start(test), self._end(test), f"(not ({self._said(test)}))")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """One of the conditions that are joined, or what stands in for a false value, is left out."""
        for left_out in node.values:
            rest = [value for value in node.values if value is not left_out]
            new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            self._add("joined", self._start(node), self._end(node), f"({ast.unparse(new)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._between("comparison", left, right, _COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATORS:
            self._between("operator", node.left, node.right, _OPERATORS[type(node.op)])
        self.generic_visit(node)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, swap: tuple[str, str]) -> None:
        begin, end = self._end(left), self._start(right)
        at = self.text.find(swap[0], begin, end)
        if at >= 0:
            self._add(kind, at, at + len(swap[0]), swap[1])

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, ast.Call):
            self._add("call", self._start(node), self._end(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for one, other in pairwise(node.args):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                between = self.text[self._end(one) : self._start(other)]
                swapped = f"{self._said(other)}{between}{self._said(one)}"
                if self._said(one) != self._said(other):
                    self._add("argument", self._start(one), self._end(other), swapped)
        parts = [*node.args, *node.keywords]
        for before, keyword in pairwise(parts):
            if isinstance(keyword, ast.keyword) and keyword.arg not in (None, "strict"):
                self._add("default", self._end(before), self._end(keyword), "")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add("number", self._start(node), self._end(node), f"{node.value + 1}")
            if node.value > 0:
                self._add("number", self._start(node), self._end(node), f"{node.value - 1}")
        elif type(node.value) is bool:
            self._add("name", self._start(node), self._end(node), _NAMES[str(node.value)])

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _NAMES:
            self._add("name", self._start(node), self._end(node), _NAMES[node.id])
