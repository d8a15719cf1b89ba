"""Claims that take several processes: one spawn checks many, and each is a test of its own.

A claim is a function of a folder, run by every rank at once; it fails where any rank raises.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["Claim", "run_claims"]

Claim = Callable[[Path], None]

_PRELOADED = [
    "torch._dynamo",  # a second of processor time in every rank, at its first DTensor
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "statestream.adam.fused_adam",
]
_COLLECTIVE = timedelta(seconds=60)
"""How long one rank waits for the others; longer is a hang."""


def run_claims(ranks: int, claims: Mapping[str, Claim], folder: Path, seconds: float = 240) -> dict[str, str]:
    """What went wrong with each claim on the first rank that noticed; empty strings where nothing did.

    Claims are run in order, by `ranks` processes over gloo, which share `folder`. Once one has failed the ranks may
    be out of step, so that those after it are not run.
    """
    run = folder / f"run{time.monotonic_ns()}"
    run.mkdir()
    # A server that has loaded torch once and forks: a process that loads it by itself takes seconds of processor time.
    get_context("forkserver").set_forkserver_preload(_PRELOADED)
    context = mp.start_processes(
        _rank, (ranks, list(claims.items()), folder, run), nprocs=ranks, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    try:
        # gloo aborts where collectives do not match; the reports say how far each rank came.
        with contextlib.suppress(mp.ProcessExitedException):
            while not context.join(timeout=1) and time.monotonic() <= deadline:
                continue
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    reports = [_report(run / f"rank{rank}.json") for rank in range(ranks)]
    return {name: _first_problem(name, reports, claims) for name in claims}


def _rank(rank: int, ranks: int, claims: list[tuple[str, Claim]], folder: Path, run: Path) -> None:
    gc.freeze()  # what the server has loaded: collections would look through it, and copy each page that they share
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=rank, world_size=ranks, timeout=_COLLECTIVE)
    found: dict[str, str] = {}
    for name, claim in claims:
        begin = time.monotonic()
        try:
            claim(folder)
            dist.barrier()
            found[name] = ""
        except Exception:
            found[name] = f"rank {rank} of {ranks}:\n{traceback.format_exc()}"
        found[f"seconds of {name}"] = f"{time.monotonic() - begin:.1f}"
        (run / f"rank{rank}.json").write_text(json.dumps(found))
        if found[name]:
            os._exit(0)  # not through a group that others may be waiting in
    dist.destroy_process_group()


def _report(path: Path) -> dict[str, str]:
    return json.loads(path.read_text()) if path.exists() else {}


def _first_problem(name: str, reports: list[dict[str, str]], claims: Iterable[str]) -> str:
    if all(report.get(name) == "" for report in reports):
        return ""
    # A rank that waits for one that has failed says so too: its message is the least telling.
    problems = sorted((r[name] for r in reports if r.get(name)), key=lambda text: "gloo" in text.lower())
    if problems:
        return problems[0]
    failed = [claim for claim in claims if any(report.get(claim) for report in reports)]
    return f"not run to its end on every rank; failed before: {failed or 'nothing (hang or crash)'}"
