"""What `statestream convert` does once its options are parsed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from statestream.convert.files import convert_file
from statestream.convert.folders import convert_checkpoint
from statestream.dcp_metadata import METADATA

__all__ = ["convert"]


def convert(here: Path, there: Path, to: str, /, **options: Any) -> None:
    """Converts a folder of torch.distributed.checkpoint or a file of torch.save, with a progress bar on stderr.

    Raises ValueError and OSError as convert_checkpoint and convert_file do.
    """
    if not here.exists():
        raise ValueError(f"{str(here)!r} does not exist")
    if here.is_dir():
        if there.is_file():
            raise ValueError(f"{str(there)!r} is a file; a folder's conversion needs a folder")
        if not (here / METADATA).exists():
            raise ValueError(f"{str(here)!r} holds no checkpoint: it has no {METADATA}")
    run = convert_checkpoint if here.is_dir() else convert_file
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        with warnings.catch_warnings(record=True) as said:
            run(here, there, to, progress=progress, **options)
    for warning in said:
        if warning.category is RuntimeWarning:
            console.print(f"warning: {warning.message}", soft_wrap=True)
    print(f"{there} written")
