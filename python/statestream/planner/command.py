"""What `statestream plan` does once its options are parsed."""

from __future__ import annotations

import json
from pathlib import Path

from statestream.planner.mesh import Mesh
from statestream.planner.model import Model, model_of_size
from statestream.planner.plans import Plan, make_plan, room
from statestream.planner.quantities import BadOption, parse_count
from statestream.planner.settings import Settings
from statestream.planner.sources import read_model
from statestream.planner.times import Rates

__all__ = ["plan_files", "show"]


def plan_files(
    source: Path | None,
    *,
    params: str | None,
    layers: int | None,
    ranks: int | None,
    mesh: str | None,
    settings: Settings,
    rates: Rates,
    gpu_memory: str | None,
    reserve: str | None,
) -> Plan:
    """A plan of the model at `source`, or of so many parameters. BadOption for what cannot be."""
    where = Mesh.checked(ranks, mesh)
    memory, kept = room("--gpu-memory", gpu_memory, reserve)
    model = _model(source, params, layers)
    return make_plan(
        where.shares(model),
        settings,
        source=model.source,
        ranks=where.ranks,
        remarks=model.remarks,
        rates=rates,
        gpu_memory=memory,
        reserve=kept,
        default_dtype=model.dtype or "bf16",
    )


def _model(source: Path | None, params: str | None, layers: int | None) -> Model:
    if params is not None and source is not None:
        raise BadOption("params", f"the model is given twice, as {params} and as {str(source)!r}; give one of the two")
    if source is not None:
        if layers is not None:
            raise BadOption("layers", "it goes with --params; a file says its own")
        return read_model(source)
    if params is None:
        raise BadOption("params", "no model is given; give a file or folder, or --params 8e9 --layers 32")
    return model_of_size(parse_count("params", params), 1 if layers is None else layers)


def show(plan: Plan, as_json: bool, png: Path | None) -> None:
    """Prints the plan to stdout, and draws it. BadOption where the picture cannot be written, ImportError
    where matplotlib is not installed."""
    if png is not None:
        if png.suffix.lower() != ".png":
            raise BadOption("png", f"{str(png)!r} does not end in .png")
        try:
            plan.save_png(png)
        except OSError as error:
            raise BadOption("png", f"{str(png)!r} cannot be written: {error.strerror or error}") from None
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2))
        return
    print(plan)
    if png is not None:
        print(f"{png} written")
