"""loss.png and memory.png."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from statestream.demo.ranks import RanksOutcome
from statestream.demo.run import Outcome

__all__ = ["draw_loss", "draw_memory"]

_STACK = (("weights", "#9aa5b1"), ("gradients", "#cbd2d9"), ("moments", "#2f6fab"), ("masters", "#e08e45"))
_LABELS = {"masters": "FP32 weights"}


def draw_loss(outcome: Outcome, path: Path, on_ranks: RanksOutcome | None = None) -> None:
    """Both runs' losses over the steps, and where the one was exported and resumed; and the losses of the run that was
    resumed on another number of ranks."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(outcome.uninterrupted) + 1)
    axes.plot(steps, outcome.uninterrupted, color="#2f6fab", linewidth=4, alpha=0.4, label="never interrupted")
    axes.plot(steps, outcome.interrupted, color="#c2410c", linewidth=1, label="saved, loaded, resumed")
    if on_ranks is not None:
        label = f"resumed on {on_ranks.others} of {outcome.settings.ranks} ranks"
        axes.plot(steps[outcome.settings.half :], on_ranks.elsewhere, color="#15803d", linestyle="--", label=label)
    axes.axvline(outcome.settings.half + 0.5, color="#616e7c", linestyle=":", label="export and load")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=f"Resumed run: {_verdict(outcome)}")
    axes.legend()
    _write(figure, path)


def draw_memory(outcome: Outcome, path: Path) -> None:
    """Bytes a parameter while training, and bytes of the export."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_training(left, outcome)
    _draw_export(right, outcome)
    _write(figure, path)


def _draw_training(axes: Axes, outcome: Outcome) -> None:
    ways = {"statestream": outcome.ours, "torch.optim.AdamW": outcome.adamw}
    bottoms = [0.0] * len(ways)
    for part, color in _STACK:
        heights = [getattr(kept, part) / outcome.parameters for kept in ways.values()]
        axes.bar(list(ways), heights, bottom=bottoms, color=color, label=_LABELS.get(part, part), width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for x, total in enumerate(bottoms):
        axes.annotate(f"{total:.2f}", (x, total), ha="center", va="bottom")
    axes.set(ylabel="bytes a parameter", title="While training", ylim=(0, max(bottoms) * 1.45))
    axes.legend(ncols=2, fontsize="small", loc="upper center")


def _draw_export(axes: Axes, outcome: Outcome) -> None:
    export = outcome.export
    where = outcome.settings.device.type
    bars = {"exported,\nFP32 in host memory": export.exported}
    if export.usual_peak_extra is None:
        bars["peak extra\nhost memory"] = export.peak_extra
        bars["of it beyond the\nexported copies"] = export.peak_extra - export.exported
    else:
        bars[f"peak extra {where} memory\nof the usual export"] = export.usual_peak_extra
        bars[f"peak extra {where} memory"] = export.peak_extra
    values = [n / 1e6 for n in bars.values()]
    axes.bar(list(bars), values, color=["#9aa5b1", "#e08e45", "#2f6fab"], width=0.6)
    for x, value in enumerate(values):
        axes.annotate(f"{value:.2f}", (x, value), ha="center", va="bottom")
    axes.set(ylabel="MB", title="One export of the optimizer's state", ylim=(0, max(values) * 1.15))
    axes.tick_params(axis="x", labelsize="small")


def _verdict(outcome: Outcome) -> str:
    return "equal bit for bit" if outcome.equal else "DIFFERENT"


def _write(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
