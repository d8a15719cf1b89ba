"""Whether native code lets other Python threads go on."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

from statestream import kernels

__all__ = ["ticks_in_calls"]


@contextlib.contextmanager
def ticks_in_calls(name: str) -> Iterator[list[int]]:
    """How often another thread got the GIL during each call of this native function.

    No thread has to give the GIL away here, so that a call that keeps it counts none, however long it takes. One that
    frees it may count none as well, where the machine has no processor for the other thread: look at several calls.
    """
    native, counts, ticks, over = getattr(kernels._cpu, name), [], 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1
            time.sleep(0)  # gives the GIL away

    def counted(*args: object, **kwargs: object) -> None:
        before = ticks
        native(*args, **kwargs)
        counts.append(ticks - before)

    other, interval = threading.Thread(target=tick), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    other.start()
    try:
        with mock.patch.object(kernels._cpu, name, counted):
            yield counts
    finally:
        over.set()
        other.join()
        sys.setswitchinterval(interval)
