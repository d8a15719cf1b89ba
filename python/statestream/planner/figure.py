"""A plan as stacked bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from statestream.planner.estimate import Estimate
from statestream.planner.table import LABELS

if TYPE_CHECKING:
    from statestream.planner.plans import Plan

__all__ = ["draw"]

_COLORS = {
    "weights": "#9aa5b1",
    "grads": "#cbd2d9",
    "transit": "#e4e7eb",
    "exp_avg": "#2f6fab",
    "exp_avg_sq": "#7fb2dd",
    "master_param": "#e08e45",
    "on top": "#c2410c",
}
_GIB = 1 << 30
_MIB = 1 << 20


def draw(plan: Plan, path: Path) -> None:
    """A bar each for training, step, export and load: of what was asked, and of the proposal where it is another."""
    shown = [("as asked", plan.estimate)]
    if plan.proposal is not None and plan.proposal.settings != plan.asked:
        shown.append((plan.proposal.changes, plan.proposal.estimate))
    figure = Figure(figsize=(2 + 4 * len(shown), 4.8), layout="constrained")
    highest = max(max(made.device_peak, made.host_peak) for _, made in shown)
    highest = max(highest, plan.gpu_memory or 0)
    unit, scale = ("GiB", _GIB) if highest >= _GIB else ("MiB", _MIB)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (title, made) in zip(panels, shown, strict=True):
        _draw_bars(axes, made, scale)
        axes.set_title(title, fontsize="medium")
        if plan.gpu_memory is not None:
            axes.axhline(plan.gpu_memory / scale, color="#15803d", linestyle="--", label="the GPU's memory")
        axes.set_ylim(0, highest / scale * 1.12)
    panels[0].set_ylabel(f"{unit} a rank")
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(f"{plan.elements:,} parameters on {plan.ranks} rank{'s' if plan.ranks > 1 else ''}")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def _draw_bars(axes: Axes, made: Estimate, scale: int) -> None:
    bars = {"step": ("device", made.step.device), "export": ("device", made.export.device)}
    bars["load"] = ("device", made.load.device)
    if made.host_peak:
        bars["host:\nexport"], bars["host:\nload"] = ("host", made.export.host), ("host", made.load.host)
    bottoms = [0.0] * len(bars)
    for kind in (*LABELS, "on top"):
        heights = [
            (extra if kind == "on top" else getattr(made, where).get(kind, 0)) / scale for where, extra in bars.values()
        ]
        axes.bar(list(bars), heights, bottom=bottoms, color=_COLORS[kind], label=LABELS.get(kind, kind), width=0.7)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for x, total in enumerate(bottoms):
        axes.annotate(f"{total:.3g}", (x, total), ha="center", va="bottom", fontsize="small")
