"""Muon's state as one of eight ranks with GPUs would see it, on fake CUDA tensors: where it is, and what a step takes.

A tensor left on the wrong device is an error there, as on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from offload.test_fake_cuda import FakeCuda, sharded
from statestream import CPUOffloadOptimizer

from benchmarks.simulated.fake_cuda import fake_cuda_world
from benchmarks.simulated.live_bytes import LiveBytes

from .cases import STAND_INS

BUDGET = 13 << 20


def build(layout, mesh):
    matrices = [sharded(mesh, (4096, 256)) for _ in range(2 * 8 + 1)]
    if layout == "torch":
        return matrices, torch.optim.Muon(matrices)
    rest = [sharded(mesh, (512,)) for _ in range(3)]
    return matrices + rest, STAND_INS[layout]([{"params": matrices}, {"params": rest, "algorithm": "adamw"}], mesh)


def step_bytes(params, optimizer):
    """The most bytes that a step took, and those that it left, beyond what was there."""
    with LiveBytes() as live:
        live.count(params, [p.grad for p in params], [g["lr"] for g in optimizer.param_groups])
        live.count(list(optimizer.state.values()))
        live.mark()
        optimizer.step()
        return live.extra, live.kept


@pytest.mark.parametrize("layout", [*STAND_INS, "torch"])
def test_a_step_takes_the_ring_beside_what_the_optimizer_takes_itself_and_leaves_nothing(layout, on_device):
    with fake_cuda_world((8,)) as mesh, torch.no_grad():
        on_device(FakeCuda())
        params, plain = build(layout, mesh)
        plain.step()
        own, _ = step_bytes(params, plain)
        params, inner = build(layout, mesh)
        optimizer = CPUOffloadOptimizer(inner, BUDGET)
        plan = optimizer.strategy.store.plan
        assert len(plan.chunks) > 2 and plan.ring_bytes <= BUDGET
        for _ in range(2):
            extra, kept = step_bytes(params, optimizer)
            assert kept == 0, "state is left on the device between steps"
            assert plan.ring_bytes <= extra <= plan.ring_bytes + own
        tensors = [value for state in inner.state.values() for value in state.values()]
        assert all(inner.state[p] for p in params) and all(value.device.type == "cpu" for value in tensors)
        assert ("step_dev" in inner.state[params[-1]]) == (layout == "megabatched")
