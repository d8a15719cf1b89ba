"""When each chunk of an offloaded step was loaded, updated and stored, by events of the device itself.

    with Timeline(optimizer) as timeline:
        optimizer.step()
    timeline.save_png("step.png")

The recorder stands between the pipeline and the device and hands everything on; nothing is recorded outside of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statestream.extras import cli_extra

if TYPE_CHECKING:
    from statestream.offload.optimizer import CPUOffloadOptimizer

__all__ = ["Span", "Timeline"]

LOAD, UPDATE, STORE = "load", "update", "store"
DOWN, UP = "gradients down", "weights up"
"""Of the host's own share of a step, whose chunks are numbered by themselves."""


@dataclass(frozen=True)
class Span:
    """Seconds since the recording began. `nbytes` are those that were copied; 0 of an update."""

    what: str
    chunk: int
    begin: float
    end: float
    nbytes: int


class Timeline:
    """Records the steps of a CPUOffloadOptimizer that are made inside its context; `spans` is there afterwards.

    On a GPU the times are those of CUDA events on the streams, on the CPU those of a clock, where nothing
    overlaps. Recording costs two events a copy and a launch. Leaving the context waits for the last store.
    """

    def __init__(self, optimizer: CPUOffloadOptimizer):
        strategy = getattr(optimizer, "strategy", None)
        if strategy is None:
            raise TypeError(f"a timeline is of a CPUOffloadOptimizer, not of {type(optimizer).__name__}")
        self._strategy = weakref.ref(strategy)  # the times may be kept longer than the optimizer
        self.spans: list[Span] = []

    def __enter__(self) -> Timeline:
        strategy = self._strategy()
        if strategy is None:
            raise RuntimeError("the optimizer of this timeline is gone; make one of an optimizer that is there")
        if isinstance(strategy.device, _Recorder):
            raise RuntimeError("this optimizer's steps are being recorded already")
        self._recorder = strategy.device = _Recorder(strategy.device)
        return self

    def __exit__(self, *_: object) -> None:
        strategy, recorder = self._strategy(), self._recorder
        del self._recorder
        if strategy is not None:
            if strategy.device is recorder:  # unless the model has moved to another
                strategy.device = recorder.device
            strategy.wait()
        self.spans = recorder.spans()

    def save_png(self, path: str | Path) -> None:
        """Draws a row each for loads, updates and stores. ValueError where no step was streamed, OSError where `path`
        cannot be written, ImportError where matplotlib is not installed."""
        if not self.spans:
            raise ValueError("no streamed step was recorded: step the optimizer inside the timeline's context")
        _draw(self.spans, Path(path))


# ---- the recorder ----


@dataclass
class _Work:
    begin: Any
    end: Any
    nbytes: int = 0


@dataclass(frozen=True)
class _Clock:
    """A device's clock, for the recorder's names of its queues."""

    device: Any
    queues: dict[str, str]

    def mark(self, queue: str) -> Any:
        return self.device.clock.mark(getattr(self.device, self.queues[queue]))

    def seconds(self, begin: Any, end: Any) -> float:
        return self.device.clock.seconds(begin, end)


class _Recorder:
    """A device seam (device/queues.py) that hands all on to another, and marks when each queue's work began and ended.

    A chunk's loads are followed by an event on the load queue, and so on (pipeline.py): counting those numbers the
    chunks. The compute queue has one event before the first chunk.
    """

    compute, load, store, down, up = UPDATE, LOAD, STORE, DOWN, UP

    def __init__(self, device: Any):
        self.device = device
        self._events = {LOAD: 0, UPDATE: -1, STORE: 0, DOWN: 0, UP: 0}
        self._queues = {LOAD: "load", UPDATE: "compute", STORE: "store", DOWN: "down", UP: "up"}
        self._work: dict[tuple[str, int], _Work] = {}
        self._began = device.clock.mark(device.compute)

    @property
    def clock(self) -> _Clock:
        return _Clock(self.device, self._queues)

    @property
    def unrecorded(self) -> Any:
        return self.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def record(self, queue: str) -> Any:
        event = self.device.record(self._real(queue))
        self._events[queue] += 1
        return event

    def wait(self, queue: str, event: Any) -> None:
        self.device.wait(self._real(queue), event)

    def copy(self, queue: str, to: Any, to_offset: int, source: Any, offset: int, nbytes: int) -> None:
        with self._marked(queue, nbytes):
            self.device.copy(self._real(queue), to, to_offset, source, offset, nbytes)

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with self._marked(UPDATE):
            self.device.launch(function, *args, **kwargs)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with self._marked(UPDATE), self.device.computing():
            yield

    def _real(self, queue: str) -> Any:
        return getattr(self.device, self._queues[queue])

    @contextlib.contextmanager
    def _marked(self, queue: str, nbytes: int = 0) -> Iterator[None]:
        begin = self.clock.mark(queue)
        yield
        end = self.clock.mark(queue)
        work = self._work.setdefault((queue, max(self._events[queue], 0)), _Work(begin, end))
        work.end = end
        work.nbytes += nbytes

    def spans(self) -> list[Span]:
        since = self.clock.seconds
        return [
            Span(what, chunk, since(self._began, work.begin), since(self._began, work.end), work.nbytes)
            for (what, chunk), work in self._work.items()
        ]


# ---- the picture: a row for each kind of work, a bar for each chunk ----

_ROWS = {UP: UP, DOWN: DOWN, STORE: "stores", UPDATE: "updates", LOAD: "loads"}
"""From below, those that there are, and their names."""
_SHADES = {
    LOAD: ("#2f6fab", "#7fb2dd"),
    UPDATE: ("#e08e45", "#f2c293"),
    STORE: ("#15803d", "#7cc49a"),
    DOWN: ("#7a3e9d", "#b892cf"),
    UP: ("#8a6d1d", "#cdb66f"),
}
_NUMBERED = 40
"""Chunks up to which bars have their numbers."""


def _draw(spans: Sequence[Span], path: Path) -> None:
    """Neighbouring chunks differ in shade; the title has the bytes and the time of the whole."""
    with cli_extra():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    first = min(span.begin for span in spans)
    seconds = max(span.end for span in spans) - first
    unit, scale = ("ms", 1e3) if seconds < 1 else ("s", 1.0)
    chunks = len({span.chunk for span in spans if span.what in (LOAD, UPDATE, STORE)})
    rows = [row for row in _ROWS if any(span.what == row for span in spans)]
    figure = Figure(figsize=(10, len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for span in spans:
        row, begin = rows.index(span.what), (span.begin - first) * scale
        width = (span.end - span.begin) * scale
        shade = _SHADES[span.what][span.chunk % 2]
        axes.barh(row, width, left=begin, height=0.7, color=shade, edgecolor=shade, linewidth=0.8)  # short ones show
        if chunks <= _NUMBERED and width > 0.012 * seconds * scale:
            axes.text(begin + width / 2, row, str(span.chunk), ha="center", va="center", fontsize="x-small")
    axes.set_yticks(range(len(rows)), [_ROWS[row] for row in rows])
    axes.set_xlabel(unit)
    moved = sum(span.nbytes for span in spans if span.what == LOAD)
    axes.set_title(f"{moved / 1e6:.1f} MB of state through {chunks} chunks in {seconds * scale:.3g} {unit}")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
