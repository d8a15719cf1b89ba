"""What holds in a plain program holds, bit for bit, in every world that a user may have set up before."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bits import differences

from .claims import CLAIMS
from .worlds import WORLDS, in_world

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TESTS = Path(__file__).parents[1]


@cache
def plain(claim: str) -> dict[str, Any]:
    return CLAIMS[claim]()


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("world", WORLDS)
def test_claim_holds_in_world(world, claim):
    expected = plain(claim)
    assert differences(expected, in_world(world, CLAIMS[claim])) == []


OPTIMIZED = """
import runpy
from importlib.machinery import SourceFileLoader

get_code = SourceFileLoader.get_code

def without_asserts(self, name):
    if name.split(".")[0] != "statestream":
        return get_code(self, name)
    path = self.get_filename(name)
    return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=2)

SourceFileLoader.get_code = without_asserts
import statestream
if statestream.FusedAdam.__doc__ is not None:
    raise SystemExit("compiled as ever")
runpy.run_module("worlds.claims", run_name="__main__")
"""
"""As -OO does, but for this package alone: of torch there would be nothing compiled yet."""

SETTINGS = [
    pytest.param(["-bb", "-c", OPTIMIZED], id="-bb, optimized"),
    pytest.param(["-OO", "-m", "worlds.claims"], id="-OO", marks=pytest.mark.long),
    pytest.param(["-X", "dev", "-m", "worlds.claims"], id="-X dev", marks=pytest.mark.long),
]


@pytest.mark.parametrize("arguments", SETTINGS)
def test_claims_hold_in_a_python_of_other_settings(arguments, tmp_path):
    check_program(arguments, tmp_path)


def check_program(arguments: list[str], folder: Path) -> None:
    """Every claim, in a process of its own."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    command = [sys.executable, *arguments, str(folder / "found")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "found", weights_only=False)
    assert found.keys() == CLAIMS.keys()
    assert {claim: differences(plain(claim), found[claim]) for claim in CLAIMS} == {claim: [] for claim in CLAIMS}


def test_control_a_bit_that_a_world_changes_is_seen():
    def claim() -> dict[str, Any]:
        return {"counters": torch.zeros(3)}

    for world in ("default dtype bfloat16", "default dtype float64"):
        assert differences(claim(), in_world(world, claim)) == ["counters"]
    with pytest.raises(RuntimeError):
        in_world("default device that is not there", claim)
    assert in_world("default device meta", claim)["counters"].is_meta
    memory = in_world("deterministic, memory filled", lambda: {"memory": torch.empty(3)})["memory"]
    assert memory.isnan().all()
