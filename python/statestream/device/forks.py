"""What a forked child must not free: pinned memory.

CUDA does not work in a child of the process that called it first, and pinned blocks are not there
(MADV_DONTFORK): where they were, the child may have mapped something else since. A finaliser that runs in a child, of
an object that was made before the fork, keeps that object for good instead.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["Origin"]

_forks = [0]
"""How often this process and those it was forked from were forked off."""


def _forked() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Origin:
    """The process that made an object; the object holds it."""

    def __init__(self) -> None:
        self._forks = _forks[0]

    # At the interpreter's end a module's names may be gone before its objects are: these are held.
    def is_elsewhere(self, now: list[int] = _forks) -> bool:
        """Whether this is another process, one that was forked off since."""
        return now[0] != self._forks

    def keep(self, thing: object, hold=ctypes.pythonapi.Py_IncRef, reference=ctypes.py_object) -> None:
        """Never frees `thing`, from within its finaliser too."""
        hold(reference(thing))
