"""Muon streamed over gloo ranks. The claims are in claims.py."""

from __future__ import annotations

import pytest
from distributed.processes import run_claims

from .claims import CLAIMS, OTHERS, late_copies
from .mixed import MIXED

ALL = {**CLAIMS, 2: CLAIMS[2] | MIXED}

pytestmark = pytest.mark.timeout(600)  # the first test waits for all


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[int, str], str]:
    folder = tmp_path_factory.mktemp("muon")
    return {
        (ranks, name): problem
        for ranks, claims in ALL.items()
        for name, problem in run_claims(ranks, claims, folder).items()
    }


@pytest.mark.parametrize(("ranks", "claim"), [(ranks, claim) for ranks, claims in ALL.items() for claim in claims])
def test_ranks_find_that(found, ranks, claim):
    assert not found[ranks, claim]


@pytest.mark.long
@pytest.mark.parametrize("ranks", OTHERS)
def test_ranks_find_this_too(ranks, tmp_path):
    problems = run_claims(ranks, OTHERS[ranks], tmp_path)
    assert not any(problems.values()), problems


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_whose_copies_are_late_in_different_ways_agree(ranks, tmp_path):
    problems = run_claims(ranks, late_copies(range(100)), tmp_path, seconds=3600)
    assert not any(problems.values()), problems
