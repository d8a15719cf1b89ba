"""Runs `statestream` in this process, as the console script would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from statestream.cli import main

__all__ = ["Ran", "command"]


@dataclass
class Ran:
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """Runs `statestream` with the given arguments."""

    def run(*args: str | Path) -> Ran:
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(stopped.value.code, captured.out, captured.err)

    return run
