"""A thread that drives a flow: the host's share of one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import torch

__all__ = ["Worker"]


class Worker:
    """Runs `flow` on a thread of its own, waiting with `synchronize(event)` for each event that it yields.

    The kernels release the GIL while they compute. The thread ends with the flow, with its first error, or when it is
    stopped: at the next yield. Whoever starts one calls `result` or `stop`, once.
    """

    def __init__(self, flow: Generator[Any, None, None], synchronize: Callable[[Any], None]):
        self._flow, self._synchronize = flow, synchronize
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()  # a thread starts without
        self._thread = threading.Thread(target=self._drive, name="statestream host share", daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Waits for the end; raises the flow's error."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, which would hold it

    def stop(self) -> None:
        """Ends it where it next yields, and waits for that. An error of its own is dropped: another came first."""
        self._stopped.set()
        self._thread.join()
        self._error = None  # its traceback holds this object

    def _drive(self) -> None:
        try:
            with torch.inference_mode(self._inference), torch.no_grad():
                for event in self._flow:
                    if event is not None and not self._stopped.is_set():
                        self._synchronize(event)
                    if self._stopped.is_set():
                        return
        except BaseException as error:
            self._error = error
        finally:
            self._flow.close()
