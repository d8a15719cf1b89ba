"""What `statestream demo` does once its options are parsed."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from statestream.demo.figures import draw_loss, draw_memory
from statestream.demo.ranks import RanksOutcome, run_on_ranks
from statestream.demo.report import print_report
from statestream.demo.run import Outcome, run
from statestream.demo.settings import Settings

__all__ = ["demo"]


def demo(settings: Settings) -> int:
    """Runs, draws and reports; the exit status: 0 where the resumed run equals the other, 1 where not (on another
    number of ranks: is close to it).

    The report goes to stdout, the progress bar to stderr. Raises OSError where a file cannot be written.
    """
    console = Console(highlight=False)
    if settings.remark:
        console.print(settings.remark, markup=False)
    began = time.perf_counter()
    outcome, on_ranks = _run_with_progress(settings)
    loss, memory = settings.out / "loss.png", settings.out / "memory.png"
    draw_loss(outcome, loss, on_ranks)
    draw_memory(outcome, memory)
    print_report(console, outcome, on_ranks)
    seconds = time.perf_counter() - began
    console.print(f"{loss} and {memory} written; {seconds:.0f} s in all", markup=False, soft_wrap=True)
    return 0 if (outcome.equal if on_ranks is None else on_ranks.right) else 1


def _run_with_progress(settings: Settings) -> tuple[Outcome, RanksOutcome | None]:
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    shown = ""
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        steps = 2 * settings.steps + (settings.steps - settings.half if settings.ranks > 1 else 0)
        task = bar.add_task("", total=steps, loss=float("nan"))

        def on_step(what: str, loss: float) -> None:
            nonlocal shown
            bar.update(task, description=what, advance=1, loss=loss)
            if what != shown and not console.is_terminal:
                print(f"training: {what}", file=sys.stderr, flush=True)
            shown = what

        if settings.ranks == 1:
            return run(settings, on_step), None
        on_ranks = run_on_ranks(settings, on_step)
        return on_ranks.same, on_ranks
