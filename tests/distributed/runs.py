"""Runs with fixed gradients, each way of saving and loading them, and the uninterrupted run that judges."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from statestream import FusedAdam
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from .layouts import distributed, plain, share

__all__ = [
    "MODES",
    "STEPS_AFTER",
    "STEPS_BEFORE",
    "WAYS",
    "WITH_SCALES",
    "check_against_uninterrupted",
    "feed",
    "load",
    "optimizer_of",
    "save",
    "start",
    "train",
]

STEPS_BEFORE, STEPS_AFTER = 3, 2

MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 + masters": (torch.bfloat16, {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "fp32": (torch.float32, {}),
    "bf16 + remainders": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "bf16 by random bits": (
        torch.bfloat16,
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True, "seed": 3},
    ),
}
"""Bits do not hang on the sharding."""
WITH_SCALES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 + fp8": (torch.bfloat16, {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "stochastic_rounding": True}),
    "fp16 + fp16 masters": (
        torch.float16,
        {"master_weights": True, "master_weight_dtype": "fp16", "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"},
    ),
}
"""Elements of a block share a scale, and blocks are those of a shard."""

WAYS = ("flat", "nested", "async thread", "async shared memory", "full")


def optimizer_of(model: nn.Module, mode: str, **more: Any) -> FusedAdam:
    """Two groups with settings of their own, as decay is usually left off vectors."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "lr": 3e-3},
    ]
    of_mode = (MODES | WITH_SCALES)[mode][1]
    options = {"lr": 1e-2, "state_dict_cpu_offload": True, "export_staging_bytes": 2048} | of_mode | more
    return FusedAdam(groups, **options)


def feed(model: nn.Module, step: int) -> None:
    """Gives every parameter the gradient of this step: the same numbers however the model is sharded."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
        full = torch.randn(param.shape, generator=generator).to(param.dtype)
        if isinstance(param, DTensor):
            param.grad = DTensor.from_local(
                share(full, param).clone(),
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        else:
            param.grad = full


def train(model: nn.Module, optimizer: FusedAdam, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        feed(model, step)
        optimizer.step()
        optimizer.zero_grad()


def start(layout: str, mode: str, seed: int = 0, **more: Any) -> tuple[nn.Module, FusedAdam]:
    model = distributed(layout, (MODES | WITH_SCALES)[mode][0], seed)
    return model, optimizer_of(model, mode, **more)


def save(way: str, model: nn.Module, optimizer: FusedAdam, folder: Path) -> None:
    """Writes model and optimizer to `folder`, which need not exist, and waits until they are there."""
    if way == "full":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = _state(model, optimizer, options)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            torch.save(state, folder / "full.pt")
        dist.barrier()
        return
    state = _state(model, optimizer, StateDictOptions(flatten_optimizer_state_dict=way != "nested"))
    if way in ("flat", "nested"):
        dcp.save(state, checkpoint_id=folder)
        return
    kind = AsyncCheckpointerType.PROCESS if way == "async process" else AsyncCheckpointerType.THREAD
    stager = None
    if way == "async shared memory":
        plain_memory = {"use_pinned_memory": False, "use_non_blocking_copy": False, "use_async_staging": False}
        stager = DefaultStager(StagingOptions(use_shared_memory=True, **plain_memory))
    future = dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind, async_stager=stager)
    future.result()
    if stager is not None:
        stager.close()


def load(way: str, model: nn.Module, optimizer: FusedAdam, folder: Path) -> None:
    if way == "full":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = {"model": {}, "optim": {}}
        if dist.get_rank() == 0:
            state = torch.load(folder / "full.pt", weights_only=True)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
        return
    options = StateDictOptions(flatten_optimizer_state_dict=way != "nested")
    state = _state(model, optimizer, options)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


def _state(model: nn.Module, optimizer: FusedAdam, options: StateDictOptions) -> dict[str, Any]:
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
    )
    return {"model": weights, "optim": optim}


def check_against_uninterrupted(model: nn.Module, optimizer: FusedAdam, mode: str, steps: int) -> None:
    """Every weight, state and counter has the bits of a run of `steps` steps on one process, never sharded."""
    judge = plain(MODES[mode][0])
    judging = optimizer_of(judge, mode)
    train(judge, judging, 0, steps)
    whole = dict(judge.named_parameters())
    assert len(whole) == len(list(model.parameters()))
    for name, param in model.named_parameters():
        _check_equal(f"{name}", param, whole[name].detach())
        state, expected = optimizer.state[param], judging.state[whole[name]]
        assert set(state) == set(expected), name
        for key, value in expected.items():
            assert state[key].dtype is value.dtype, (name, key)
            if key == "step":
                assert state[key].item() == value.item() == steps, (name, state[key], value)
            else:
                _check_equal(f"{key} of {name}", state[key], value)
    for group, expected in zip(optimizer.param_groups, judging.param_groups, strict=True):
        for key in expected:
            assert key == "params" or group[key] == expected[key], (key, group[key], expected[key])


def _check_equal(what: str, sharded: torch.Tensor, full: torch.Tensor) -> None:
    local = sharded.detach().to_local() if isinstance(sharded, DTensor) else sharded.detach()
    assert sharded.shape == full.shape, what
    expected = share(full, sharded)
    assert local.shape == expected.shape and torch.equal(local, expected), (what, local, expected)
