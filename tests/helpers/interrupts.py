"""Ctrl-C at one chosen line of the package's Python, so that every moment of a call can be tried in turn."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import statestream

__all__ = ["interrupted_at", "moments_of", "sigint_raises"]

PACKAGE = str(Path(statestream.__file__).parent)


@contextmanager
def sigint_raises() -> Iterator[None]:
    """SIGINT as an interactive process has it: one that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


Line = tuple[str, int]


def _traced(call: Callable[[], Any], at_line: Callable[[Line], None]) -> None:
    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, *_: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # or finalizers of what others left run here, at any moment; an interrupt in one is lost
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def moments_of(call: Callable[[], Any]) -> list[int]:
    """Calls, and numbers the lines of the package that this thread runs, from 0; returned is when each line ran first,
    and when it ran last."""
    first: dict[Line, int] = {}
    last: dict[Line, int] = {}
    number = 0

    def note(line: Line) -> None:
        nonlocal number
        first.setdefault(line, number)
        last[line] = number
        number += 1

    _traced(call, note)
    return sorted({*first.values(), *last.values()})


def interrupted_at(number: int, call: Callable[[], Any]) -> bool:
    """Calls, with SIGINT before the line of that number. Whether KeyboardInterrupt came out."""
    left = number

    def count(_: Line) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            signal.raise_signal(signal.SIGINT)

    try:
        _traced(call, count)
    except KeyboardInterrupt:
        return True
    return False
