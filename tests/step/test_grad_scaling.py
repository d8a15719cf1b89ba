"""Gradient scaling: torch.amp.GradScaler on the CPU, and a scaler handed to step() as the peer takes it."""

import math
import warnings

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import BF16, FORMS, FP8, FP16, FP32, Mode
from helpers.training import build, gradient, train
from statestream import FusedAdam


def param(dtype=FP32):
    return torch.nn.Parameter(torch.randn(20, generator=torch.Generator().manual_seed(0)).to(dtype))


def backward(scaler, weight, step, blow_up=False):
    """Leaves the gradient `gradient(weight, 0, step)`, scaled."""
    weight.grad = None
    target = gradient(weight, 0, step)
    if blow_up:
        target = target.clone()
        target[3] = math.inf
    loss = (weight * target).sum()
    (scaler.scale(loss) if scaler else loss).backward()


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("moments", [FP32, FP16, FP8], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_scaled_steps_are_bit_equal_to_plain_ones(dtype, moments, capturable):
    """A power of two scales without rounding, so nothing may differ."""
    a, b = param(dtype), param(dtype)
    arguments = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, "master_weights": True}
    scaled, plain = (FusedAdam([p], lr=0.1, capturable=capturable, **arguments) for p in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        backward(scaler, a, step)
        scaler.step(scaled)
        scaler.update()
        backward(None, b, step)
        plain.step()
    assert differences(snapshot(scaled), snapshot(plain)) == []
    assert not hasattr(scaled, "grad_scale") and not hasattr(scaled, "found_inf")


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    ("dtype", "moments"), [(FP32, FP32), (FP16, FP32), (FP16, FP8)], ids=["fp32", "fp16", "fp16 and fp8"]
)
def test_a_step_skipped_for_an_infinite_gradient_counts_nothing(dtype, moments, capturable):
    a, b = param(dtype), param(dtype)
    arguments = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    scaled, plain = (FusedAdam([p], lr=0.1, capturable=capturable, **arguments) for p in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        before = snapshot(scaled)
        backward(scaler, a, step, blow_up=step in (0, 3))
        scaler.step(scaled)
        scaler.update()
        if step in (0, 3):
            scaled_now = snapshot(scaled)
            assert same_bits(a, before["group 0 param 0"])
            assert float(scaled_now["group 0 step"]) == float(before["group 0 step"])
        else:
            backward(None, b, step)
            plain.step()
    assert scaler.get_scale() == 2.0**8
    assert scaled.state[a]["step"].item() == 4 and float(scaled.param_groups[0]["step"]) == 4
    assert differences(snapshot(scaled), snapshot(plain)) == []


@pytest.mark.parametrize("capturable", [False, True])
def test_a_skipped_first_step_leaves_a_fresh_optimizer(capturable):
    weight = param(BF16)
    optimizer = FusedAdam([weight], lr=0.1, master_weights=True, capturable=capturable)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    state = optimizer.state[weight]
    assert same_bits(weight, before) and same_bits(state["master_param"], before.float())
    assert state["step"].item() == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


@pytest.mark.parametrize("legacy", [False, True], ids=["scaler.step", "step(grad_scaler=)"])
def test_unscale_then_clip_divides_once(legacy):
    a, b = param(), param()
    scaled, plain = FusedAdam([a], lr=0.1), FusedAdam([b], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(3):
        backward(scaler, a, step)
        scaler.unscale_(scaled)
        norm = torch.nn.utils.clip_grad_norm_([a], 0.5)
        if legacy:
            scaled.step(grad_scaler=scaler)
        else:
            scaler.step(scaled)
        scaler.update()
        backward(None, b, step)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_([b], 0.5)) and norm > 0.5
        plain.step()
    assert differences(snapshot(scaled), snapshot(plain)) == []


@pytest.mark.parametrize("legacy", [False, True], ids=["scaler.step", "step(grad_scaler=)"])
def test_an_infinite_gradient_is_found_after_unscale(legacy):
    a = param()
    optimizer = FusedAdam([a], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    backward(scaler, a, 0, blow_up=True)
    before = a.detach().clone()
    scaler.unscale_(optimizer)
    if legacy:
        optimizer.step(grad_scaler=scaler)
    else:
        scaler.step(optimizer)
    scaler.update()
    assert same_bits(a, before) and optimizer.param_groups[0]["step"] == 0 and scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("capturable", [False, True])
def test_a_scaler_handed_to_step_unscales_and_skips(capturable):
    a, b = param(), param()
    scaled, plain = (FusedAdam([p], lr=0.1, capturable=capturable) for p in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        backward(scaler, a, step, blow_up=step == 1)
        scaled.step(grad_scaler=scaler)
        scaler.update()
        if step != 1:
            backward(None, b, step)
            plain.step()
    assert differences(snapshot(scaled), snapshot(plain)) == []
    assert scaler.get_scale() == 2.0**9


def test_gradients_are_left_scaled_as_a_fused_optimizer_leaves_them():
    a = param()
    optimizer = FusedAdam([a], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    backward(scaler, a, 0)
    grad = a.grad.clone()
    scaler.step(optimizer)
    assert same_bits(a.grad, grad)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_divisor_is_taken_in_every_form(form):
    plain, scaled = build(form), build(form)
    train(plain, range(2))
    for step in range(2):
        for index, weight in enumerate(p for group in scaled.param_groups for p in group["params"]):
            weight.grad = gradient(weight, index, step) * 2.0**6
        scaled.grad_scale, scaled.found_inf = torch.tensor(2.0**6), torch.tensor(0.0)
        scaled.step()
    assert differences(snapshot(plain), snapshot(scaled)) == []


@pytest.mark.parametrize("found", [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(2.0), 1.0, True], ids=repr)
def test_any_form_of_found_inf_skips(found):
    a = param()
    a.grad = torch.ones(20)
    optimizer = FusedAdam([a], lr=0.1)
    optimizer.found_inf = found
    before = a.detach().clone()
    optimizer.step()
    assert same_bits(a, before)
    optimizer.found_inf = type(found)(0.0) if not isinstance(found, torch.Tensor) else torch.zeros_like(found)
    optimizer.step()
    assert not torch.equal(a, before)


def test_hooks_run_on_a_skipped_step_and_schedulers_go_on():
    a = param()
    optimizer = FusedAdam([a], lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward(scaler, a, 0, blow_up=True)
    scaler.step(optimizer)
    assert seen == [1]


def test_masters_written_meanwhile_are_still_followed_after_a_skipped_step():
    mode = Mode(BF16, master="fp32")
    weight = param(BF16)
    optimizer = FusedAdam([weight], lr=0.1, **mode.arguments)
    train(optimizer, range(1))
    with torch.no_grad():
        weight.fill_(3.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf
    before = torch.full((20,), 3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master_param"], before)
