"""What the demo found, as a table and a verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from statestream.demo.footprint import Footprint
from statestream.demo.ranks import CLOSE, RanksOutcome
from statestream.demo.run import Outcome

__all__ = ["print_report"]

_SHOWN_DIFFERENCES = 6


def print_report(console: Console, outcome: Outcome, on_ranks: RanksOutcome | None = None) -> None:
    """Prints the table, and after it whether the two runs are equal, and the one on other ranks close."""
    settings = outcome.settings
    together = f", {settings.ranks} ranks" if settings.ranks > 1 else ""
    table = Table(
        title=f"{outcome.parameters:,} parameters, {settings.steps} steps, on {settings.device.type}{together}",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(outcome):
        table.add_row(name, value)
    console.print(table)
    _print_verdict(console, outcome)
    if on_ranks is not None:
        _print_elsewhere(console, on_ranks)


def _rows(outcome: Outcome) -> list[tuple[str, str]]:
    export = outcome.export
    each = ", by rank 0" if outcome.settings.ranks > 1 else ""
    rows = [
        ("loss, first step", f"{outcome.uninterrupted[0]:.4f} nats a byte"),
        ("loss, last step", f"{outcome.uninterrupted[-1]:.4f}"),
        ("bytes of state a parameter", _state(outcome.ours, outcome.parameters)),
        ("the same, torch.optim.AdamW", _state(outcome.adamw, outcome.parameters)),
        (f"exported to the host{each}", f"{_megabytes(export.exported)}, all FP32"),
    ]
    if export.usual_peak_extra is None:
        beyond = export.peak_extra - export.exported
        rows.append(("peak extra bytes in the export", _megabytes(export.peak_extra)))
        rows.append(("  beyond the exported copies", f"{beyond:,} bytes"))
    else:
        rows.append(("peak extra device bytes in the export", _megabytes(export.peak_extra)))
        rows.append(("  without state_dict_cpu_offload", _megabytes(export.usual_peak_extra)))
    return rows


def _state(kept: Footprint, parameters: int) -> str:
    moments, masters, state = (n / parameters for n in (kept.moments, kept.masters, kept.state))
    return f"{state:.2f} (moments {moments:.2f}, FP32 weights {masters:.2f})"


def _print_verdict(console: Console, outcome: Outcome) -> None:
    settings = outcome.settings
    if outcome.equal:
        console.print(
            f"[green]equal bit for bit[/green]: the run that was saved after step {settings.half}, loaded and "
            f"resumed, and the run that never stopped ({outcome.compared} weights, moments, masters and counters)"
        )
        return
    console.print("[red]DIFFERENT[/red]: the resumed run is not the run that never stopped")
    for when, found in (("after loading", outcome.after_loading), ("at the end", outcome.at_the_end)):
        for difference in found[:_SHOWN_DIFFERENCES]:
            console.print(f"  {when}: {difference}", markup=False)
        if len(found) > _SHOWN_DIFFERENCES:
            console.print(f"  {when}: and {len(found) - _SHOWN_DIFFERENCES} more tensors")
    if outcome.compared == 0:
        console.print("  nothing was compared")


def _print_elsewhere(console: Console, on_ranks: RanksOutcome) -> None:
    ranks = f"{on_ranks.others} rank{'s' if on_ranks.others > 1 else ''}"
    said = "[green]close[/green]" if on_ranks.furthest <= CLOSE else "[red]TOO FAR[/red]"
    console.print(
        f"{said}: resumed on {ranks}, the losses are within {on_ranks.furthest:.4f} nats a byte of that run's "
        f"(at most {CLOSE})"
    )


def _megabytes(n: int) -> str:
    return f"{n / 1e6:.2f} MB"
