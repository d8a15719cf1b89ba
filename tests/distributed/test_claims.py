"""FusedAdam on DTensors, checked by four real processes over gloo. The claims are in claims.py."""

from __future__ import annotations

import pytest

from .claims import CLAIMS, ON_TWO, OTHERS
from .processes import run_claims

pytestmark = pytest.mark.timeout(600)  # the first test waits for all


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("claims")
    return run_claims(4, CLAIMS, folder) | run_claims(2, ON_TWO, folder)


@pytest.mark.parametrize("claim", [*CLAIMS, *ON_TWO])
def test_four_ranks_find_that(found, claim):
    assert not found[claim]


@pytest.mark.long
def test_four_ranks_find_all_others(tmp_path):
    problems = run_claims(4, OTHERS, tmp_path, seconds=600)
    assert not any(problems.values()), problems
