"""Checkpoints written on 4, 2 and 1 ranks and read on others, by real processes with real FSDP2 over gloo.

Every resumed run has the bits of one that never stopped and was never sharded. Four spawns take all the time: in each
of them many checkpoints are written and read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .processes import run_claims
from .resharding import CHECKPOINTS, FEW, SOME, Checkpoint, loads, name_of, saves

ROUTES = [(4, 1), (4, 4), (2, 4), (1, 4)]

pytestmark = pytest.mark.timeout(900)  # the first test waits for all


def run(folder: Path, checkpoints: list[Checkpoint], everywhere: list[Checkpoint]) -> dict[str, str]:
    """What went wrong: all `checkpoints` from four ranks to two, and those of `everywhere` on every other route."""
    to_four = (loads(ranks, 4, everywhere) for ranks in (4, 2, 1))
    problems = run_claims(4, saves(4, dict.fromkeys([*checkpoints, *everywhere])), folder)
    problems |= run_claims(2, loads(4, 2, checkpoints) | saves(2, everywhere), folder)
    problems |= run_claims(1, loads(4, 1, everywhere) | saves(1, everywhere), folder)
    return problems | run_claims(4, {name: claim for claims in to_four for name, claim in claims.items()}, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("checkpoints"), SOME, FEW)


@pytest.fixture(scope="module")
def found_for_the_rest(tmp_path_factory) -> dict[str, str]:
    rest = [[each for each in CHECKPOINTS if each not in known] for known in (SOME, FEW)]
    return run(tmp_path_factory.mktemp("checkpoints"), *rest)


def every(checkpoints: list[Checkpoint]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("checkpoint", checkpoints, ids=lambda checkpoint: name_of(*checkpoint))


@every(SOME)
def test_a_save_leaves_the_run_as_it_was(found, checkpoint):
    assert not found[f"{name_of(*checkpoint)}, saved on 4"]


@every(SOME)
def test_a_run_saved_on_four_ranks_and_resumed_on_two_has_the_bits_of_the_uninterrupted_one(found, checkpoint):
    assert not found[f"{name_of(*checkpoint)}, saved on 4, loaded on 2"]


@pytest.mark.parametrize(("saved_on", "loaded_on"), ROUTES)
@every(FEW)
def test_a_run_resumed_on_any_other_number_has_the_bits_of_the_uninterrupted_one(
    found, checkpoint, saved_on, loaded_on
):
    assert not found[f"{name_of(*checkpoint)}, saved on {saved_on}, loaded on {loaded_on}"]


@pytest.mark.long
@pytest.mark.parametrize(("saved_on", "loaded_on"), ROUTES)
@every([each for each in CHECKPOINTS if each not in FEW])
def test_so_has_every_other_way_mode_and_layout(found_for_the_rest, checkpoint, saved_on, loaded_on):
    assert not found_for_the_rest[f"{name_of(*checkpoint)}, saved on {saved_on}, loaded on {loaded_on}"]


@pytest.mark.long
@every([each for each in CHECKPOINTS if each not in SOME])
def test_so_has_every_other_on_two(found_for_the_rest, checkpoint):
    assert not found_for_the_rest[f"{name_of(*checkpoint)}, saved on 4, loaded on 2"]


@pytest.mark.long
def test_a_checkpoint_written_by_a_process_of_its_own_resumes_on_other_ranks(tmp_path):
    by_process = [("fsdp", "async process", "bf16 + masters"), ("tp_fsdp", "async process", "bf16 + masters")]
    problems = run_claims(2, saves(2, by_process), tmp_path) | run_claims(1, loads(2, 1, by_process), tmp_path)
    assert not any(problems.values()), problems
