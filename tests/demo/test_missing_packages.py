"""Where typer, rich or matplotlib is missing: one line that says what to install, exit status 2, nothing begun."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.missing_packages import CLI_EXTRA, advice, python_without
from statestream import FusedAdam
from statestream.extras import cli_extra

SIZE = ("--params", "8e9", "--layers", "32")
COMMANDS = [
    (),
    ("--help",),
    ("demo",),
    ("demo", "--help"),
    ("plan", *SIZE),
    ("plan", *SIZE, "--json"),
    ("plan", "--help"),
    ("doctor",),
    ("doctor", "--json"),
    ("convert", "source", "target", "--to", "torch"),
    ("dmeo",),
]


@pytest.fixture
def statestream(tmp_path):
    """Runs `statestream` in a process of its own in tmp_path."""
    return lambda missing, *args: python_without(missing, ["-m", "statestream", *args], tmp_path)


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("missing", "named"),
    [(("typer",), "typer"), (("rich",), "rich"), (CLI_EXTRA, "rich")],
    ids=["typer", "rich", "all"],
)
def test_every_command_says_what_to_install_in_one_line(statestream, tmp_path, missing, named, args):
    ran = statestream(missing, *args)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"statestream: {advice(named)}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args", [("demo",), ("demo", "--ranks", "2"), ("plan", *SIZE, "--png", "plan.png")], ids=" ".join
)
def test_without_matplotlib_what_draws_says_what_to_install(statestream, tmp_path, args):
    ran = statestream(["matplotlib"], *args)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"statestream: {advice('matplotlib')}\n")
    assert list(tmp_path.iterdir()) == []


NOT_DRAWN = ("matplotlib", "numpy")
"""NumPy comes with matplotlib, and with nothing else that the commands need."""


@pytest.mark.parametrize("args", [("--help",), ("demo", "--help"), ("plan", *SIZE)], ids=" ".join)
def test_without_matplotlib_what_does_not_draw_runs(statestream, args):
    ran = statestream(NOT_DRAWN, *args)
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout


def test_without_matplotlib_a_checkpoint_is_converted(statestream, tmp_path):
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(8))])
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    ran = statestream(NOT_DRAWN, "convert", "ours.pt", "new.pt", "--to", "torch")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "new.pt").exists()


def test_without_matplotlib_doctor_tells_the_bits(statestream):
    ran = statestream(NOT_DRAWN, "doctor", "--json")
    verdicts = {finding["subject"]: finding["verdict"] for finding in json.loads(ran.stdout)["findings"]}
    assert verdicts["bits"] == "ok", ran.stdout


def test_control_a_package_is_missing_where_it_is_said_to_be(tmp_path):
    ran = python_without(["rich"], ["-c", "import matplotlib, typer\nimport rich.table"], tmp_path)
    assert ran.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'rich'"


@pytest.mark.parametrize("name", ["statestream.nowhere", "richer"])
def test_what_the_extra_does_not_bring_keeps_its_own_error(name):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"), cli_extra():
        __import__(name)
