"""Processes that are killed, or run out of disk, while they save: the checkpoint before is whole, and the optimizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def trials(folder: Path, seed: int, kills: int) -> list[dict]:
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fault_points.saving", str(folder), str(seed), str(kills)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict], kills: int) -> None:
    killed = [trial for trial in found if "begun" in trial]
    full = [trial for trial in found if "error" in trial]
    assert len(killed) == 2 * kills and len(full) == 4
    for trial in killed:
        # A folder is a checkpoint once it has its metadata, and from then on all of it is there.
        assert len(trial["complete"]) >= 2 and set(trial["complete"]) <= set(trial["with_metadata"]), trial
        assert trial["right"] == trial["with_metadata"], trial
    for trial in full:
        assert (trial["error"] and "File too large" in trial["error"]) or "unexpected pos" in trial["error"], trial
        assert trial["unchanged"] and trial["again"] and not trial["looks_complete"], trial


def test_the_checkpoint_before_a_kill_loads_and_a_full_disk_is_an_error(tmp_path):
    check(trials(tmp_path, seed=0, kills=1), 1)


@pytest.mark.long  # half a minute
@pytest.mark.timeout(0)
def test_forty_kills(tmp_path):
    found = trials(tmp_path, seed=1, kills=20)
    check(found, 20)
    cut_short = [trial for trial in found if "begun" in trial and trial["begun"] > len(trial["complete"])]
    assert len(cut_short) >= 20, "most kills come in the middle of a save"
