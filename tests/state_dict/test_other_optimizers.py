"""State dicts of torch.optim.AdamW, torch.optim.Adam and Transformer Engine's FusedAdam, and ours in torch's."""

import copy

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.engine import engine_dict
from helpers.modes import Mode
from helpers.training import build, gradient, make_params, train
from statestream import FusedAdam

FP32, BF16 = torch.float32, torch.bfloat16
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def torch_run(cls, steps, **arguments):
    params = make_params(Mode(FP32))
    optimizer = cls(params, **SETTINGS, **arguments)
    train(optimizer, range(steps))
    return params, optimizer


def ours(params, mode=Mode(FP32), **arguments):  # noqa: B008
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    return copies, FusedAdam(copies, **mode.arguments, **arguments)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_torchs_dict_goes_on_here_with_its_settings(cls, options):
    params, reference = torch_run(cls, 3, **options)
    copies, optimizer = ours(params, adam_w_mode=cls is torch.optim.AdamW)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in SETTINGS} == SETTINGS
    assert group["maximize"] is options.get("maximize", False)
    for a, b in zip(params, copies, strict=True):
        assert optimizer.state[b]["step"].item() == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(reference.state[a][name], optimizer.state[b][name])
    train(reference, range(3, 6))
    train(optimizer, range(3, 6))
    for a, b in zip(params, copies, strict=True):
        assert optimizer.state[b]["step"].item() == 6
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def test_group_keys_that_a_foreign_dict_lacks_keep_their_defaults_and_new_ones_are_kept():
    params, reference = torch_run(torch.optim.AdamW, 2)
    saved = copy.deepcopy(reference.state_dict())
    for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "eps"):
        del saved["param_groups"][0][key]
    saved["param_groups"][0]["layer_scale"] = {"of": "mine"}
    _, optimizer = ours(params, eps=3e-7)
    keys = set(optimizer.param_groups[0])
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert set(group) == keys | {"layer_scale"}
    assert group["eps"] == 3e-7 and group["lr"] == 1e-2 and group["bias_correction"] is True
    assert group["layer_scale"] == {"of": "mine"}
    saved["param_groups"][0]["layer_scale"]["of"] = "another"
    assert optimizer.state_dict()["param_groups"][0]["layer_scale"] == {"of": "mine"}
    train(optimizer, range(2))


def test_how_this_optimizer_runs_is_not_taken_from_a_checkpoint():
    params, reference = torch_run(torch.optim.Adam, 1, foreach=True)
    saved = copy.deepcopy(reference.state_dict())
    saved["param_groups"][0]["capturable"] = True
    _, optimizer = ours(params, adam_w_mode=True)
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["decoupled_weight_decay"], group["capturable"], group["foreach"]) == (True, False, None)
    assert isinstance(group["lr"], float) and isinstance(group["step"], int)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("master", [None, "fp32", "remainders"])
@pytest.mark.parametrize("offload", [False, True])
def test_our_dict_goes_on_in_torchs_adamw(dtype, master, offload):
    mode = Mode(dtype, FP32, FP32, master if dtype is BF16 else None, offload)
    optimizer = build(mode)
    train(optimizer, range(3))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    reference = torch.optim.AdamW([{"params": copies[:3]}, {"params": copies[3:]}])
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in reference.param_groups] == [1e-2, 3e-3]
    assert [group["betas"] for group in reference.param_groups] == [(0.9, 0.999), (0.8, 0.99)]
    assert all(reference.state[copies[i]]["step"].item() == 3 for i in range(len(copies)))
    train(optimizer, range(3, 5))
    train(reference, range(3, 5))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is FP32 else {"rtol": 0.02, "atol": 0.02}
    for a, b in zip(params, copies, strict=True):
        torch.testing.assert_close(b, a, **tolerance)


def test_a_round_trip_through_torchs_adamw_keeps_every_bit():
    optimizer = build(Mode(FP32))
    train(optimizer, range(3))
    before = snapshot(optimizer)
    reference = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = build(Mode(FP32))
    back.load_state_dict(copy.deepcopy(reference.state_dict()))
    params = tuple(str(i) for i in range(7))
    assert differences(before, snapshot(back), ignoring=params) == []


def test_a_parameter_that_torch_never_stepped_starts_anew():
    params = make_params(Mode(FP32))
    reference = torch.optim.AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    reference.step()
    copies, optimizer = ours(params)
    train(optimizer, range(4))  # state that must not survive
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert [optimizer.state[param]["step"].item() for param in copies] == [1.0] + [0.0] * 6
    assert all(not optimizer.state[param]["exp_avg"].any() for param in copies[1:])


# ---- Transformer Engine's form: a step a group, none a parameter; master_param of float32 parameters too ----


@pytest.mark.parametrize("step", [3, torch.tensor(3, dtype=torch.int32), torch.tensor([3])], ids=str)
@pytest.mark.parametrize("mode", [Mode(FP32), Mode(BF16, BF16, FP32, "fp32"), Mode(None, BF16, BF16, "fp32")], ids=str)
def test_transformer_engines_dict_goes_on_bit_equal(mode, step):
    whole, part = build(mode), build(mode)
    train(whole, range(6))
    train(part, range(3))
    params = [param for group in part.param_groups for param in group["params"]]
    new = build(mode, seed=9)
    with torch.no_grad():
        for target, source in zip((p for g in new.param_groups for p in g["params"]), params, strict=True):
            target.copy_(source)
    new.load_state_dict(engine_dict(part.state_dict(), params, step))
    assert [group["step"] for group in new.param_groups] == [3, 3]
    assert all(type(group["step"]) is int for group in new.param_groups)
    train(new, range(3, 6))
    assert differences(snapshot(whole), snapshot(new)) == []


def test_transformer_engines_remainders_are_read():
    mode = Mode(BF16, FP32, FP32, "remainders")
    part, new = build(mode), build(mode)
    train(part, range(3))
    params = [param for group in part.param_groups for param in group["params"]]
    new.load_state_dict(engine_dict(part.state_dict(), params, 3))
    for a, b in zip(params, (p for g in new.param_groups for p in g["params"]), strict=True):
        assert same_bits(part.state[a]["master_param"], new.state[b]["master_param"])


def test_a_dict_of_masters_is_read_where_none_are_kept():
    part = build(Mode(BF16, FP32, FP32, "fp32"))
    train(part, range(2))
    new = build(Mode(BF16))
    new.load_state_dict(copy.deepcopy(part.state_dict()))
    assert all("master_param" not in state for state in new.state.values())
    train(new, range(2, 3))


@pytest.mark.parametrize("master", ["fp32", "remainders"])
def test_a_master_that_the_dict_lacks_starts_at_the_weight_in_place(master):
    params = [param.detach().to(BF16).requires_grad_() for param in make_params(Mode(FP32))]
    reference = torch.optim.AdamW(params, **SETTINGS)
    train(reference, range(2))
    copies, optimizer = ours(params, Mode(BF16, BF16, BF16, master))
    train(optimizer, range(3))
    addresses = [optimizer.state[param]["master_param"].data_ptr() for param in copies]
    with torch.no_grad():
        for a, b in zip(params, copies, strict=True):
            b.copy_(a)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert addresses == [optimizer.state[param]["master_param"].data_ptr() for param in copies]
    for param in copies:
        held = optimizer.state[param]["master_param"]
        assert not held.any() if master == "remainders" else same_bits(held, param.detach().float())


def test_gradients_here_and_there_are_the_same():
    # The runner gives an optimizer of torch's and ours the same gradients, or the comparisons above say nothing.
    a, b = make_params(Mode(FP32))[0], make_params(Mode(FP32))[0]
    assert same_bits(gradient(a, 0, 5), gradient(b, 0, 5)) and not same_bits(gradient(a, 0, 5), gradient(a, 0, 6))
