"""Claims about Muon for matrices and FusedAdam for the rest: a wrapper and a scheduler for each, one checkpoint."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.processes import Claim
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from .cases import ODD, Case, Group, Run, check_same, offloaded

__all__ = ["MIXED"]

STEPS = 4
MATRICES = {
    "megabatched": Case("megabatched", [Group(ODD), Group([(4, 64, 32)] * 3)]),
    "batched": Case("batched", [Group([(64, 256)] * 3 + [(8, 24)] * 2)]),
    "torch": Case("torch", [Group([(64, 256), (32, 16)])]),
}
REST = [(33,), (1000,), (7,), (5, 16)]


@dataclass
class Mixed:
    """Matrices and the rest, each with its optimizer and scheduler, and a model of all parameters."""

    parts: Sequence[Run]
    schedulers: Sequence[Any]
    model: torch.nn.Module

    @property
    def optimizers(self) -> list[Any]:
        return [part.optimizer for part in self.parts]


def _mixed(layout: str, budget: int | None) -> Mixed:
    """`budget`: None for the optimizers themselves, else the wrappers' step_chunk_bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices = MATRICES[layout].run(mesh)
    case = Case("FusedAdam", [Group(REST)])
    rest = case.params(mesh)
    adam = Run(case, rest, FusedAdam(rest, lr=1e-2, master_weights=False, exp_avg_dtype="bf16"))
    parts = [matrices, adam] if budget is None else [offloaded(matrices, budget), offloaded(adam, budget)]
    schedulers = [
        LambdaLR(parts[0].optimizer, lambda step: 1 / (1 + step)),
        CosineAnnealingLR(parts[1].optimizer, T_max=STEPS),
    ]
    model = torch.nn.Module()
    for i, param in enumerate(p for part in parts for p in part.params):
        model.register_parameter(f"weight{i}", param)
    return Mixed(parts, schedulers, model)


def _train(mixed: Mixed, steps: Sequence[int]) -> Mixed:
    for step in steps:
        for part in mixed.parts:
            part.case.set_grads(part.params, step)
        for optimizer, scheduler in zip(mixed.optimizers, mixed.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return mixed


def _check_same(mine: Mixed, other: Mixed) -> None:
    for a, b in zip(mine.parts, other.parts, strict=True):
        check_same(a, b)


def muon_and_fused_adam_resumed_from_one_checkpoint_are_the_uninterrupted_run(
    layout: str, flat: bool, folder: Path
) -> None:
    path, options = folder / f"mixed-{layout}-{flat}", StateDictOptions(flatten_optimizer_state_dict=flat)
    first = _train(_mixed(layout, 1), range(2))
    weights, state = get_state_dict(first.model, first.optimizers, options=options)
    saved = {"model": weights, "optim": state, "schedulers": [s.state_dict() for s in first.schedulers]}
    dcp.save(saved, checkpoint_id=path)

    second = _mixed(layout, 200_000)
    weights, state = get_state_dict(second.model, second.optimizers, options=options)
    saved = {"model": weights, "optim": state, "schedulers": [s.state_dict() for s in second.schedulers]}
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(second.model, second.optimizers, model_state_dict=weights, optim_state_dict=state, options=options)
    for scheduler, values in zip(second.schedulers, saved["schedulers"], strict=True):
        scheduler.load_state_dict(values)
    _check_same(second, first)  # momenta, moments, counters and lr are those that were saved
    assert math.isclose(second.optimizers[0].param_groups[0]["lr"], 0.02 / 3, rel_tol=1e-6)
    _check_same(_train(second, range(2, STEPS)), _train(_mixed(layout, None), range(STEPS)))


def the_recipe_of_the_documentation_runs(folder: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "muon.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    before = os.getcwd()
    where = folder / "recipe"
    where.mkdir(exist_ok=True)
    os.chdir(where)
    try:
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)
    finally:
        os.chdir(before)
    muon, adam = names["optimizers"]
    assert isinstance(muon, CPUOffloadOptimizer) and isinstance(muon.inner, torch.optim.Muon)
    assert isinstance(adam, CPUOffloadOptimizer) and isinstance(adam.inner, FusedAdam)
    assert (where / "checkpoint" / ".metadata").exists()


MIXED: dict[str, Claim] = {
    **{
        f"{layout} and FusedAdam resumed, {'flat' if flat else 'nested'}": partial(
            muon_and_fused_adam_resumed_from_one_checkpoint_are_the_uninterrupted_run, layout, flat
        )
        for layout, flat in [("megabatched", True), ("batched", False), ("torch", True), ("torch", False)]
    },
    "the recipe": the_recipe_of_the_documentation_runs,
}
