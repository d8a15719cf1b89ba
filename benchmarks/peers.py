"""Other people's optimizers, where they are installed and take the work."""

from __future__ import annotations

import importlib
from collections.abc import Callable

__all__ = ["imported", "tried"]


def imported(module: str, name: str) -> type | None:
    """A class of a package that may be missing, or broken on this machine."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # a peer's import compiles, opens libraries, asks for devices: it may fail in any way
        return None


def tried(make: Callable[[], Callable[[], object] | None]) -> tuple[Callable[[], object] | None, str]:
    """A peer's step after it ran once, or the first line of why it does not run; neither where it has no such mode."""
    try:
        run = make()
        if run is not None:
            run()
        return run, ""
    except Exception as error:  # whatever a peer says, the others are still measured
        return None, (str(error) or type(error).__name__).splitlines()[0]
