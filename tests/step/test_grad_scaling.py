"""Gradient scaling: torch.amp.GradScaler on the CPU, and a scaler handed to step() as the peer takes it."""

import copy
import math
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import BF16, FORMS, FP8, FP16, FP32, Mode
from helpers.training import build, gradient, train
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.adam.grad_scaling import unscale_gradients
from torch.amp.grad_scaler import OptState
from torch.utils._python_dispatch import TorchDispatchMode


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


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((FP32, {}), (BF16, {}), (FP16, {}), (FP32, {"capturable": True}), (BF16, {"use_decoupled_grad": True})),
        (BF16, {"use_decoupled_grad": True, "capturable": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
def test_gradients_are_left_as_torchs_adamw_leaves_them(dtype, options, scale):
    """Unscaled, whoever does it. torch's own takes FP16 ones only where it is fused."""
    a, b = param(dtype), param(dtype)
    name = "decoupled_grad" if "use_decoupled_grad" in options else "grad"
    found = []
    for optimizer, weight in ((FusedAdam([a], **options), a), (torch.optim.AdamW([b], fused=dtype is FP16), b)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        backward(scaler, weight, 0)
        if isinstance(optimizer, FusedAdam):
            grad, weight.grad = weight.grad, None
            setattr(weight, name, grad)
        scaler.step(optimizer)
        found.append(getattr(weight, name if weight is a else "grad"))
    assert same_bits(*found) and found[0].any()


def test_a_loop_that_clips_and_logs_norms_after_the_step_reads_those_of_torchs_adamw():
    a, b = param(), param()
    norms = {a: [], b: []}
    for weight, optimizer in ((a, FusedAdam([a], lr=0.1)), (b, torch.optim.AdamW([b], lr=0.1, weight_decay=0))):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for step in range(6):
            backward(scaler, weight, step, blow_up=step == 2)
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([weight], 0.5)
            scaler.step(optimizer)
            norms[weight].append(weight.grad.norm().item())
            scaler.update()
    assert norms[a] == norms[b] and norms[a][1] == pytest.approx(0.5)
    assert not math.isfinite(norms[a][2]), "a skipped step"
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
def test_the_update_divides_in_fp32_whatever_the_gradients_are_rounded_to_afterwards(dtype, capturable):
    a, b = param(dtype), param(FP32)
    with torch.no_grad():
        b.copy_(a)
    a.grad = gradient(a, 0, 0) * 1000
    scaled, plain = (FusedAdam([p], lr=0.1, master_weights=True, capturable=capturable) for p in (a, b))
    scaled.grad_scale, scaled.found_inf = torch.tensor(1000.0), torch.tensor(0.0)
    inverse = torch.tensor(1 / 1000, dtype=FP32)
    b.grad = a.grad.float() * inverse
    rounded = b.grad.to(dtype)
    scaled.step()
    plain.step()
    assert same_bits(a.grad, rounded)
    assert same_bits(scaled.state[a]["exp_avg"], plain.state[b]["exp_avg"])


def test_a_gradient_that_underflows_in_float16_has_counted_in_the_update():
    a = param(FP16)
    a.grad = torch.full_like(a, 2.0**-20)
    optimizer = FusedAdam([a], lr=0.1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**16), torch.tensor(0.0)
    optimizer.step()
    assert not a.grad.any() and optimizer.state[a]["exp_avg"].all()


@pytest.mark.parametrize("capturable", [False, True])
def test_a_skipped_step_leaves_gradients_as_torchs_fused_adamw_does(capturable):
    a, b = param(FP16), param(FP16)
    for weight, optimizer in ((a, FusedAdam([a], capturable=capturable)), (b, torch.optim.AdamW([b], fused=True))):
        backward(None, weight, 0, blow_up=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
        before = weight.grad.clone()
        optimizer.step()
        assert same_bits(weight.grad, before)


def test_gradients_of_any_layout_are_unscaled_each_once():
    weights = [param() for _ in range(6)]
    whole = torch.arange(40.0).reshape(20, 2)
    complex_ones = torch.complex(torch.zeros(20), torch.arange(20.0))
    weights[0].grad = torch.tensor(4.0).expand(20)
    weights[1].grad = whole[:, 1]
    weights[2].grad = weights[3].grad = torch.full((20,), 8.0)
    weights[4].grad = complex_ones.conj().imag
    with torch.inference_mode():
        weights[5].grad = torch.full((20,), 2.0)
    wanted = [weight.grad.clone() / 4 for weight in weights]
    optimizer = FusedAdam(weights, lr=0.1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    for weight, grad in zip(weights, wanted, strict=True):
        assert torch.equal(weight.grad, grad)
    assert torch.equal(whole[:, 1], wanted[1]), "in place"
    assert weights[2].grad is weights[3].grad


class NothingReadByTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host would wait, and no graph holds it"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaled_gradients_are_divided_without_the_host_as_a_cuda_graph_needs(found):
    a = param(BF16)
    a.grad = torch.full((20,), 8.0, dtype=BF16)
    with NothingReadByTheHost():
        unscale_gradients([a], "grad", torch.tensor(4.0), torch.tensor([found]))
    assert torch.equal(a.grad, torch.full((20,), 8.0 if found else 2.0, dtype=BF16))


# ---- who unscales ----


WHO = {
    "float32": ({}, FP32, False),
    "bfloat16": ({}, BF16, False),
    "float16, which torch's unscale_ refuses": ({}, FP16, True),
    "capturable": ({"capturable": True}, FP32, True),
    "decoupled gradients, which it does not know": ({"use_decoupled_grad": True}, FP32, True),
}


@pytest.mark.parametrize("backward_ran", [False, True], ids=["before backward", "after it"])
@pytest.mark.parametrize(("options", "dtype", "wanted"), WHO.values(), ids=WHO)
def test_gradscaler_unscales_itself_wherever_it_can(options, dtype, wanted, backward_ran):
    """So that trainers clip, and see which steps were skipped, as with torch's AdamW."""
    a = param(dtype)
    optimizer = FusedAdam([a], **options)
    if backward_ran:
        backward(None, a, 0)
    assert optimizer._step_supports_amp_scaling is wanted


def test_gradients_that_are_there_decide_and_frozen_parameters_do_not():
    half, single = param(FP16), param(FP32)
    optimizer = FusedAdam([half, single])
    backward(None, single, 0)
    assert not optimizer._step_supports_amp_scaling
    single.grad = None
    half.requires_grad_(False)
    assert not optimizer._step_supports_amp_scaling
    half.requires_grad_(True)
    backward(None, half, 0)
    assert optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("wrap", [lambda o: o, CPUOffloadOptimizer], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_what_is_assigned_stays_also_in_copies(wrap, value, copied):
    optimizer = wrap(FusedAdam([param(BF16 if value else FP16)]))
    assert optimizer._step_supports_amp_scaling is not value
    optimizer._step_supports_amp_scaling = value
    assert optimizer._step_supports_amp_scaling is value
    assert copied(optimizer)._step_supports_amp_scaling is value


def test_what_was_assigned_before_wrapping_holds_after_it():
    inner = FusedAdam([param(FP16)])
    inner._step_supports_amp_scaling = False
    assert not CPUOffloadOptimizer(inner)._step_supports_amp_scaling


@pytest.mark.parametrize("value", [False, True])
def test_either_way_a_step_is_the_same(value):
    a, b = param(BF16), param(BF16)
    for weight, assigned in ((a, value), (b, not value)):
        optimizer = FusedAdam([weight], lr=0.1, master_weights=True)
        optimizer._step_supports_amp_scaling = assigned
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            backward(scaler, weight, step)
            scaler.step(optimizer)
            scaler.update()
    assert same_bits(a, b) and same_bits(a.grad, b.grad)


# ---- the step itself ----


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


@pytest.mark.parametrize("fused", [False, True], ids=["AdamW", "fused AdamW"])
def test_hooks_run_on_a_skipped_step_where_they_do_with_torchs_adamw(fused):
    a, b = param(), param()
    ours, theirs = FusedAdam([a], lr=0.1), torch.optim.AdamW([b], lr=0.1, fused=fused)
    ours._step_supports_amp_scaling = fused
    seen = []
    for weight, optimizer in ((a, ours), (b, theirs)):
        optimizer.register_step_post_hook(lambda hooked, *_: seen.append(hooked))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        backward(scaler, weight, 0, blow_up=True)
        scaler.step(optimizer)
    assert seen == ([ours, theirs] if fused else [])


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


@pytest.mark.parametrize("found", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_an_infinity_on_any_device_skips_the_step(found):
    weight = param()
    optimizer = FusedAdam([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    per_device = {torch.device("cuda", i): torch.tensor(value) for i, value in enumerate(found)}
    scaler = SimpleNamespace(
        _per_optimizer_states={id(optimizer): {"stage": OptState.UNSCALED}},
        _found_inf_per_device=lambda _: per_device,
    )
    optimizer.step(grad_scaler=scaler)
    assert optimizer.state[weight]["step"] == (0 if any(found) else 1)
