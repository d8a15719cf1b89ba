"""`statestream.plan` of a live model: its own tensors, and the settings of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import statestream
import torch
from helpers.modes import FORMS
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.checkpoint.transfer import LEAST_STAGING_BYTES
from statestream.offload.gradients.staging import GradientStaging
from statestream.planner.settings import LEAST_STAGING
from torch import nn


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(300, 512), nn.BatchNorm1d(512), nn.Linear(512, 256)).to(dtype)


def stepped(model: nn.Module, **arguments) -> FusedAdam:
    optimizer = FusedAdam(model.parameters(), **arguments)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer


def held(optimizer: FusedAdam) -> dict[str, int]:
    """Bytes of the state's own storages, by key."""
    found: dict[str, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                found[name] = found.get(name, 0) + value.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("mode", FORMS, ids=str)
def test_the_plan_of_an_optimizer_has_the_bytes_that_it_holds(mode):
    model = model_of(mode.param_dtypes[0])
    model[2].to(mode.param_dtypes[-1])
    optimizer = stepped(model, **mode.arguments)
    planned = statestream.plan(model, optimizer).estimate.device
    for name, nbytes in held(optimizer).items():
        assert planned[name] == pytest.approx(nbytes, rel=0.05), name
    assert set(held(optimizer)) == set(planned) - {"weights", "grads"}


@pytest.mark.parametrize("mode", FORMS, ids=str)
def test_the_plan_of_an_export_has_its_bytes(mode):
    model = model_of(mode.param_dtypes[0])
    model[2].to(mode.param_dtypes[-1])
    optimizer = FusedAdam(model.parameters(), **mode.arguments | {"state_dict_cpu_offload": True})
    planned = statestream.plan(model, optimizer).estimate
    states = optimizer.state_dict()["state"].values()
    nbytes = sum(value.nbytes for state in states for name, value in state.items() if name != "step")
    assert planned.exported == planned.export.host == planned.state_on_disk == nbytes


def test_an_offloaded_optimizers_state_is_on_the_host():
    model = model_of()
    inner = FusedAdam(model.parameters(), master_weights=True, exp_avg_dtype="bf16")
    made = statestream.plan(model, CPUOffloadOptimizer(inner, 1 << 16)).estimate
    assert set(made.device) == {"weights", "grads"}
    assert 0 < made.step.device <= 1 << 16


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
@pytest.mark.parametrize("chunk", [1 << 17, 1 << 19])
def test_gradients_in_host_memory_are_planned_as_they_are_held_and_streamed(moments, chunk):
    model = model_of()
    inner = FusedAdam(model.parameters(), master_weights=True, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    optimizer = CPUOffloadOptimizer(inner, chunk, offload_gradients=True)
    model(torch.ones(4, 300, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    held, made = optimizer.memory_report(), statestream.plan(model, optimizer).estimate
    assert made.device["grads"] == 0 == held.device.get("grads", 0)
    assert made.host["grads"] == pytest.approx(optimizer.plan.gradient_bytes, rel=0.05)
    assert made.host["grads"] == pytest.approx(4 * sum(p.numel() for p in model.parameters()), rel=0.05)
    assert made.step.device == pytest.approx(held.step_device, rel=0.05)
    by_options = statestream.plan(model, moments=moments, chunk=chunk, offload_gradients=True).estimate
    assert (by_options.host, by_options.step) == (made.host, made.step)


@dataclass
class Blocks:
    """A device as a stage of gradients sees it that takes its memory."""

    taken: list[int] = field(default_factory=list)

    @property
    def memory(self):
        return self

    def block(self, nbytes):
        self.taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("elements", [[1000, 3000], [20 << 20, 1 << 20]])
def test_gradients_on_their_way_are_planned(elements):
    model = torch.nn.ParameterList(torch.empty(n, dtype=torch.bfloat16, device="meta") for n in elements)
    made = statestream.plan(model, chunk="64MiB", offload_gradients=True).estimate
    device = Blocks()
    GradientStaging(lambda: 1).prepare(device, 2 * sum(elements))
    assert made.host["transit"] == pytest.approx(sum(device.taken), rel=0.05)
    # At the most the gradient that is made, and as much as the slots hold of others.
    assert made.device["transit"] == min(2 * sum(elements), sum(device.taken) + 2 * max(elements))
    assert made.device["grads"] == 0


def test_frozen_parameters_and_buffers_are_weights_alone():
    model = model_of()
    before = statestream.plan(model).estimate
    model[0].weight.requires_grad_(False)
    after = statestream.plan(model).estimate
    n = model[0].weight.numel()
    assert before.device["weights"] == after.device["weights"]
    assert before.device["grads"] - after.device["grads"] == 2 * n
    assert before.device["exp_avg"] - after.device["exp_avg"] == 4 * n
    params = sum(p.numel() * 2 for p in model.parameters())
    buffers = sum(b.numel() * 2 for b in model.buffers() if b.is_floating_point())
    assert after.device["weights"] == pytest.approx(params + buffers, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float64, torch.float8_e5m2], ids=str)
def test_frozen_parameters_of_any_dtype_have_their_bytes(dtype):
    model = model_of()
    before = statestream.plan(model).estimate.device
    model.register_parameter("codes", nn.Parameter(torch.zeros(64, 1024, dtype=dtype), requires_grad=False))
    after = statestream.plan(model).estimate.device
    assert after == before | {"weights": before["weights"] + 64 * 1024 * dtype.itemsize}


def test_a_model_without_memory_has_the_plan_of_a_real_one():
    with torch.device("meta"):
        meta = model_of()
    assert statestream.plan(meta, moments="bf16").as_dict() == statestream.plan(model_of(), moments="bf16").as_dict()


def test_it_prints_and_draws(tmp_path):
    made = statestream.plan(model_of(), gpu_memory="1GiB", link="50GB/s", device_bandwidth=10**12)
    assert "masters" in str(made) and "FusedAdam(params, master_weights=True)" in str(made)
    made.save_png(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_is_refused_by_name():
    model = model_of()
    with pytest.raises(TypeError, match="AdamW"):
        statestream.plan(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="moments"):
        statestream.plan(model, FusedAdam(model.parameters()), moments="bf16")
    with pytest.raises(ValueError, match="gpu_memory: 'much' is not a size"):
        statestream.plan(model, gpu_memory="much")
    with pytest.raises(ValueError, match="give gpu_memory too"):
        statestream.plan(model, reserve="1GiB")
    for reserve in ("2GiB", -1, float("nan"), True):
        with pytest.raises(ValueError, match="reserve: "):
            statestream.plan(model, gpu_memory="1GiB", reserve=reserve)
    with pytest.raises(ValueError, match=r"'torch\.float64' is not supported"):
        statestream.plan(model_of(torch.float64))


def test_the_least_staging_is_the_exports():
    assert LEAST_STAGING == LEAST_STAGING_BYTES
