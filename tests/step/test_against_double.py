"""Every step of every form against Adam in float64, and long runs beside torch.optim."""

import math

import pytest
import torch
from helpers.modes import FORMS, Mode
from helpers.stored import decoded, scale_of_each, storage_error
from helpers.training import gradient, make_params, train
from statestream import FusedAdam

from step.adam_in_double import Settings, one_update

FP32, BF16 = torch.float32, torch.bfloat16

VARIANTS = {
    "AdamW": Settings(weight_decay=0.1),
    "AdamW without decay": Settings(),
    "Adam": Settings(adam_w_mode=False),
    "Adam with L2": Settings(adam_w_mode=False, weight_decay=0.1),
    "maximize": Settings(weight_decay=0.1, maximize=True),
    "maximize with L2": Settings(weight_decay=0.1, adam_w_mode=False, maximize=True),
    "no bias correction": Settings(weight_decay=0.1, bias_correction=False),
    "no momentum": Settings(betas=(0.0, 0.9)),
    "quick betas, large eps": Settings(betas=(0.5, 0.9), eps=1e-2),
    "lr of zero": Settings(lr=0.0, weight_decay=0.1),
}


def build(form, settings, params):
    return FusedAdam(
        params,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        adam_w_mode=settings.adam_w_mode,
        bias_correction=settings.bias_correction,
        maximize=settings.maximize,
        **form.arguments,
    )


def joined(weight, low):
    """A BF16 weight and its remainder as FP32: the master whose upper half, rounded half up, is the weight."""
    whole = weight.view(torch.int16).to(torch.int64) * 65536 + low.to(torch.int64)  # low is signed: half up
    return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32).view(FP32)


def weight_in_use(optimizer, param):
    """What an update starts from and leaves, at full precision."""
    state = optimizer.state[param]
    master = state.get("master_param")
    if master is None:
        return param.detach().clone()
    if master.dtype is torch.int16:
        return joined(param.detach(), master)
    return decoded(optimizer, param, "master_param")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_step_is_adams_from_the_state_as_stored(form, variant):
    settings = VARIANTS[variant]
    params = make_params(form)
    optimizer = build(form, settings, params)
    for t in range(1, 6):
        judged, old_moments = [], []
        for index, param in enumerate(params):
            param.grad = gradient(param, index, t)
            moments = [decoded(optimizer, param, name) for name in ("exp_avg", "exp_avg_sq")]
            judged.append(one_update(weight_in_use(optimizer, param), param.grad, *moments, t, settings))
            old_moments.append(moments[0])
        optimizer.step()
        for param, expected, old in zip(params, judged, old_moments, strict=True):
            state = optimizer.state[param]
            for name in ("exp_avg", "exp_avg_sq"):
                value, error = getattr(expected, name), getattr(expected, f"{name}_error")
                how = {"scale": scale_of_each(optimizer, param, name), "root": name == "exp_avg_sq"}
                rounding = storage_error(value, state[name].dtype, **how, by_random_bits=form.by_random_bits(name))
                found = decoded(optimizer, param, name)
                assert torch.all((found.double() - value).abs() <= error + rounding), (name, t)
                assert torch.all((found > 0) | (value == 0)) or name == "exp_avg", t
            weight, has_master = weight_in_use(optimizer, param), "master_param" in state
            kept = state["master_param"].dtype if has_master else param.dtype
            rounding = storage_error(
                expected.weight,
                FP32 if kept is torch.int16 else kept,
                scale=scale_of_each(optimizer, param, "master_param") if has_master else None,
                by_random_bits=param.dtype is BF16 and form.by_random_bits("param"),
            )
            assert torch.all((weight.double() - expected.weight).abs() <= expected.weight_error + rounding), t
            if has_master:  # the weight that the model sees is the master's
                error = storage_error(weight, param.dtype)
                assert torch.all((param.double() - weight.double()).abs() <= error), t
            if param.numel() > 1:
                assert not torch.equal(old, decoded(optimizer, param, "exp_avg")), "the moments stood still"


@pytest.mark.parametrize("wrong", ["sign", "no decay", "L2 for decoupled", "step off by one", "eps inside", "beta2"])
def test_control_the_judge_rejects_other_rules(wrong):
    """Each stays inside no bound: the reference is sharp enough to tell these apart."""
    torch.manual_seed(0)
    right = Settings(weight_decay=0.1, eps=1e-3)
    param = torch.nn.Parameter(torch.randn(200))
    optimizer = build(Mode(FP32), right, [param])
    train(optimizer, range(2))
    state = optimizer.state[param]
    param.grad = gradient(param, 0, 9)
    before = (param.detach().clone(), param.grad.clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone())
    optimizer.step()
    t = 3
    other = right
    if wrong == "sign":
        other = Settings(weight_decay=0.1, eps=1e-3, maximize=True)
    elif wrong == "no decay":
        other = Settings(weight_decay=0.0, eps=1e-3)
    elif wrong == "L2 for decoupled":
        other = Settings(weight_decay=0.1, eps=1e-3, adam_w_mode=False)
    elif wrong == "step off by one":
        t = 4
    elif wrong == "eps inside":
        other = Settings(weight_decay=0.1, eps=1e-3 * math.sqrt(1 - 0.999**t))
    elif wrong == "beta2":
        other = Settings(weight_decay=0.1, eps=1e-3, betas=(0.9, 0.9991))
    expected = one_update(*before, t, other)
    assert not torch.all((param.double() - expected.weight).abs() <= expected.weight_error)


def test_a_second_beta_of_zero_gives_steps_of_lr():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=1e-3, betas=(0.0, 0.0))
    for grad in (1.0, 1e-5):
        before = param.detach().clone()
        param.grad = torch.full((4,), grad)
        optimizer.step()
        assert (before - param).abs().max() <= 1.01e-3  # m / (sqrt(v) + eps) is 1 here


# ---- beside torch.optim over many steps ----


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(
    "options", [{"weight_decay": w, "maximize": x} for w in (0.0, 0.1) for x in (False, True)], ids=str
)
@pytest.mark.parametrize("master", [None, "fp32", "remainders"])
def test_a_long_run_stays_with_torchs(cls, options, master):
    """FP32 weights, or BF16 with masters against an FP32 run of torch's with the same gradients."""
    mode = Mode(FP32 if master is None else BF16, master=master)
    params = make_params(mode)
    copies = [torch.nn.Parameter(param.detach().float().clone()) for param in params]
    optimizer = FusedAdam(params, lr=1e-3, adam_w_mode=cls is torch.optim.AdamW, **options, **mode.arguments)
    reference = cls(copies, lr=1e-3, **options)
    for step in range(100):
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            param.grad = gradient(param, index, step)
            copy.grad = param.grad.float()
        optimizer.step()
        reference.step()
    for param, copy in zip(params, copies, strict=True):
        torch.testing.assert_close(weight_in_use(optimizer, param), copy.detach(), rtol=1e-4, atol=2e-6)
        assert optimizer.state[param]["step"].item() == reference.state[copy]["step"].item() == 100
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[param][name], reference.state[copy][name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("exp_avg, exp_avg_sq", [(BF16, FP32), (FP32, BF16), (BF16, BF16)], ids=str)
def test_bfloat16_moments_follow_torchs_within_their_precision(exp_avg, exp_avg_sq):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(500))
    copy = torch.nn.Parameter(param.detach().clone())
    optimizer = FusedAdam([param], lr=1e-3, betas=(0.9, 0.95), exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    reference = torch.optim.AdamW([copy], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(50):
        param.grad = gradient(param, 0, step)
        copy.grad = param.grad.clone()
        optimizer.step()
        reference.step()
    moved = 50 * 1e-3
    assert (param - copy).abs().max() < 0.05 * moved
    assert (param - copy).abs().max() > 0, "the moments were not BF16"
    # Rounding errors of 2^-9 each fade with beta1, beta2: relative to the size that the moment has had.
    scale = reference.state[copy]["exp_avg"].abs().max()
    assert (optimizer.state[param]["exp_avg"].float() - reference.state[copy]["exp_avg"]).abs().max() < 0.01 * scale
    v, w = optimizer.state[param]["exp_avg_sq"].float(), reference.state[copy]["exp_avg_sq"]
    assert ((v - w).abs() / w).max() < 0.05
