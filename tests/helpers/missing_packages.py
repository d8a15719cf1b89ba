"""Python in a process in which some packages cannot be imported, as where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["CLI_EXTRA", "advice", "python_without"]

CLI_EXTRA = ("typer", "rich", "matplotlib")

_SITE = """
from importlib.machinery import PathFinder

find_installed = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {packages!r} else find_installed(name, path, target)

PathFinder.find_spec = find_spec
"""


def python_without(
    packages: Collection[str], args: Sequence[str | Path], cwd: Path, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with `args`; `path` is the folder to import from, PYTHONPATH if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_SITE.format(packages=set(packages)))
        imported = os.environ.get("PYTHONPATH") if path is None else str(path)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (folder, imported)))}
        return subprocess.run(
            [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
        )


def advice(package: str) -> str:
    """What is said where it is missing."""
    return (
        f'{package} is not installed. Install it with: pip install "statestream[cli]" '
        '(from a checkout: pip install ".[cli]")'
    )
