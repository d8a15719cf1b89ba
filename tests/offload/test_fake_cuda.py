"""Device memory of a step as the optimizer's own Python takes it, counted on fake CUDA tensors of 64 ranks."""

from __future__ import annotations

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.device.queues import HostDevice
from statestream.state.stored import Stored
from torch.distributed.tensor import DTensor, Shard

from benchmarks.simulated.fake_cuda import fake_cuda_world
from benchmarks.simulated.live_bytes import LiveBytes

MiB = 1 << 20


class FakeCuda(HostDevice):
    """Queues nothing; its memory is on the fake GPU."""

    def __init__(self):
        super().__init__()
        self.torch_device = torch.device("cuda", 0)

    def allocate(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self, block):
        """When the last reference goes."""


def sharded(mesh, shape):
    local = torch.empty(-(-shape[0] // mesh.size()), *shape[1:], dtype=torch.bfloat16, device="cuda:0")
    param = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    param.grad = torch.empty_like(param)
    return param


def peak_of_steps(optimizer, steps=2):
    with LiveBytes() as live:
        live.count([p for g in optimizer.param_groups for p in g["params"]])
        peaks = []
        for _ in range(steps):
            live.mark()
            optimizer.step()
            peaks.append(live.extra)
            assert live.kept == 0, "state is left on the device between steps"
    return peaks


@pytest.mark.parametrize("largest", [1, 16])
def test_fused_adam_keeps_the_bound_whatever_the_largest_parameter(largest, on_device):
    with fake_cuda_world() as mesh, torch.no_grad():
        on_device(FakeCuda())
        params = [sharded(mesh, (64 * 1024 * largest, 256)), *(sharded(mesh, (64 * 128, 256)) for _ in range(8))]
        inner = FusedAdam(params, master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
        optimizer = CPUOffloadOptimizer(inner, MiB)
        total = sum(p.to_local().numel() for p in params) * 8
        assert total > 2 * MiB
        assert all(0 < peak <= MiB for peak in peak_of_steps(optimizer))


def test_one_pass_takes_all_of_the_state(on_device):
    """The control: the count sees what the bound is there to prevent."""
    with fake_cuda_world() as mesh, torch.no_grad():
        on_device(FakeCuda())
        params = [sharded(mesh, (64 * 128, 256)) for _ in range(8)]
        optimizer = CPUOffloadOptimizer(FusedAdam(params), None)
        total = sum(p.to_local().numel() for p in params) * 8
        assert all(total <= peak <= 1.02 * total for peak in peak_of_steps(optimizer))


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("masters", ["fp32", "fp16"])
def test_the_exports_of_an_offloaded_optimizer_take_no_device_memory(masters, written, on_device, monkeypatch):
    """Of weights that were written the masters are those of the next step: the weights come down to the host."""
    made, decode = [], Stored._decode_refreshed
    monkeypatch.setattr(Stored, "_decode_refreshed", lambda self, *args: made.append(decode(self, *args)))
    with fake_cuda_world() as mesh, torch.no_grad():
        on_device(FakeCuda())
        params = [sharded(mesh, (64 * 128, 256)) for _ in range(8)]
        options = {"master_weights": True, "master_weight_dtype": masters, "exp_avg_dtype": "bf16"}
        optimizer = CPUOffloadOptimizer(FusedAdam(params, **options), MiB)
        optimizer.step()
        if written:
            for param in params:
                param.detach().zero_()
        with LiveBytes() as live:
            live.count(params)
            live.mark()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
        assert live.extra == 0
        assert len(made) == (len(params) if written else 0)
        for state in saved["state"].values():
            for name in ("exp_avg", "exp_avg_sq", "master_param"):
                assert state[name].device_mesh == mesh and state[name].dtype is torch.float32
                assert state[name].to_local().device.type == "cpu"


def test_what_adagrad_allocates_in_its_constructor_is_gone_once_it_is_wrapped(on_device):
    """Its own peak, all of its state, is documented; the bound holds from then on."""
    with fake_cuda_world() as mesh, torch.no_grad():
        on_device(FakeCuda())
        params = [sharded(mesh, (64 * 128, 256)) for _ in range(8)]
        state = sum(p.to_local().numel() * p.element_size() for p in params)
        with LiveBytes() as live:
            live.count(params)
            live.mark()
            inner = torch.optim.Adagrad(params, foreach=False)
            assert live.kept == live.extra == state
            optimizer = CPUOffloadOptimizer(inner, MiB // 4)
            assert live.extra == state, "wrapping takes device memory of its own"
            assert live.kept == 0
        assert optimizer.plan.device_bytes <= MiB // 4 < state
        for value in optimizer.state.values():
            assert value["sum"].to_local().device.type == "cpu" and value["sum"].device_mesh == mesh
