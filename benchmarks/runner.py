"""Runs contestants interleaved and reports medians, ratios and the machine.

Times on a shared machine drift, so contestants take turns within one run and are compared as ratios of
medians; a single contestant's milliseconds mean little by themselves.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

__all__ = ["Report", "Timing", "interleaved", "machine_line", "results_folder"]


def results_folder() -> Path:
    named = os.environ.get("STATESTREAM_RESULTS")
    return Path(named) if named else Path(__file__).parent / "results"


@dataclass
class Timing:
    """Milliseconds of one contestant, one for each round."""

    name: str
    samples_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


def interleaved(
    contestants: dict[str, Callable[[], object]], rounds: int = 15, warm_up: int = 2, turn_ms: float = 0.0
) -> dict[str, Timing]:
    """Times every contestant once a round, in turn, after `warm_up` rounds that do not count.

    A contestant's attribute `prepare`, where it has one, is called before it and not timed. A turn is one call, or as
    many as fill `turn_ms`, and then its time is the median of their second half: what the one before has left in the
    caches, and its threads, which under OpenMP go on spinning for milliseconds, are no part of it.
    """
    timings = {name: Timing(name) for name in contestants}
    for round_number in range(warm_up + rounds):
        for name, run in contestants.items():
            turn = _turn(run, turn_ms)
            if round_number >= warm_up:
                timings[name].samples_ms.append(statistics.median(turn[len(turn) // 2 :]))
    return timings


def _turn(run: Callable[[], object], turn_ms: float) -> list[float]:
    """Milliseconds of each call, as many as fill `turn_ms`, and at least one."""
    times, left = [], turn_ms
    while not times or left > 0:
        times.append(_milliseconds(run))
        left -= times[-1]
    return times


def _milliseconds(run: Callable[[], object]) -> float:
    getattr(run, "prepare", lambda: None)()
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def machine_line() -> str:
    """Processor, cores, torch, date and commit, as every figure must carry them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return (
        f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}, commit {commit or 'unknown'}"
    )


@dataclass
class Report:
    """A table of one claim, written as JSON, Markdown and, where `plot` draws one, PNG."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Points of curves, where there are some."""
    machine: str = field(default_factory=machine_line)

    def add(self, *row: object) -> None:
        self.rows.append(list(row))
        print("  " + "  ".join(_cell(c) for c in row), flush=True)

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", self.machine, ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|" + " --- |" * len(self.columns))
        lines += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in self.rows]
        lines += ["", *self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, plot: Callable[..., None] | None = None, panels: int = 1) -> Path:
        """Writes <name>.json, .md and, with `plot(axes, ...)` of as many panels, .png; returns the Markdown's path.

        Into results/ beside this file, or into the folder that STATESTREAM_RESULTS names.
        """
        folder = results_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.md"
        path.write_text(self.markdown())
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        if plot is not None:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot

            figure, axes = pyplot.subplots(1, panels, figsize=(3 + 4 * panels, 4), layout="constrained", squeeze=False)
            plot(*axes[0])
            figure.suptitle(self.title, fontsize=10)
            figure.savefig(path.with_suffix(".png"), dpi=120)
            pyplot.close(figure)
        return path


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
