"""Pages on tests name folders, files and tests that are there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from faults.python_judge import PACKAGE, asked_first

from .pages import ROOT, text_of

PAGE = "docs/testing.md"
PAGES = (PAGE, "tests/README.md", "tests/fuzz/README.md", "tests/fake_runtime/README.md")
ASKED_FIRST = "docs/contributing.md"
TESTS = ROOT / "tests"


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file below tests/, name) of each test that a table's row or a sentence names: names follow their file's, in
    backticks, "..." for what is left out. A file without names has one, empty."""
    found = []
    for line in text.splitlines():
        path = None
        for word in re.findall(r"`([^`]+)`", line):
            if re.fullmatch(r"[\w/]+\.py", word):
                path = word.removeprefix("tests/")
                found.append((path, ""))
            elif path and not word.startswith(("pytest", "python ")):
                found.append((path, word))
    return found


@cache
def functions(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def is_there(name: str, source: str) -> bool:
    """Whether a file has a test or a claim of that name, or for words with spaces a case that is called so."""
    if " " in name:
        return name in source
    pattern = re.escape(name).replace(re.escape("..."), ".*")
    return any(re.fullmatch(f"(test_)?{pattern}", function) for function in functions(source))


def missing(text: str) -> list[str]:
    wrong = []
    for path, name in named_tests(text):
        file = TESTS / path
        if not file.is_file():
            wrong += [] if name else [f"no file tests/{path}"]
        elif name and not is_there(name, file.read_text(encoding="utf-8")):
            wrong.append(f"no {name} in tests/{path}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert named_tests(text)
    assert missing(text) == []


@pytest.mark.parametrize(
    "line, found",
    [
        ("| x | `step/test_nothing.py`: `a` |", "no file tests/step/test_nothing.py"),
        ("| x | `step/test_copies.py`: `a_copy_goes_on_..._equal`, `gone` |", "no gone in tests/step/test_copies.py"),
        ("| x | `step/test_copies.py`: `a name with spaces` |", "no a name with spaces in tests/step/test_copies.py"),
    ],
)
def test_control_a_name_that_is_not_there_is_seen(line, found):
    assert missing(line) == [found]


def test_every_folder_of_tests_is_on_the_page():
    named = set(re.findall(r"^\| `tests/(\w+)` \|", text_of(PAGE), re.MULTILINE))
    assert named == {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}


def test_every_source_has_a_test_that_is_asked_first():
    rows = asked_first(text_of(ASKED_FIRST))
    sources = [path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py") if _has_code(path)]
    assert sorted(source for source, _ in rows) == sorted(sources)
    assert [test for _, test in rows if not (ROOT / test).is_file()] == []


def _has_code(path: Path) -> bool:
    return len(ast.parse(path.read_text()).body) > 1  # more than a docstring


def test_the_quick_rung_runs_in_several_processes():
    """It refuses processes that tests start, and not those that it is shared by."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "quick", "-n", "2", "-p", "no:cacheprovider"]
    tests = ["tests/streaming/test_share.py", "tests/streaming/test_balance.py"]
    ran = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and re.search(r"\d+ passed", ran.stdout), ran.stdout + ran.stderr
