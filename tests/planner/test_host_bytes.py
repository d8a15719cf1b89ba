"""A plan's host bytes and bytes on disk, against resident bytes of a process and files that were written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident bytes are read as Linux has them"),
    pytest.mark.timeout(600),
]

TESTS = Path(__file__).resolve().parents[1]


WAYS = {"resident": (0, "bf16"), "offloaded": (16 << 20, "bf16"), "offloaded, FP8 moments": (16 << 20, "fp8")}
"""step_chunk_bytes and the moments."""


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def life(request, tmp_path_factory) -> dict[str, dict]:
    """What was measured, and the plan of the same model and optimizer."""
    worker = Path(__file__).with_name("host_worker.py")
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path_factory.mktemp("host")), *map(str, request.param)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_training_keeps(life):
    """On a CPU the device is the host too."""
    plan = life["plan"]
    kept = sum(plan["device"].values()) + sum(plan["host"].values())
    assert life["found"]["kept"] == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("path", ["export", "load"])
def test_what_saves_and_loads_take_on_top(life, path):
    assert life["found"][path] == pytest.approx(life["plan"][path]["host"], rel=0.05)


def test_the_checkpoint_on_disk(life):
    planned = life["plan"]["on_disk"]
    assert life["found"]["on disk"] == pytest.approx(planned["weights"] + planned["state"], rel=0.05)
