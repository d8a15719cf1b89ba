"""The picture of a recorded step: a row for each kind of work, a bar for each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from statestream.offload.timeline import DOWN, LOAD, STORE, UP, UPDATE, Span

__all__ = ["draw"]

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


def draw(spans: Sequence[Span], path: Path) -> None:
    """Neighbouring chunks differ in shade; the title has the bytes and the time of the whole."""
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
