"""Every way FusedAdam stores state, and every dtype of gradient: streamed, saved, loaded, resumed, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import FORMS, MODES
from helpers.training import build, gradient, train
from statestream import CPUOffloadOptimizer

CHUNKS = 1, 5_000
"""A budget of 256 elements at a time, and one of a few chunks."""


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_streamed_saved_and_resumed_bit_for_bit(mode, chunk):
    plain, first = build(mode), CPUOffloadOptimizer(build(mode), chunk)
    train(plain, range(5))
    train(first, range(2))
    assert first.plan.chunks > 1
    saved = first.state_dict()
    resumed = CPUOffloadOptimizer(build(mode, seed=1), 9_000 - chunk)
    with torch.no_grad():
        for mine, theirs in zip(params_of(resumed), params_of(first), strict=True):
            mine.copy_(theirs)
    train(first, [2])  # the export of an offloaded optimizer is a snapshot, whatever the mode
    resumed.load_state_dict(saved)
    train(resumed, range(2, 5))
    assert not differences(snapshot(plain), snapshot(resumed))
    train(first, range(3, 5))
    assert not differences(snapshot(plain), snapshot(first))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_any_dtype(form, grad, decoupled):
    plain = build(form, use_decoupled_grad=decoupled)
    offloaded = CPUOffloadOptimizer(build(form, use_decoupled_grad=decoupled), 5_000)
    for step in range(3):
        for optimizer in (plain, offloaded):
            for index, param in enumerate(params_of(optimizer)):
                value = gradient(param, index, step).to(grad)
                if decoupled:
                    param.decoupled_grad = value
                else:
                    param.grad = value.to(param.dtype)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not differences(snapshot(plain), snapshot(offloaded))
