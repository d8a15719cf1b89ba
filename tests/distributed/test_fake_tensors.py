"""Everything that an optimizer does, on tensors without data, as estimators of memory run it."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from helpers.modes import MODES as ALL_MODES
from helpers.modes import Mode
from statestream import FusedAdam
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.simulated.fake_cuda import fake_cuda_world
from benchmarks.simulated.live_bytes import LiveBytes

MODES = [
    {},
    {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "state_dict_cpu_offload": True},
    {"master_weights": True, "store_param_remainders": True, "state_dict_cpu_offload": True},
    {"master_weights": True, "capturable": True, "state_dict_cpu_offload": True},
    {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "state_dict_cpu_offload": True},
    {"master_weights": True, "master_weight_dtype": "fp16", "exp_avg_dtype": "fp8", "capturable": True},
    {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "stochastic_rounding": True},
]


def live_a_life(device: str, mode: dict[str, object]) -> dict[str, object]:
    """Built, stepped, exported, loaded and stepped again; nothing may read a value or an address."""
    param = torch.nn.Parameter(torch.empty(300, 7, dtype=torch.bfloat16, device=device))
    optimizer = FusedAdam([param], **mode)
    for _ in range(2):
        param.grad = torch.empty_like(param)
        optimizer.step()
    exported = optimizer.state_dict()
    optimizer.load_state_dict(exported)
    optimizer.step()
    optimizer.refresh_masters()
    return exported


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_optimizer_lives_without_data_on_the_host(mode):
    with FakeTensorMode():
        exported = live_a_life("cpu", mode)
    assert exported["state"][0]["exp_avg"].shape == (300, 7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_optimizer_lives_without_data_on_a_gpu_that_is_not_there(mode):
    with fake_cuda_world((1,), rank=0):
        exported = live_a_life("cuda:0", mode)
        device = "cpu" if mode.get("state_dict_cpu_offload") else "cuda"
        assert exported["state"][0]["exp_avg"].device.type == device


def wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value.clone()


STAGES = ("built", "first step", "second step", "export", "export gone", "load", "anew", "anew loaded")


def bytes_of_a_life(fake: bool, mode: Mode) -> dict[str, tuple[int, int]]:
    """After each of STAGES the live bytes of all tensors, and the most there were in it."""
    found = []
    with FakeTensorMode() if fake else nullcontext(), LiveBytes("cpu") as live:
        params = [
            torch.nn.Parameter(torch.empty(300, 7 + i, dtype=dtype).zero_())
            for i, dtype in enumerate(mode.param_dtypes)
        ]

        def seen() -> None:
            found.append((live.live, live.peak))
            live.mark()

        def step(optimizer: FusedAdam) -> None:
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
            for param in params:
                param.grad = None
            seen()

        def build() -> FusedAdam:
            return FusedAdam(params, **mode.arguments, export_staging_bytes=2048)

        optimizer = build()
        seen()
        step(optimizer)
        step(optimizer)
        exported = optimizer.state_dict()
        seen()
        # Values that a load has to convert, through its staging.
        saved = {i: {n: wide(v) for n, v in values.items()} for i, values in exported["state"].items()}
        saved = {"state": saved, "param_groups": exported["param_groups"]}
        del exported
        seen()
        optimizer.load_state_dict(saved)
        seen()
        del optimizer
        gc.collect()
        optimizer = build()
        seen()
        optimizer.load_state_dict(saved)
        seen()
    return dict(zip(STAGES, found, strict=True))


SAMPLE = {*range(0, len(ALL_MODES), 39), *range(len(ALL_MODES) - 4, len(ALL_MODES))}


@pytest.mark.parametrize(
    "mode", [m if i in SAMPLE else pytest.param(m, marks=pytest.mark.long) for i, m in enumerate(ALL_MODES)], ids=str
)
def test_what_is_allocated_without_data_is_what_a_real_run_allocates(mode):
    """In every form of the state and every part of a life; to the byte, as torch's allocator rounds. 20 s in all."""
    real, fake = bytes_of_a_life(False, mode), bytes_of_a_life(True, mode)
    assert fake == real
    assert real["first step"][0] > real["built"][0]
    assert real["load"][1] > real["load"][0] == real["export gone"][0]
    # A step takes nothing beside its gradients, which are as the parameters.
    assert real["second step"] == (real["first step"][0], real["first step"][0] + real["built"][0])
