"""The whole demo: a run that never stops, a run that is saved and resumed, and how they compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from statestream.demo import checkpoint
from statestream.demo.checkpoint import Export
from statestream.demo.compare import Difference, Snapshot, differences, snapshot
from statestream.demo.data import Corpus
from statestream.demo.footprint import Footprint, footprint, footprint_of_adamw
from statestream.demo.settings import Settings
from statestream.demo.training import Training, World, deterministic

__all__ = ["Outcome", "Progress", "resume", "run", "two_runs"]

Progress = Callable[[str, float], None]
"""Called after every step: which part is running, and the loss before the step."""


@dataclass(frozen=True)
class Outcome:
    """What the demo found. Losses are those before each step, in nats a byte."""

    settings: Settings
    parameters: int
    uninterrupted: list[float]
    interrupted: list[float]
    ours: Footprint
    adamw: Footprint
    export: Export
    compared: int
    """Tensors and counters compared, each after loading and again at the end."""
    after_loading: list[Difference]
    at_the_end: list[Difference]

    @property
    def equal(self) -> bool:
        """Whether the resumed run is the other bit for bit."""
        return self.compared > 0 and not self.after_loading and not self.at_the_end


@dataclass(frozen=True)
class _Interrupted:
    losses: list[float]
    ours: Footprint
    adamw: Footprint
    export: Export
    saved: Snapshot
    loaded: Snapshot
    end: Snapshot


def run(settings: Settings, progress: Progress) -> Outcome:
    """Trains 2 x `settings.steps` steps in all; writes a checkpoint below `settings.out` and removes it.

    Raises OSError where the checkpoint cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=settings.out) as folder:
        return two_runs(settings, progress, Path(folder))


def two_runs(settings: Settings, progress: Progress, folder: Path, world: World | None = None) -> Outcome:
    """Both runs, on this rank of `world` where there is one; the checkpoint goes to `folder`, and stays there."""
    corpus = Corpus()
    with deterministic(settings.device):
        straight = Training(settings, corpus, settings.seed, world)
        losses = straight.run(0, settings.steps, lambda loss: progress("never interrupted", loss))
        expected = snapshot(straight)
        parameters = sum(param.numel() for param in straight.model.parameters())
        del straight
        other = _run_interrupted(settings, corpus, progress, folder, world)
    return Outcome(
        settings=settings,
        parameters=parameters,
        uninterrupted=losses,
        interrupted=other.losses,
        ours=other.ours,
        adamw=other.adamw,
        export=other.export,
        compared=sum(len(tensors) for tensors in expected.values()),
        after_loading=differences(other.saved, other.loaded),
        at_the_end=differences(expected, other.end),
    )


def resume(
    settings: Settings, corpus: Corpus, progress: Progress, folder: Path, world: World | None
) -> tuple[Snapshot, Snapshot, list[float]]:
    """Loads the checkpoint in `folder` and trains on: what was loaded, what came of it, and the losses."""
    # Other initial weights, so that nothing can be right that was not loaded.
    resumed = Training(settings, corpus, settings.seed + 1, world)
    checkpoint.load(resumed, folder, settings.control)
    loaded = snapshot(resumed)
    losses = resumed.run(settings.half, settings.steps, lambda loss: progress("after the load", loss))
    return loaded, snapshot(resumed), losses


def _run_interrupted(
    settings: Settings, corpus: Corpus, progress: Progress, folder: Path, world: World | None
) -> _Interrupted:
    first = Training(settings, corpus, settings.seed, world)
    losses = first.run(0, settings.half, lambda loss: progress("before the export", loss))
    saved = snapshot(first)
    ours, adamw = footprint(first), footprint_of_adamw(first)
    export, exported = checkpoint.measured_export(first)
    checkpoint.save(first, exported, folder, settings.control)
    del first, exported
    if world is not None:
        dist.barrier()  # a planted fault is in the file before anyone reads it
    loaded, end, more = resume(settings, corpus, progress, folder, world)
    return _Interrupted(losses + more, ours, adamw, export, saved, loaded, end)
