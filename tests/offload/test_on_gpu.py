"""On a real GPU: the bits of the resident optimizer, the bound as CUDA counts it, and no host wait."""

from __future__ import annotations

import os

import pytest
import torch
from helpers.training import with_gradients
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload.gradients import staging

from .conftest import assert_same_values, make_params

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes"),
]

MiB = 1 << (16 if "STATESTREAM_FAKE_CUDA" in os.environ else 20)
"""On the runtime of tests/fake_runtime a kernel takes a thousand times as long."""
MAKERS = {
    "fused_adam_masters": lambda p: FusedAdam(p, lr=0.1, master_weights=True, exp_avg_dtype="bf16"),
    "fused_adam": lambda p: FusedAdam(p, lr=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def on_gpu(params):
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def train(optimizer, params, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).cuda()
        optimizer.step()


@pytest.mark.parametrize("chunk", [1, 60_000, 1 << 30, None])
@pytest.mark.parametrize("name", MAKERS)
def test_bits_are_those_of_the_resident_optimizer(name, chunk):
    params, reference = on_gpu(make_params("mixed")), on_gpu(make_params("mixed"))
    plain, optimizer = MAKERS[name](reference), CPUOffloadOptimizer(MAKERS[name](params), chunk)
    train(plain, reference, range(3))
    train(optimizer, params, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    train(plain, reference, range(3, 5))
    train(optimizer, params, range(3, 5))
    for p, q in zip(params, reference, strict=True):
        assert_same_values(p.cpu(), q.cpu())
        for key, value in plain.state[q].items():
            mine = optimizer.state[p][key]
            assert mine.device.type == "cpu"
            assert_same_values(mine, value.cpu(), key)


@pytest.mark.parametrize("chunk", [60_000, None])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1, "auto"])
def test_bits_of_a_step_that_the_host_shares(fraction, chunk):
    params, reference = on_gpu(make_params("mixed")), on_gpu(make_params("mixed"))
    make = MAKERS["fused_adam_masters"]
    plain, optimizer = make(reference), CPUOffloadOptimizer(make(params), chunk, cpu_fraction=fraction)
    train(plain, reference, range(8))
    train(optimizer, params, range(8))
    for p, q in zip(params, reference, strict=True):
        assert_same_values(p.cpu(), q.cpu())
        for key, value in plain.state[q].items():
            assert_same_values(optimizer.state[p][key], value.cpu(), key)


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_bits_of_micro_batches_whose_gradients_are_offloaded(fraction):
    params, reference = on_gpu(make_params("mixed")), on_gpu(make_params("mixed"))
    options = {"lr": 0.1, "master_weights": True, "exp_avg_dtype": "bf16"}
    optimizer = CPUOffloadOptimizer(FusedAdam(params, **options), 60_000, cpu_fraction=fraction, offload_gradients=True)
    plain = FusedAdam(reference, use_decoupled_grad=True, **options)
    for step in range(3):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in reference]
        for micro_batch in range(4):
            grads = [p.detach().cpu() for p in make_params("mixed", seed=10 * step + micro_batch)]
            sum((p * g.cuda()).sum().float() for p, g in zip(params, grads, strict=True)).backward()
            assert all(p.grad is None for p in params)
            for total, g in zip(sums, grads, strict=True):
                total.add_(g.cuda())
        for p, total in zip(reference, sums, strict=True):
            p.decoupled_grad = total
        plain.step()
        optimizer.step()
    for p, q in zip(params, reference, strict=True):
        assert_same_values(p.cpu(), q.cpu())


def test_state_is_pinned_and_the_step_waits_for_nothing():
    params = on_gpu(make_params(torch.bfloat16, shapes=[(MiB,)] * 8))
    optimizer = CPUOffloadOptimizer(MAKERS["fused_adam_masters"](params), 8 * MiB)
    assert optimizer.pinned_bytes == optimizer.host_state_bytes
    assert all(s["exp_avg"].is_pinned() for s in optimizer.state.values())
    train(optimizer, params, [0])
    for p in params:
        p.grad = torch.randn_like(p)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["fused_adam_masters", "fused_adam"])
def test_peak_allocated_is_the_budget(name):
    params = on_gpu(make_params(torch.bfloat16, shapes=[(16 * MiB,), *[(MiB,)] * 8]))
    budget = 12 * MiB
    optimizer = CPUOffloadOptimizer(MAKERS[name](params), budget)
    for step in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        assert 0 < torch.cuda.max_memory_allocated() - before <= budget, f"step {step}"
        assert torch.cuda.memory_allocated() == before


def test_gradients_on_their_way_keep_little_of_the_device(monkeypatch):
    """FSDP2 reduces the gradients of a group into one buffer, of which each is a view. By itself 48 MiB are held."""
    held, buffer_bytes = 4 * MiB, 2 * MiB
    monkeypatch.setattr(staging, "HELD_BYTES", held)
    before, most = 0, []

    def views_of_one_buffer():
        most.append(torch.cuda.memory_allocated() - before)
        buffer = torch.ones(buffer_bytes // 4, device="cuda")
        return buffer[:1000], buffer[2000:3000]

    params = [torch.nn.Parameter(torch.zeros(1000, device="cuda")) for _ in range(40)]
    optimizer = CPUOffloadOptimizer(FusedAdam(params), offload_gradients=True)
    loss = sum(with_gradients(views_of_one_buffer, *params[i : i + 2]) for i in range(0, 40, 2))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss.backward()
    small = 64 * 1024  # the loss, its scalars, and what torch rounds up to
    assert torch.cuda.memory_allocated() - before <= held + small
    assert held // 2 < max(most) <= held + buffer_bytes + small
    assert all(p.grad is None for p in params)
    optimizer.step()
    torch.cuda.synchronize()
    assert all((p != 0).all() for p in params)
