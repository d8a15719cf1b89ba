"""What `pip install statestream` leaves out: typer, rich and matplotlib, for the commands and for pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["cli_extra"]

_BROUGHT = ("typer", "rich", "matplotlib")
"""By `statestream[cli]` (pyproject.toml)."""


@contextmanager
def cli_extra() -> Iterator[None]:
    """ImportError that says what to install, where an import inside it finds no typer, rich or matplotlib."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _BROUGHT:
            raise
        raise ImportError(
            f'{package} is not installed. Install it with: pip install "statestream[cli]" '
            '(from a checkout: pip install ".[cli]")'
        ) from error
