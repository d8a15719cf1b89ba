"""The command line: `statestream demo`.

Nothing heavy is imported before a command runs, so that --help and a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

__all__ = ["app", "main"]

FAILED = 1
"""Exit status of a command that ran and found that something is not as it should be."""
REFUSED = 2
"""Exit status of a command that could not do what it was asked."""
INTERRUPTED = 130

_UsageError = typer.BadParameter.__base__
"""click's UsageError; typer brings a copy of click in newer versions, and does not name it."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Adam whose state is small, whose checkpoint export is bounded, and whose step streams.",
)


class Refused(Exception):
    """Something the user can put right, in one line."""


@app.callback()
def _commands() -> None:
    # With a callback the name of a command stays part of the command line while there is only one.
    pass


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Steps of each of the two runs.")] = 150,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for loss.png and memory.png.")] = Path("demo"),
    moments: Annotated[str, typer.Option(help="How the moments are stored: bf16 or fp32.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of the initial weights and the batches.")] = 0,
    ranks: Annotated[int, typer.Option(help="Processes that shard the model by FSDP2: 1, 2, 4 or 8.")] = 1,
    plant: Annotated[Optional[str], typer.Option(hidden=True)] = None,  # noqa: UP045 - typer evaluates it
) -> int:
    """Train a small GPT on the source of Python's standard library, save it half way with
    torch.distributed.checkpoint, resume in a fresh optimizer, and compare with a run that never stopped.

    With --ranks it is resumed on as many ranks, and also on half as many, where the losses are compared.

    Exit status: 0 the runs are equal bit for bit (on other ranks close), 1 they are not, 2 it could not run.
    """
    # Read when torch is loaded: without it, a core that is busy elsewhere makes a step ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from statestream.demo.command import demo as run_demo
        from statestream.demo.settings import Settings
    except ImportError as error:
        raise Refused(str(error)) from error
    try:
        settings = Settings.checked(
            steps=steps, device=device, out=out, moments=moments, seed=seed, control=plant, ranks=ranks
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    try:
        return run_demo(settings)
    except OSError as error:
        raise Refused(str(error)) from error


def main(args: list[str] | None = None) -> None:
    """The console script. Exits: 0 well, 1 a command found a fault, 2 bad input, in one line on stderr."""
    try:
        status = app(args=args, prog_name="statestream", standalone_mode=False)
    except (Refused, _UsageError) as error:
        text = error.format_message() if isinstance(error, _UsageError) else str(error)
        if text:  # none where typer has printed the help instead
            print(f"statestream: {' '.join(text.split())}", file=sys.stderr)
        status = REFUSED
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:  # newer typer returns it, older raises
        print("statestream: interrupted", file=sys.stderr)
    sys.exit(status or 0)
