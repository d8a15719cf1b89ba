"""Peaks of torch's caching allocator in export, load and step, and bits that survive a round trip."""

import gc

import pytest
import torch
from gpu_cases import BULK, GPU, SCALED_BF16, Tensors, step
from statestream import FusedAdam

MIB = (1 << 20) // BULK
STAGING = 8 * MIB
ELEMENTS = [24 * MIB, 24 * MIB + 13, 1000, 1]
SLACK = 2 * MIB
"""The allocator rounds a request up to its blocks."""


@pytest.fixture
def optimizer():
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, device=GPU, dtype=torch.bfloat16)) for n in ELEMENTS]
    made = FusedAdam(
        params,
        lr=1e-2,
        master_weights=True,
        exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
        state_dict_cpu_offload=True,
        export_staging_bytes=STAGING,
    )
    for p in params:
        p.grad = torch.randn_like(p)
    made.step()
    yield made
    del params, made
    gc.collect()
    torch.cuda.empty_cache()


class Peak:
    """Bytes that were requested of the allocator beyond those at the start; `left` are still there."""

    def __enter__(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error):
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - self.before
        self.left = torch.cuda.memory_allocated() - self.before


def test_export_peak_is_one_staging_budget(optimizer):
    with Peak() as memory:
        exported = optimizer.state_dict()
    assert 0 < memory.peak <= STAGING + SLACK
    assert memory.left == 0
    for state in exported["state"].values():
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            assert state[name].device.type == "cpu"
            assert state[name].dtype is torch.float32


def test_export_without_offload_takes_eight_bytes_an_element(optimizer):
    """The control: what the bound above is measured against."""
    optimizer.state_dict_cpu_offload = False
    with Peak() as memory:
        exported = optimizer.state_dict()
    assert memory.peak >= 8 * sum(ELEMENTS)
    del exported


def test_load_peak_is_one_staging_budget(optimizer):
    exported = optimizer.state_dict()
    with Peak() as memory:
        optimizer.load_state_dict(exported)
    assert memory.peak <= STAGING + SLACK
    assert memory.left == 0


def test_step_takes_no_device_memory(optimizer):
    with Peak() as memory:
        optimizer.step()
    assert memory.peak == 0


def test_a_step_of_scaled_states_takes_no_device_memory():
    """No FP32 copy of any of it, and no pass for its scales."""
    tensors = Tensors.random(SCALED_BF16, [4 * MIB, 1000, 1], seed=1).to(GPU)
    step(tensors)
    with Peak() as memory:
        step(tensors)
    assert memory.peak == 0


def test_state_is_made_by_the_first_step_and_not_before():
    p = torch.nn.Parameter(torch.zeros(4 * MIB, device=GPU, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    with Peak() as memory:
        made = FusedAdam([p], exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert memory.left == 0
    with Peak() as memory:
        made.step()
    assert 16 * MIB <= memory.left <= 16 * MIB + SLACK


def test_export_and_load_keep_every_bit(optimizer):
    exported = optimizer.state_dict()
    params = optimizer.param_groups[0]["params"]
    before = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
    weights = [p.detach().clone() for p in params]
    optimizer.step()
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    optimizer.load_state_dict(exported)
    for p, state in zip(params, before, strict=True):
        for name, tensor in state.items():
            assert torch.equal(optimizer.state[p][name], tensor), name
            assert optimizer.state[p][name].device == tensor.device


def test_an_export_is_what_the_cpu_would_have_exported(optimizer):
    """Steps and exports on the CPU from the same start give the same bits."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, device=GPU, dtype=torch.bfloat16).cpu()) for n in ELEMENTS]
    on_cpu = FusedAdam(params, lr=1e-2, master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    for p, q in zip(params, optimizer.param_groups[0]["params"], strict=True):
        p.grad = q.grad.cpu()
    on_cpu.step()
    ours, theirs = optimizer.state_dict()["state"], on_cpu.state_dict()["state"]
    for number, state in theirs.items():
        for name, tensor in state.items():
            assert torch.equal(ours[number][name], tensor), (number, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("by_hand", [False, True], ids=["", "its state moved by hand"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("ends", [("cpu", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cpu")], ids="-".join)
def test_state_scales_and_counts_follow_a_model_to_another_device(ends, capturable, by_hand):
    """By hand, as trainers do that know no scales."""
    if capturable and "cpu" in ends:
        pytest.skip("a capturable optimizer counts on a GPU")
    first, then = map(torch.device, ends)
    values, grads = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = [torch.nn.Parameter(values.to(device, copy=True)) for device in (first, then)]
    formats = {"master_weights": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}
    moved, judge = (FusedAdam([p], lr=0.1, capturable=capturable, **formats) for p in params)
    for number in range(4):
        for p, optimizer in zip(params, (moved, judge), strict=True):
            p.grad = None
            if number == 2 and optimizer is moved:
                p.data = p.data.to(then)
                for name in ("exp_avg", "exp_avg_sq", "master_param") if by_hand else ():
                    optimizer.state[p][name] = optimizer.state[p][name].to(then)
            p.grad = grads.to(p.device)
            optimizer.step()
    assert params[0].device == then
    assert torch.equal(params[0].cpu(), params[1].cpu())
    mine, theirs = moved.state[params[0]], judge.state[params[1]]
    assert mine["step"] == 4 and mine["step"].device == theirs["step"].device
    assert {scale.device for scale in moved.backend.scales[params[0]].values()} == {then}
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        assert mine[name].device == then and torch.equal(mine[name].cpu(), theirs[name].cpu()), name
        assert torch.equal(moved.get_unscaled_state(params[0], name), judge.get_unscaled_state(params[1], name)), name
