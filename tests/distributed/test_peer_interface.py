"""What Transformer Engine's users bring: quantised local tensors, and states read and written by their local parts."""

import pytest
import torch
from helpers.bits import same_bits
from helpers.quantized import Float8
from statestream import FusedAdam
from torch.distributed.tensor import DTensor, Shard

from .test_sharding import world

BF16, FP32 = torch.bfloat16, torch.float32


def sharded(local: torch.Tensor, mesh, rows: int) -> torch.nn.Parameter:
    shape = torch.Size((rows, *local.shape[1:]))
    placed = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=shape, stride=(local.shape[1], 1))
    return torch.nn.Parameter(placed)


def test_a_quantised_local_tensor_trains_through_its_master():
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with world(0, (2,)) as mesh:
        param = sharded(Float8.of(values), mesh, 8)
        twin = torch.nn.Parameter(Float8.of(values).dequantize(dtype=FP32))
        optimizer = FusedAdam([param], lr=0.01, master_weights=True, exp_avg_dtype="bf16", use_decoupled_grad=True)
        reference = FusedAdam([twin], lr=0.01, exp_avg_dtype="bf16", use_decoupled_grad=True)
        for step in range(3):
            grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + 1))
            twin.decoupled_grad = grad
            param.decoupled_grad = DTensor.from_local(
                grad, mesh, (Shard(0),), run_check=False, shape=param.shape, stride=param.stride()
            )
            optimizer.step()
            reference.step()
        with torch.no_grad():
            local = param.to_local()
        assert isinstance(local, Float8)
        assert torch.equal(local.dequantize(dtype=FP32), Float8.of(twin.detach()).dequantize(dtype=FP32))
        for name, state in optimizer.state_dict()["state"][0].items():
            if name != "step":
                assert isinstance(state, DTensor) and state.shape == (8, 6) and state.placements == (Shard(0),)
                assert state.dtype is FP32 and type(state.to_local()) is torch.Tensor
        assert same_bits(optimizer.state[param]["master_param"].to_local(), twin)


@pytest.mark.parametrize("shape", ["local", "sharded", "full"])
def test_a_state_is_read_by_its_local_part_and_written_by_any(shape):
    with world(0, (2,)) as mesh:
        param = sharded(torch.zeros(4, 6, dtype=BF16), mesh, 8)
        optimizer = FusedAdam([param], master_weights=True, exp_avg_dtype="bf16")
        full = torch.arange(48, dtype=FP32).view(8, 6)
        local = full[:4]
        placed = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=param.shape, stride=param.stride())
        given = {"local": local, "sharded": placed, "full": full}[shape]
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            optimizer.set_scaled_state(param, name, given)
            assert torch.equal(optimizer.get_unscaled_state(param, name), local)
        with pytest.raises(ValueError, match=r"exp_avg: expected torch.float32 of shape \(8, 6\)"):
            optimizer.set_scaled_state(param, "exp_avg", torch.zeros(3, 6))
