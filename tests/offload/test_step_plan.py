"""`optimizer.plan`: what a step takes, told before the first one; and the warning where the bound cannot hold."""

from __future__ import annotations

import warnings

import pytest
import torch
from simulated_device.device import SimulatedDevice
from statestream import CPUOffloadOptimizer, FusedAdam

from .conftest import Pinning, make_params, set_grads, train
from .makers import SignDescent

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, master_weights=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")
@pytest.mark.parametrize("budget", [1, 9_000, 60_000, None])
@pytest.mark.parametrize("name", MAKERS)
def test_the_plan_says_what_the_device_then_holds(name, budget, on_device):
    params = make_params(torch.bfloat16)
    device = on_device(SimulatedDevice(0))
    pinning = Pinning()
    device.memory._pin, device.memory._unpin = pinning.pin, pinning.unpin
    optimizer = CPUOffloadOptimizer(MAKERS[name](params), budget)
    plan = optimizer.plan
    assert plan.step_chunk_bytes == budget
    assert plan.host_bytes == plan.pinned_bytes == sum(pinning.pinned.values())
    assert (plan.chunks > 1) == (budget is not None)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
        device.settle()
    assert device.peak_bytes == plan.device_bytes
    assert optimizer.plan == plan


def test_parameters_that_do_not_fit_are_named_with_both_numbers():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 100, bias=False))
    with pytest.warns(
        RuntimeWarning,
        match=r"^2 parameters need more than step_chunk_bytes=5000 by themselves, the largest 76800 bytes "
        r"\('1.weight'\); each is stepped alone",
    ) as caught:
        optimizer = CPUOffloadOptimizer(torch.optim.AdamW(model.named_parameters()), 5_000)
    assert caught[0].filename == __file__, "the warning points into the library"
    assert optimizer.plan.alone == (("'1.weight'", 6400 * 12), ("'0.weight'", 4096 * 12))
    assert optimizer.plan.device_bytes == 6400 * 12
    with pytest.warns(RuntimeWarning, match=r"3 parameters .* the largest 98304 bytes \('more'\)") as caught:
        optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(8192)))]})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [("small", torch.nn.Parameter(torch.ones(7)))]})


def test_a_fused_adam_fits_any_budget_that_holds_its_smallest_piece():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = CPUOffloadOptimizer(FusedAdam(make_params()), 5_000).plan
        smallest = CPUOffloadOptimizer(FusedAdam(make_params()), 1).plan
    assert plan.device_bytes <= 5_000 and not plan.alone
    assert smallest.device_bytes == 256 * 8 and not smallest.alone


def test_one_pass_counts_the_state_that_it_keeps():
    params = make_params()
    optimizer = CPUOffloadOptimizer(SignDescent(params), per_parameter=False)
    assert optimizer.plan.host_bytes == 0
    train(optimizer, params, [0])
    assert optimizer.plan.host_bytes == optimizer.plan.device_bytes == sum(p.numel() * 4 for p in params)
    assert optimizer.host_state_bytes == optimizer.plan.host_bytes


def test_the_warning_of_an_added_group_is_of_the_line_that_added_it():
    optimizer = CPUOffloadOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(9))], momentum=0.9), 100_000)
    with pytest.warns(RuntimeWarning, match="need more than step_chunk_bytes") as warned:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(100_000))]})
    assert [warning.filename for warning in warned] == [__file__]
