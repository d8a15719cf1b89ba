"""Claims about checkpoints that are written on some number of ranks and read on another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from .layouts import LAYOUTS
from .processes import Claim
from .runs import MODES, STEPS_AFTER, STEPS_BEFORE, WAYS, check_against_uninterrupted, load, save, start, train

__all__ = ["CHECKPOINTS", "FEW", "SOME", "loads", "name_of", "saves"]

Checkpoint = tuple[str, str, str]
"""Layout, way of saving, mode of the optimizer."""

# Each way of saving under plain FSDP2, each mode too, and every other layout in the first way. Random bits on rows, on
# columns, on both at once: a shard's rows are no multiple of a group of eight.
CHECKPOINTS: list[Checkpoint] = [
    *(("fsdp", way, mode) for way in WAYS for mode in MODES if way == "flat" or mode == "bf16 + masters"),
    *((layout, "flat", "bf16 + masters") for layout in LAYOUTS if layout != "fsdp"),
    *((layout, "flat", "bf16 by random bits") for layout in LAYOUTS if layout not in ("fsdp", "hsdp")),
]
SOME: list[Checkpoint] = [
    each
    for each in CHECKPOINTS
    if each[0] in ("fsdp", "columns", "tp_fsdp", "left_out")
    and each not in [("left_out", "flat", "bf16 by random bits"), ("tp_fsdp", "flat", "bf16 by random bits")]
]
"""Those that run by default: every way, every mode, and the layouts that are least like each other."""
FEW: list[Checkpoint] = [
    ("fsdp", "flat", "bf16 + remainders"),
    ("tp_fsdp", "flat", "bf16 + masters"),
    ("columns", "flat", "bf16 by random bits"),
]


def name_of(layout: str, way: str, mode: str) -> str:
    return f"{layout}, {way}, {mode}"


def _folder(folder: Path, ranks: int, layout: str, way: str, mode: str) -> Path:
    return folder / f"{ranks}-{layout}-{way}-{mode}".replace(" ", "_")


def saves(ranks: int, checkpoints: Iterable[Checkpoint]) -> dict[str, Claim]:
    return {f"{name_of(*each)}, saved on {ranks}": partial(_save, *each) for each in checkpoints}


def loads(saved_on: int, ranks: int, checkpoints: Iterable[Checkpoint]) -> dict[str, Claim]:
    return {
        f"{name_of(*each)}, saved on {saved_on}, loaded on {ranks}": partial(_load, saved_on, *each)
        for each in checkpoints
    }


def _save(layout: str, way: str, mode: str, folder: Path) -> None:
    model, optimizer = start(layout, mode)
    train(model, optimizer, 0, STEPS_BEFORE)
    save(way, model, optimizer, _folder(folder, dist.get_world_size(), layout, way, mode))
    # Saving changes nothing, and the run goes on as if it had not been saved.
    check_against_uninterrupted(model, optimizer, mode, STEPS_BEFORE)
    train(model, optimizer, STEPS_BEFORE, STEPS_AFTER)
    check_against_uninterrupted(model, optimizer, mode, STEPS_BEFORE + STEPS_AFTER)


def _load(saved_on: int, layout: str, way: str, mode: str, folder: Path) -> None:
    # Other weights and other state, so that nothing can be right that was not loaded.
    model, optimizer = start(layout, mode, seed=1)
    train(model, optimizer, 7, 1)
    load(way, model, optimizer, _folder(folder, saved_on, layout, way, mode))
    check_against_uninterrupted(model, optimizer, mode, STEPS_BEFORE)
    train(model, optimizer, STEPS_BEFORE, STEPS_AFTER)
    check_against_uninterrupted(model, optimizer, mode, STEPS_BEFORE + STEPS_AFTER)
