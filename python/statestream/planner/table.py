"""A plan as text: tables of bytes, and what they leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statestream.planner.quantities import as_text, seconds_text
from statestream.text_table import text_table

if TYPE_CHECKING:
    from statestream.planner.plans import Plan

__all__ = ["LABELS", "text_of"]

LABELS = {
    "weights": "weights",
    "grads": "gradients",
    "transit": "gradients on their way",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "master_param": "masters",
}


def text_of(plan: Plan) -> str:
    parts = [_bytes(plan), _remarks(plan), [] if plan.gpu_memory is None else _proposals(plan), plan.remarks]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _bytes(plan: Plan) -> list[str]:
    made = plan.estimate
    one = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    title = f"{plan.source}: {plan.elements:,} parameters on {one}, {plan.local_elements:,} a rank"
    sides = (made.device, made.host)
    held = [
        (label, *(as_text(side[kind]) if kind in side else "" for side in sides))
        for kind, label in LABELS.items()
        if kind in made.device or kind in made.host
    ]
    on_top = [(name, getattr(made, name)) for name in ("step", "export", "load")]
    table = text_table(
        [("a rank", "device", "host")],
        held,
        [
            ("all the time", as_text(made.resident), as_text(sum(made.host.values()))),
            *((f"  {name}: on top", as_text(extra.device), as_text(extra.host)) for name, extra in on_top),
        ],
        [("at the highest", as_text(made.device_peak), as_text(made.host_peak))],
    )
    return [title, table]


def _remarks(plan: Plan) -> list[str]:
    made, seconds = plan.estimate, plan.times
    lines = [
        f"checkpoint on disk, all ranks: {as_text(made.on_disk)} "
        f"(weights {as_text(made.weights_on_disk)}, state {as_text(made.state_on_disk)})"
    ]
    took = [
        f"{what} {seconds_text(value)}"
        for what, value in (("step", seconds.step), ("export", seconds.export), ("save", seconds.save))
        if value is not None
    ]
    if took:
        lines.append(f"at the given bandwidths: {', '.join(took)}")
    lines.append("not counted: activations, gathered layers, the CUDA context, fragmentation")
    return lines


def _proposals(plan: Plan) -> list[str]:
    kept = f"{as_text(plan.reserve)} of it kept for activations and what else is not counted"
    title = f"what fits {as_text(plan.gpu_memory or 0)}, {kept}:"
    tried = [
        (p.changes, as_text(p.estimate.resident), as_text(p.estimate.device_peak), "yes" if p.fits else "no")
        for p in plan.proposals
    ]
    table = text_table([("changes", "all the time", "at the highest", "fits")], tried)
    if plan.proposal is not None:
        return [title, table, plan.proposal.settings.call()]
    least = as_text(plan.proposals[-1].estimate.resident)
    return [title, table, f"nothing fits: weights and gradients alone take {least}; spread them over more ranks"]
