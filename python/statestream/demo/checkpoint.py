"""The interrupted run's checkpoint, through torch.distributed.checkpoint (DCP) and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from statestream.demo import controls
from statestream.demo.memory import peak_extra_bytes
from statestream.demo.training import Training
from statestream.tensors.local import local_of

__all__ = ["Export", "load", "measured_export", "save"]

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Export:
    """One export of the optimizer's state, in bytes."""

    exported: int
    """What the exported tensors hold, in host memory of one rank."""
    peak_extra: int
    """The most that was allocated at once on the model's device during the export."""
    usual_peak_extra: int | None
    """The same without state_dict_cpu_offload; None on the CPU, where device and host are one."""


def measured_export(training: Training) -> tuple[Export, dict[str, Any]]:
    """The optimizer's state as DCP takes it, flat and in host memory, and what making it took."""
    device, optimizer = training.settings.device, training.optimizer
    usual = None
    if device.type != "cpu":
        optimizer.state_dict_cpu_offload = False
        _, usual = peak_extra_bytes(device, lambda: _export(training))
        optimizer.state_dict_cpu_offload = True
    exported, peak = peak_extra_bytes(device, lambda: _export(training))
    return Export(_held_bytes(exported), peak, usual), exported


def save(training: Training, exported: dict[str, Any], path: Path, control: str | None) -> None:
    """Writes the model and its exported optimizer state to the folder `path`."""
    with _one_process():
        dcp.save({"model": get_model_state_dict(training.model), "optim": exported}, checkpoint_id=path)
    if control == controls.FLIP_BIT and (training.world is None or training.world.rank == 0):
        controls.flip_saved_bit(path, "optim.state.blocks.0.qkv.weight.exp_avg")


def load(training: Training, path: Path, control: str | None) -> None:
    """Loads the checkpoint into a fresh model and optimizer, in place."""
    optim = _export(training)
    state = {"model": get_model_state_dict(training.model), "optim": optim}
    with _one_process():
        dcp.load(state, checkpoint_id=path)
    if control == controls.DROP_STEP:
        controls.drop_steps(optim)
    elif control == controls.DROP_MASTERS:
        controls.drop_masters(optim)
    set_model_state_dict(training.model, state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, optim, options=_OPTIONS)


def _export(training: Training) -> dict[str, Any]:
    return get_optimizer_state_dict(training.model, training.optimizer, options=_OPTIONS)


def _held_bytes(exported: dict[str, Any]) -> int:
    storages = [local_of(value).untyped_storage() for value in exported.values() if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns where torch.distributed is not set up; one process is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
