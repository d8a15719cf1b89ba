"""The demo on several ranks: FSDP2, saved, resumed on as many ranks and on half as many."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from statestream.demo.compare import Difference
from statestream.demo.data import Corpus
from statestream.demo.run import Outcome, Progress, resume, two_runs
from statestream.demo.settings import Settings
from statestream.demo.training import World, deterministic

__all__ = ["CLOSE", "RanksOutcome", "run_on_ranks"]

CLOSE = 0.02
"""Nats a byte: how far losses on another number of ranks may be from the others. Gradients are summed there in another
order, in BF16, so that they are close and not equal."""


@dataclass(frozen=True)
class RanksOutcome:
    """What the demo found on several ranks."""

    same: Outcome
    """Of the runs on one number of ranks; differences of all ranks, sizes of rank 0."""
    others: int
    """The other number of ranks."""
    elsewhere: list[float]
    """Losses after the checkpoint, resumed on the other number of ranks."""

    @property
    def furthest(self) -> float:
        """The largest difference of a loss there from the one of the run that never stopped."""
        here = self.same.uninterrupted[self.same.settings.half :]
        return max(abs(a - b) for a, b in zip(here, self.elsewhere, strict=True))

    @property
    def right(self) -> bool:
        """Whether the run resumed on as many ranks is equal bit for bit, and that on others close."""
        return self.same.equal and self.furthest <= CLOSE


def run_on_ranks(settings: Settings, progress: Progress) -> RanksOutcome:
    """Trains on `settings.ranks` processes, then on half as many; needs a GPU for each rank, or none.

    Raises OSError where the checkpoint cannot be written.
    """
    others = settings.ranks // 2
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=settings.out) as folder:
        same = _spawn(settings, settings.ranks, _both_runs, Path(folder).resolve(), progress)
        elsewhere = _spawn(settings, others, _resume_elsewhere, Path(folder).resolve(), progress)
    return RanksOutcome(same, others, elsewhere)


def _both_runs(settings: Settings, progress: Progress, folder: Path, world: World) -> Outcome | None:
    outcome = two_runs(settings, progress, folder / "state", world)
    found: list[Any] | None = [None] * world.ranks if world.rank == 0 else None
    dist.gather_object((outcome.after_loading, outcome.at_the_end), found)
    if found is None:
        return None
    after_loading = [_of_rank(rank, each) for rank, (there, _) in enumerate(found) for each in there]
    at_the_end = [_of_rank(rank, each) for rank, (_, there) in enumerate(found) for each in there]
    return replace(outcome, after_loading=after_loading, at_the_end=at_the_end)


def _of_rank(rank: int, difference: Difference) -> Difference:
    return replace(difference, name=f"{difference.name} on rank {rank}")


def _resume_elsewhere(settings: Settings, progress: Progress, folder: Path, world: World) -> list[float] | None:
    def on_step(_: str, loss: float) -> None:
        progress(f"on {world.ranks} of {settings.ranks} ranks", loss)

    with deterministic(settings.device):
        _, _, losses = resume(settings, Corpus(), on_step, folder / "state", world)
    return losses if world.rank == 0 else None


# ---- processes ----


def _spawn(settings: Settings, ranks: int, part: Callable[..., Any], folder: Path, progress: Progress) -> Any:
    """Runs `part` on every rank; what it returns on rank 0."""
    messages = mp.get_context("spawn").Queue()
    context = mp.spawn(_rank, (ranks, settings, part, folder, messages), nprocs=ranks, join=False)
    results: dict[str, Any] = {}
    try:
        ended = False
        while not ended:
            ended = context.join(timeout=0.1)
            _drain(messages, progress, results)
    except ProcessException:
        _drain(messages, progress, results)
        if "refused" in results:
            raise OSError(results["refused"]) from None
        raise
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return results["result"]


def _drain(messages: Any, progress: Progress, results: dict[str, Any]) -> None:
    while True:
        try:
            kind, *what = messages.get(timeout=0.05)
        except queue.Empty:
            return
        if kind == "step":
            progress(*what)
        else:
            results[kind] = what[0]


def _rank(rank: int, ranks: int, settings: Settings, part: Callable[..., Any], folder: Path, messages: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    # For torch's own code on meshes and for NCCL, which read them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if settings.device.type == "cuda":
        settings = replace(settings, device=torch.device("cuda", rank))
        torch.cuda.set_device(rank)

    def progress(what: str, loss: float) -> None:
        if rank == 0:
            messages.put(("step", what, loss))

    store = f"file://{folder}/store-{part.__name__}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if settings.device.type == "cuda" else "gloo", store, rank=rank, world_size=ranks
    )
    try:
        result = part(settings, progress, folder, World(rank, ranks))
        if result is not None:
            messages.put(("result", result))
    except OSError as error:
        messages.put(("refused", str(error)))
        raise
    dist.destroy_process_group()
    # Nothing is left to be done, and at the interpreter's own end gloo's threads abort one process of some hundred.
    messages.close()
    messages.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
