from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from statestream.cli import main


@dataclass
class Ran:
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def one_thread():
    """Small models gain little from more, and where cores are busy the threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys):
    """Runs `statestream` in this process with the given arguments."""

    def run(*args: str | Path) -> Ran:
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(stopped.value.code, captured.out, captured.err)

    return run
