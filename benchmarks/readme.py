"""README's table of figures, out of what the benchmarks wrote: no figure stands there that was typed in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner import results_folder

__all__ = ["BEGIN", "END", "README", "table", "with_table"]

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Result:
    """A written report, its rows by column."""

    rows: list[dict[str, Any]]
    machine: str
    series: dict[str, list[list[float]]]

    def where(self, **wanted: Any) -> list[dict[str, Any]]:
        return [row for row in self.rows if all(row[key] == value for key, value in wanted.items())]


def read(name: str) -> Result | None:
    path = results_folder() / f"{name}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    return Result(rows, found["machine"], found.get("series", {}))


def cpu_step(result: Result) -> Iterator[tuple[str, str]]:
    most = max(row["elements"] for row in result.rows)
    threads = max(row["threads"] for row in result.rows)
    large = result.where(elements=most, threads=threads)
    to_touch = ", ".join(f"{row['to touch']} {row['mode']}" for row in large)
    yield f"CPU step of {most >> 20}M elements, to the same memory traffic with trivial arithmetic", to_touch
    ahead = [
        f"{row['torch fused ms'] / row['statestream ms']:.2f} x {row['mode']}"
        for row in large
        if row["torch fused ms"] and row["mode"] in ("FP32", "BF16")
    ]
    if ahead:
        yield "the same, torch.optim.AdamW(fused=True) takes", ", ".join(ahead)


def host_step(result: Result) -> Iterator[tuple[str, str]]:
    for mode in dict.fromkeys(row["mode"] for row in result.rows):
        rows = {row["optimizer"]: row for row in result.where(mode=mode)}
        ours = rows.pop("statestream")
        others = [f"{name} {row['to statestream']} x, {row['bytes a parameter']}" for name, row in rows.items()]
        yield (
            f"step on the host, {mode}, {ours['elements'] >> 20}M elements: time to ours, and bytes a parameter",
            f"{'; '.join(others)}; statestream {ours['bytes a parameter']}",
        )


def overhead(result: Result) -> Iterator[tuple[str, str]]:
    for row in result.where(optimizer="statestream"):
        (fused,) = result.where(optimizer="torch fused", tensors=row["tensors"], gradients=row["gradients"])
        yield (
            f"`step()` on 1,000 parameters of 64 elements ({row['tensors']}), gradients {row['gradients']}: in a loop, "
            "in turn with others",
            f"{row['ms in a loop']:.2f}, {row['ms in turn']:.2f} ms; torch fused {fused['ms in a loop']:.1f}, "
            f"{fused['ms in turn']:.1f} ms",
        )


def export_time(result: Result) -> Iterator[tuple[str, str]]:
    ratios = ", ".join(f"{row['ratio']} {row['operation']} ({row['moments'].split('.')[-1]})" for row in result.rows)
    yield "export and load on the CPU, to a copy of the same bytes", ratios


def export_peak(result: Result) -> Iterator[tuple[str, str]]:
    rows = result.where(path="get, flat, cpu_offload")
    most = max(rows, key=lambda row: row["usual MiB"])
    extra = {row["extra peak MiB"] for row in rows}
    yield (
        f"extra device memory of an export, {most['local elements'] >> 20}M local elements (fake CUDA, 64 ranks)",
        f"{max(extra):.0f} MiB; the usual way {most['usual MiB']:.0f} MiB",
    )


def growth(result: Result) -> Iterator[tuple[str, str]]:
    slopes = ", ".join(f"{row['exponent at the upper end']} {row['varied']}" for row in result.rows)
    yield "a step's time grows as a power, 1 is linear, of", slopes


def offload_step(result: Result) -> Iterator[tuple[str, str]]:
    if "chunks" not in result.rows[0]:  # measured on a GPU
        return
    most = max(row["state GB"] for row in result.rows)
    rows = result.where(**{"state GB": most})
    one_pass = next(row for row in rows if row["way"] == "one pass")
    streamed = min((row for row in rows if row["way"] == "streamed"), key=lambda row: row["chunks"])
    best = min((row for row in rows if row["way"] == "streamed"), key=lambda row: row["ms"])
    yield (
        f"{most} GB of state in host memory, simulated link of 55 GB/s each way",
        f"one pass {one_pass['ms']:.0f} ms; streamed {streamed['ms']:.0f} ms in {streamed['chunks']} chunks, "
        f"{best['ms']:.0f} ms in {best['chunks']} ({best['peak allocated MB'] / 1000:.1f} GB on the device)",
    )


def moment_formats(result: Result) -> Iterator[tuple[str, str]]:
    steps = len(result.series["FP32"])
    others = [row for row in result.rows if row["moments"] != "FP32"]
    changes = "; ".join(row["to FP32's"] + " " + row["moments"] for row in others)
    yield f"loss (nats a byte) after {steps} steps of the demo's model, less that of FP32 moments", changes


FIGURES: dict[str, Callable[[Result], Iterator[tuple[str, str]]]] = {
    "cpu_step": cpu_step,
    "host_step": host_step,
    "overhead": overhead,
    "export_time": export_time,
    "export_peak": export_peak,
    "offload_step": offload_step,
    "growth": growth,
    "moment_formats": moment_formats,
}


def table() -> str:
    """The figures that there are, with the report each comes from and the machine it was measured on."""
    lines = ["| what | measured |", "|---|---|"]
    machines: dict[str, list[str]] = {}
    for name, figures in FIGURES.items():
        result = read(name)
        if result is None:
            continue
        machines.setdefault(result.machine, []).append(name)
        lines += [f"| [{what}](benchmarks/results/{name}.md) | {measured} |" for what, measured in figures(result)]
    lines.append("")
    lines += [f"{', '.join(names)}: {machine}." for machine, names in machines.items()]
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """README with its table of figures made anew; ValueError where it has no place for one."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: no place for the figures, between the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{table()}\n\n{end}{after}"
