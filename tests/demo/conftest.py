from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.command_line import command
from statestream.demo.checkpoint import Export
from statestream.demo.footprint import Footprint
from statestream.demo.run import Outcome
from statestream.demo.settings import Settings

__all__ = ["command"]


@pytest.fixture(autouse=True)
def one_thread():
    """Small models gain little from more, and where cores are busy the threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def outcome():
    settings = Settings(steps=4, device=torch.device("cuda"), out=Path("out"), moments=torch.bfloat16, seed=0)
    return Outcome(
        settings=settings,
        parameters=1000,
        uninterrupted=[5.5, 4.5, 3.5, 2.5],
        interrupted=[5.5, 4.5, 3.5, 2.5],
        ours=Footprint(weights=2000, gradients=2000, moments=4000, masters=4000),
        adamw=Footprint(weights=2000, gradients=2000, moments=8000, masters=4000),
        export=Export(exported=12_000_000, peak_extra=1_050_000, usual_peak_extra=8_000_000),
        compared=6,
        after_loading=[],
        at_the_end=[],
    )
