"""The native modules called by someone who means harm: an exception of Python's each time, and nothing touched."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_calls.py")
MODULES = ("_cpu", "_cuda")


def refused(module: str, *arguments: object) -> int:
    if importlib.util.find_spec(f"statestream.{module}") is None:
        pytest.skip("built for the CPU alone")
    command = [sys.executable, str(SCRIPT), module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        environment = {**os.environ, "STATESTREAM_HOSTILE_VERBOSE": "1"}
        again = subprocess.run(command, capture_output=True, text=True, env=environment)
        pytest.fail(f"ended with {done.returncode}: {done.stderr[-2000:]}\nlast calls: {again.stderr[-2000:]}")
    return int(done.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_spoilt_arguments_are_an_exception(module):
    assert refused(module, 1, 2_000) > 2_500


@pytest.mark.long  # a minute in all
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("seed", range(10))
def test_many_spoilt_arguments_are_an_exception(module, seed):
    assert refused(module, 100 + seed, 100_000) > 100_000
