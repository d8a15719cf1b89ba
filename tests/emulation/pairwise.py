"""Cases such that every value of every factor meets every value of every other factor at least once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations

__all__ = ["all_pairs"]

Case = dict[str, str]


def all_pairs(factors: Mapping[str, Sequence[str]], seed: int, tries: int = 30) -> list[Case]:
    """Greedily, as AETG does (Cohen et al. 1997): each case is the best of some random ones that are built
    around a pair still missing. The same for the same seed."""
    rng = random.Random(seed)
    missing = {frozenset([(a, x), (b, y)]) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while missing:
        pair = min(missing, key=sorted)
        best: Case = {}
        gain = -1
        for _ in range(tries):
            case = {name: rng.choice(values) for name, values in factors.items()} | dict(pair)
            covered = len(missing & _pairs_of(case))
            if covered > gain:
                best, gain = case, covered
        cases.append(best)
        missing -= _pairs_of(best)
    return cases


def _pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}
