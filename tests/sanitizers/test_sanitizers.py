"""The sanitizers would notice: each has a mistake of its own kind that changes no result, planted in a build."""

from __future__ import annotations

import pytest

from tests.faults.judge import ROOT

from .runner import SANITIZERS, build, missing, reports, run

NOTICED = {"address": "heap-buffer-overflow", "undefined": "left shift of", "thread": "data race"}
TESTS = ["tests/native/test_native_threads.py", "-k", "two_threads_calling_at_once"]


@pytest.mark.parametrize("name", SANITIZERS)
def test_the_mistake_has_its_place_in_the_sources(name):
    fault = SANITIZERS[name].fault
    source = (ROOT / fault.path).read_text(encoding="utf-8")
    assert fault.applied(source) != source


@pytest.mark.long  # two minutes each
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SANITIZERS)
def test_control_a_planted_mistake_is_reported(name, tmp_path):
    if lacks := missing(name):
        pytest.skip(lacks)
    tree = tmp_path / "tree"
    build(name, tree, [SANITIZERS[name].fault])
    assert run(name, tree, TESTS) != 0
    assert any(NOTICED[name] in path.read_text() and "adam.cpp" in path.read_text() for path in reports(tree))
