"""Muon streamed over gloo ranks: the plain optimizer's bits, checkpoints in the middle, ranks that disagree."""

from __future__ import annotations

import pytest

from .cases import CASES
from .ranks import CHECKPOINTED, run_ranks

FOUR = pytest.param(4, marks=pytest.mark.long)
WORLDS = [1, 2, FOUR]


@pytest.fixture(scope="module")
def results():
    """Number of ranks -> what each rank found; one start for each number."""
    done = {}

    def of(world):
        if world not in done:
            done[world] = run_ranks(world, "all")
        return done[world]

    return of


@pytest.mark.parametrize("world", WORLDS)
def test_bits_are_those_of_the_optimizer_on_every_rank(world, results):
    for rank, result in enumerate(results(world)):
        for name in CASES:
            found = result["bits"][name]
            assert found["differences"] == [], f"{name}, rank {rank} of {world}"
            assert found["chunks"][0] > 1
    if world == 4:
        assert any(r["bits"]["megabatched, odd rows"]["empty"] for r in results(world)), "no shard was empty"


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_cuts_at_the_same_batches(world, results):
    for name in CASES:
        counts = [result["bits"][name]["chunks"] for result in results(world)]
        assert all(count == counts[0] for count in counts), name


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("world", WORLDS)
def test_a_run_saved_and_resumed_in_the_middle_is_the_uninterrupted_one(world, name, flat, results):
    for result in results(world):
        assert result["checkpoint"][f"{name}, flat={flat}, fault=None"] == []
    faults = ["momentum"] if name == "torch" else ["momentum", "step"]
    for fault in faults:
        found = [result["checkpoint"][f"{name}, flat={flat}, fault={fault}"] for result in results(world)]
        assert any(found), f"a resumed {fault} that is wrong makes no difference"


@pytest.mark.parametrize("world", [2, FOUR])
def test_ranks_that_cut_differently_are_refused_with_both_plans(world, results):
    for result in results(world):
        assert result["disagreement"]
        for name, message in result["disagreement"].items():
            assert "cut their Muon parameters at different places" in message, name
            first, second = message.split("plan of rank 0 of the group:\n")[1].split("\nplan of rank ")
            assert first.startswith("chunk 0: ") and second.split("\n", 1)[1].startswith("chunk 0: ")
            assert first != second.split("\n", 1)[1], name


@pytest.mark.parametrize("world", [2, FOUR])
def test_agreement_costs_one_gather_at_construction_and_none_in_a_step(world, results):
    for result in results(world):
        assert result["gathers"] == {"construction": 1, "steps": 0}


@pytest.mark.long
@pytest.mark.parametrize("world", [2, FOUR])
def test_ranks_whose_copies_are_late_in_different_ways_agree(world):
    for result in run_ranks(world, "simulated"):
        assert result and all(found == [] for found in result.values()), result
