"""The mistakes planted in Python code still apply to it, and the tests notice them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from .judge import ROOT
from .python_judge import python_sources
from .python_mutate import python_mutations
from .python_planted import PYTHON_PLANTED, faults_of
from .source import EditError

SAMPLE = "runs of uneven shards are rounded down"

by_hand = pytest.mark.parametrize("fault", PYTHON_PLANTED, ids=lambda f: f.name)


@by_hand
def test_a_mistake_has_its_place_and_the_changed_file_compiles(fault):
    for edit in fault.edits:
        before = (ROOT / edit.path).read_text()
        assert ast.dump(ast.parse(edit.applied(before))) != ast.dump(ast.parse(before))


def test_no_two_mistakes_have_one_name():
    assert len({fault.name for fault in PYTHON_PLANTED}) == len(PYTHON_PLANTED) >= 60


def test_a_mistake_is_noticed():
    command = (sys.executable, "-m", "tests.faults", "python", SAMPLE, "--until", "first")
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(rf"{SAMPLE} \| tests/distributed/test_sharding\.py::\w+.* \| first \|", ran.stdout)
    assert "1 of 1 caught" in ran.stdout


@pytest.mark.parametrize("old", ["x = 3", "x = 1"])
def test_a_mistake_whose_place_is_gone_or_not_the_only_one_is_an_error_that_names_it(old):
    ((edit,),) = [fault.edits for fault in faults_of(f"== file.py: name\n-{old}\n+x = 2\n")]
    with pytest.raises(EditError, match=rf"file\.py has [02] places, not one, that read: {old}"):
        edit.applied("x = 1\nx = 1\n")


def test_random_mistakes_are_many_and_the_same_for_a_seed_and_change_what_runs():
    sources = python_sources()
    first = list(python_mutations(ROOT, 0, sources))
    assert first == list(python_mutations(ROOT, 0, sources))
    assert first[:100] != list(python_mutations(ROOT, 1, sources))[:100]
    assert len(set(first)) > 3000
    assert {mutation.path for mutation in first} == set(sources)
    for mutation in first[::20]:
        text = (ROOT / mutation.path).read_text()
        assert text[mutation.start : mutation.end] == mutation.old
        changed = text[: mutation.start] + mutation.new + text[mutation.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), mutation
