"""Host memory of saves and loads is what docs/checkpoints.md says, by resident bytes of a process of its own."""

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

# Times the export's bytes, times the largest item's bytes: the formulas of docs/checkpoints.md.
FORMULAS = {"state_dict": (1, 0), "save": (1, 0), "async_save": (2, 0), "load": (1, 3)}


def measure(folder: Path, elements: int, params: int, saves: int) -> dict[str, int]:
    script = Path(__file__).with_name("host_memory.py")
    path = os.pathsep.join(filter(None, [str(script.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(elements), str(params), str(saves)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, int]:
    return measure(tmp_path_factory.mktemp("memory"), elements=2**18, params=20, saves=10)


@pytest.mark.parametrize("path", FORMULAS)
def test_the_extra_peak_is_the_formula_within_5_percent(measured, path):
    exports, items = FORMULAS[path]
    expected = exports * measured["export by formula"] + items * measured["largest item"]
    assert measured[path] == pytest.approx(expected, rel=0.05)


def test_many_saves_do_not_grow_the_process(measured):
    assert measured["grown"] < 0.05 * measured["export by formula"]


@pytest.mark.long
def test_fifty_saves_do_not_grow_the_process(tmp_path):
    found = measure(tmp_path, elements=2**17, params=16, saves=50)
    assert found["grown"] < 0.05 * found["export by formula"]
