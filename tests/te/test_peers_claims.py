"""What Transformer Engine's own tests ask of its FusedAdam, asked of this one, on the CPU: beside torch.optim.Adam, to
the tolerances that the peer keeps.

Left out are FusedSGD, which is not here, and a tensor of 2.4e9 elements. The peer's FP8 weights need its GPU kernels: a
class with the two methods that an optimizer uses stands in for them here, and `test_real_engine.py` has the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.modes import BF16, FP8, FP16, FP32
from helpers.quantized import Float8, quantized_parameter
from statestream import FusedAdam
from torch import nn

STEPS = 7
SHAPES = ((192, 64), (192,), (64, 64), (64,), (1,))
LIKE_TORCH = torch.testing.assert_close


def values(shapes=SHAPES, seed: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) for shape in shapes)


def pair(shapes, **options):
    """Parameters of ours and torch's with equal values, and the optimizers."""
    options = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False} | options
    ours, theirs = ([nn.Parameter(v) for v in values(shapes)] for _ in range(2))
    return ours, theirs, FusedAdam(ours, **options), torch.optim.Adam(theirs, **options)


def feed(step: int, *lists) -> None:
    """Equal gradients from 0 to 1 for the parameters of each list."""
    for params in lists:
        for param, grad in zip(params, values([p.shape for p in params], 100 + step), strict=True):
            param.grad = grad.to(param.dtype)


# ---- beside torch.optim.Adam ----


@pytest.mark.parametrize("options", [{}, {"lr": 0.01, "betas": (0.6, 0.9), "eps": 3e-6}], ids=["defaults", "others"])
@pytest.mark.parametrize("shapes", [((278_011,),), SHAPES, ((1,),)], ids=["one large", "several", "one element"])
def test_float32_steps_are_those_of_torchs_adam(shapes, options):
    ours, theirs, optimizer, judge = pair(shapes, **options)
    for step in range(STEPS):
        feed(step, ours, theirs)
        optimizer.step()
        judge.step()
        LIKE_TORCH(ours, theirs)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_small_weights_without_masters_are_stepped(dtype):
    weights = [nn.Parameter(v.to(dtype)) for v in values()]
    judged = [nn.Parameter(w.detach().float()) for w in weights]
    optimizer, judge = FusedAdam(weights, lr=5e-4), torch.optim.Adam(judged, lr=5e-4)
    feed(0, weights)
    for weight, like in zip(weights, judged, strict=True):
        like.grad = weight.grad.float()
    optimizer.step()
    judge.step()
    for weight, like in zip(weights, judged, strict=True):
        LIKE_TORCH(weight.float(), like, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_an_empty_group_that_is_added_disturbs_nothing():
    """As pipeline-parallel ranks have that hold no prompt."""
    ours, theirs, optimizer, judge = pair(((1,),))
    optimizer.add_param_group({"params": []})
    for step in range(STEPS):
        feed(step, ours, theirs)
        optimizer.step()
        judge.step()
        LIKE_TORCH(ours, theirs)


@pytest.mark.parametrize("capturable", [False, True])
def test_an_empty_group_counts_steps_as_a_full_one_does_and_its_count_is_saved(capturable):
    """It may be full on another rank, and a count that stays behind gives a resumed run another bias correction."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}], capturable=capturable)
    for step in range(3):
        feed(step, [weight])
        optimizer.step()
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3]
    assert [int(group["step"]) for group in optimizer.state_dict()["param_groups"]] == [3, 3]


def test_a_parameter_without_elements_at_the_end_of_a_group_is_no_obstacle():
    ours, theirs, optimizer, judge = pair(((4,), (0,)))
    feed(0, ours, theirs)
    optimizer.step()
    judge.step()
    LIKE_TORCH(ours, theirs)


# ---- precisions ----

MASTERS = {"master_weights": True}
PRECISIONS = {
    "float32, no masters": (FP32, FP32, {}, 1.3e-6, 1e-5),
    "FP32 masters": (BF16, FP32, MASTERS, 1.3e-6, 1e-5),
    "remainders": (BF16, FP32, MASTERS | {"store_param_remainders": True}, 1.3e-6, 1e-5),
    "FP16 masters": (BF16, FP32, MASTERS | {"master_weight_dtype": FP16}, 2e-3, 2e-3),
    "bfloat16 gradients": (BF16, BF16, MASTERS, 2e-3, 2e-3),
    "FP16 exp_avg": (BF16, FP32, MASTERS | {"exp_avg_dtype": FP16}, 2e-3, 2e-3),
    "BF16 exp_avg": (BF16, FP32, MASTERS | {"exp_avg_dtype": BF16}, 2e-3, 2e-3),
    "FP8 exp_avg": (BF16, FP32, MASTERS | {"exp_avg_dtype": FP8}, 1e-2, 1e-2),
    "FP16 exp_avg_sq": (BF16, FP32, MASTERS | {"exp_avg_sq_dtype": FP16}, 2e-3, 2e-3),
    "BF16 exp_avg_sq": (BF16, FP32, MASTERS | {"exp_avg_sq_dtype": BF16}, 2e-3, 2e-3),
    "BF16 moments": (BF16, FP32, MASTERS | {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, 2e-3, 2e-3),
    "FP8 exp_avg_sq": (BF16, FP32, MASTERS | {"exp_avg_sq_dtype": FP8}, None, None),
}
"""Dtypes of weights and gradients, arguments, and the tolerances (relative and absolute) that the peer asks of masters.
Of an FP8 exp_avg_sq it asks that it runs."""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_precision_follows_an_fp32_adam_over_a_save_and_a_load(precision):
    """Steps as long as the weights are large, and moments that forget at once: what is stored has to be right."""
    dtype, grad_dtype, arguments, rtol, atol = PRECISIONS[precision]
    options = {"lr": 1, "betas": (0.1, 0.25), "eps": 1e-8, "weight_decay": 0}
    weights = [nn.Parameter(v.to(dtype)) for v in values()]
    judged = [w.detach().float().clone() for w in weights]
    judge = torch.optim.Adam(judged, **options)

    def build() -> FusedAdam:
        return FusedAdam(weights, use_decoupled_grad=True, **options, **arguments)

    optimizer = build()
    for step in range(2 * STEPS):
        if step == STEPS:
            saved = optimizer.state_dict()
            optimizer = build()
            optimizer.load_state_dict(saved)
        feed(step, judged)
        for weight, like in zip(weights, judged, strict=True):
            weight.decoupled_grad = like.grad.to(grad_dtype)
        judge.step()
        optimizer.step()
        if rtol is None:
            assert all(weight.isfinite().all() for weight in weights)
            continue
        if dtype is BF16 and "store_param_remainders" not in arguments:
            masters = [optimizer.get_unscaled_state(weight, "master_param") for weight in weights]
            LIKE_TORCH(masters, judged, rtol=rtol, atol=atol)
        for weight, like in zip(weights, judged, strict=True):
            LIKE_TORCH(weight.detach(), like.to(dtype), rtol=max(rtol, 1.6e-2 if dtype is BF16 else 0), atol=atol)


@pytest.mark.parametrize("quantised", [False, True], ids=["bfloat16", "FP8"])
def test_masters_are_an_fp32_adams_weights_and_weights_are_rounded_from_them(quantised):
    weights = [quantized_parameter(v) if quantised else nn.Parameter(v.to(BF16)) for v in values()]
    judged = [w.detach().dequantize(dtype=FP32) if quantised else w.detach().float() for w in weights]
    options = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
    optimizer = FusedAdam(weights, master_weights=True, use_decoupled_grad=True, **options)
    judge = torch.optim.Adam(judged, **options)
    for step in range(STEPS):
        feed(step, judged)
        for weight, like in zip(weights, judged, strict=True):
            weight.decoupled_grad = like.grad.clone()
        judge.step()
        optimizer.step()
        LIKE_TORCH([optimizer.get_unscaled_state(weight, "master_param") for weight in weights], judged)
        for weight, like in zip(weights, judged, strict=True):
            tolerance = 0.07 if quantised else 4e-3  # E4M3 holds 4 bits, and the last one is rounded
            LIKE_TORCH(weight.detach().float(), like, rtol=tolerance, atol=tolerance)
    assert all(isinstance(weight, Float8) is quantised for weight in weights)


def test_a_quantised_layer_learns_and_stays_quantised():
    weight, bias = quantized_parameter(next(values(((64, 64),))) - 0.5), nn.Parameter(torch.zeros(64, dtype=BF16))
    optimizer = FusedAdam([weight, bias], lr=1e-3, master_weights=True)
    inputs, target = (v.to(BF16) for v in values(((4, 32, 64), (4, 32, 64)), seed=1))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(nn.functional.linear(inputs, weight, bias), target)
        losses.append(loss.item())
        loss.backward()
        for param in (weight, bias):
            assert param.grad.shape == param.shape and param.grad.isfinite().all() and param.grad.any()
        optimizer.step()
    assert losses[-1] < losses[0] and isinstance(weight, Float8)
    for param in (weight, bias):
        assert {optimizer.state[param][name].dtype for name in ("exp_avg", "exp_avg_sq", "master_param")} == {FP32}


# ---- a loop with and without a scaler ----


def network() -> nn.Sequential:
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(256, 84), nn.ReLU(), nn.Linear(84, 10), nn.ReLU())


LOOPS = {
    "no scaler": (False, {}, False),
    "scaler": (True, {}, False),
    "scaler, capturable": (True, {"capturable": True}, False),
    "scaler, capturable, FP16 convolutions with masters": (True, {"capturable": True, "master_weights": True}, True),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_and_gradients_of_a_loop_are_those_of_torchs_adam_after_every_step(loop):
    """Gradients are compared after `scaler.step()`: unscaled. Then the weights are set to torch's."""
    scaled, arguments, half = LOOPS[loop]
    ours, theirs = network(), network()
    if half:
        for module in ours:
            if isinstance(module, nn.Conv2d):
                module.half()
    optimizer = FusedAdam(ours.parameters(), lr=1e-5, **arguments)
    runs = (ours, optimizer), (theirs, torch.optim.Adam(theirs.parameters(), lr=1e-5))
    scalers = [torch.amp.GradScaler("cpu", enabled=scaled) for _ in runs]
    for step in range(10):
        inputs, target = values(((8, 1, 28, 28), (8, 10)), seed=step)
        inputs = inputs.to(memory_format=torch.channels_last)
        for (model, each), scaler in zip(runs, scalers, strict=True):
            each.zero_grad()
            with torch.autocast("cpu", FP16, enabled=scaled):
                loss = (target - model(inputs)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(each)
            scaler.update()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            LIKE_TORCH(a.float(), b, rtol=1e-3, atol=1e-3)
            LIKE_TORCH(a.grad.float(), b.grad, rtol=1e-3, atol=1e-3)
            assert b.grad.abs().max() < 10, "unscaled"
        ours.load_state_dict(theirs.state_dict())
    assert len({scaler.get_scale() for scaler in scalers}) == 1
