"""Everything that an optimizer does, on tensors without data, as estimators of memory run it."""

from __future__ import annotations

import pytest
import torch
from statestream import FusedAdam
from torch._subclasses.fake_tensor import FakeTensorMode

from .fake_cuda import fake_cuda_world

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
