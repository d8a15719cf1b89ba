"""Ctrl-C waits for the end of a step, an export or a load."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["interrupts_held"]


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Within, SIGINT does not raise KeyboardInterrupt; afterwards it does, if it came. Yields what says whether it has.

    It could otherwise be raised between an update and the note that it was made, or while gradients are hidden: what
    no `except` can put right. Handlers other than Python's own are left alone, and only the main thread has any.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
