"""A plan as tables for a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from statestream.planner.plans import Plan
from statestream.planner.quantities import as_text, seconds_text

__all__ = ["print_plan", "text_of"]

LABELS = {
    "weights": "weights",
    "grads": "gradients",
    "transit": "gradients on their way",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "master_param": "masters",
}


def print_plan(console: Console, plan: Plan) -> None:
    _print_bytes(console, plan)
    for line in _lines(plan):
        console.print(line, markup=False, soft_wrap=True)
    if plan.gpu_memory is not None:
        _print_proposals(console, plan)
    for remark in plan.remarks:
        console.print(remark, markup=False, soft_wrap=True)


def text_of(plan: Plan) -> str:
    console = Console(file=StringIO(), width=100, highlight=False)
    print_plan(console, plan)
    return console.file.getvalue().rstrip()


def _print_bytes(console: Console, plan: Plan) -> None:
    made = plan.estimate
    one = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    title = f"{plan.source}: {plan.elements:,} parameters on {one}, {plan.local_elements:,} a rank"
    console.print(title, markup=False, soft_wrap=True)
    table = Table()
    table.add_column("a rank")
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    for kind in LABELS:
        if kind in made.device or kind in made.host:
            table.add_row(
                LABELS[kind], *(as_text(where[kind]) if kind in where else "" for where in (made.device, made.host))
            )
    table.add_section()
    table.add_row("all the time", as_text(made.resident), as_text(sum(made.host.values())), style="bold")
    for name in ("step", "export", "load"):
        extra = getattr(made, name)
        table.add_row(f"  {name}: on top", as_text(extra.device), as_text(extra.host))
    table.add_section()
    table.add_row("at the highest", as_text(made.device_peak), as_text(made.host_peak), style="bold")
    console.print(table)


def _lines(plan: Plan) -> list[str]:
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


def _print_proposals(console: Console, plan: Plan) -> None:
    kept = f"{as_text(plan.reserve)} of it kept for activations and what else is not counted"
    console.print(f"what fits {as_text(plan.gpu_memory or 0)}, {kept}:", markup=False, soft_wrap=True)
    table = Table()
    table.add_column("changes")
    table.add_column("all the time", justify="right")
    table.add_column("at the highest", justify="right")
    table.add_column("fits")
    for proposal in plan.proposals:
        made = proposal.estimate
        fits = "[green]yes[/green]" if proposal.fits else "no"
        table.add_row(proposal.changes, as_text(made.resident), as_text(made.device_peak), fits)
    console.print(table)
    found = plan.proposal
    if found is not None:
        console.print(found.settings.call(), markup=False, soft_wrap=True)
        return
    least = plan.proposals[-1].estimate
    advice = f"nothing fits: weights and gradients alone take {as_text(least.resident)}; spread them over more ranks"
    console.print(advice, markup=False, soft_wrap=True)
