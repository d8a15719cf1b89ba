"""Asking for a checkpoint, or loading one, changes nothing that was not asked for."""

import copy

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.models import Net, grouped, train_model
from helpers.modes import FORMS, Mode
from statestream import FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

BF16, FP32 = torch.bfloat16, torch.float32
TRAINED = ("embed.weight", "first.weight", "first.bias", "norm.weight", "norm.bias", "unused.weight", "scale")

either_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
every_form = pytest.mark.parametrize("form", [form for form in FORMS if form.param is not None], ids=str)


def build(form, seed=0, **arguments):
    torch.manual_seed(seed)
    model = Net(form.param)
    return model, FusedAdam(grouped(model), **form.arguments, **arguments)


@pytest.mark.parametrize("live_grads", [False, True])
@either_form
@every_form
def test_getting_the_state_of_a_fresh_optimizer_changes_nothing(form, flat, live_grads):
    model, optimizer = build(form)
    if live_grads:
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
    weights = copy.deepcopy(model.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert all(same_bits(value, weights[name]) for name, value in model.state_dict().items())
    assert [group["step"] for group in optimizer.param_groups] == [0, 0, 0]
    names = {"step", *form.stored(torch.empty(0, dtype=form.param))}
    if flat:
        found = {name for name in state if name.startswith("state.")}
        assert found == {f"state.{param}.{name}" for param in TRAINED for name in names}
        groups = {name for name in state if not name.startswith("state.")}
        keys = set(optimizer.param_groups[0]) - {"params"}
        everyone = (*TRAINED, "frozen.weight", "frozen.bias")
        assert groups == {f"param_groups.{param}.{key}" for param in everyone for key in keys}
        values = {name: value for name, value in state.items() if name in found}
    else:
        assert {name: set(held) for name, held in state["state"].items()} == dict.fromkeys(TRAINED, names)
        values = {f"{p}.{name}": v for p, held in state["state"].items() for name, v in held.items()}
    for name, value in values.items():
        if name.endswith("master_param") and value.dtype is torch.float32:
            param = model.get_parameter(name.removeprefix("state.").removesuffix(".master_param"))
            assert same_bits(value, param.detach().float())  # in blocks of these sizes FP16 holds a weight's every bit
        else:
            assert not value.any(), name
    if live_grads:
        assert all(torch.all(p.grad == 1) for p in model.parameters() if p.requires_grad)
    else:
        assert all(p.grad is None for p in model.parameters())


@either_form
@every_form
def test_a_first_step_after_asking_is_the_first_step(form, flat):
    model, optimizer = build(form)
    get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    untouched_model, untouched = build(form)
    train_model(model, optimizer, range(2))
    train_model(untouched_model, untouched, range(2))
    untouched.state_dict()
    assert differences(snapshot(optimizer), snapshot(untouched)) == []


@pytest.mark.parametrize("live_grads", [False, True])
@either_form
@every_form
def test_setting_the_state_of_a_fresh_optimizer_drops_nothing(form, flat, live_grads):
    model, optimizer = build(form)
    train_model(model, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    new_model, new = build(form, seed=5)
    if live_grads:
        for param in new_model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
    weights = copy.deepcopy(new_model.state_dict())
    set_optimizer_state_dict(new_model, new, saved, options=options)
    assert all(same_bits(value, weights[name]) for name, value in new_model.state_dict().items())
    for (name, a), b in zip(model.named_parameters(), new_model.parameters(), strict=True):
        held = optimizer.state.get(a, {})
        assert set(held) == set(new.state.get(b, {})), name
        assert all(same_bits(value, new.state[b][key]) for key, value in held.items()), name
    assert [group["step"] for group in new.param_groups] == [3, 3, 3]


@either_form
def test_torchs_adamw_steps_a_fresh_optimizer_where_ours_does_not(flat):
    """The control: upstream's own initial step is there, and it is what the promised state keeps away."""
    model = Net()
    theirs = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    get_optimizer_state_dict(model, theirs, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    assert {float(state["step"]) for state in theirs.state.values()} == {1.0}


# ---- parameters that are not those of the construction ----


@either_form
def test_a_model_that_was_built_without_memory(flat):
    """meta, then to_empty with swapped parameters, then weights: the optimizer was there all along."""
    form = Mode(BF16, BF16, BF16, "fp32")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    source, trained = build(form)
    train_model(source, trained, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(source, trained, options=options))

    model = Net(BF16, device="meta")
    optimizer = FusedAdam(grouped(model), **form.arguments)
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)
    model.load_state_dict(source.state_dict())
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    train_model(source, trained, range(3, 6))
    train_model(model, optimizer, range(3, 6))
    assert differences(snapshot(trained), snapshot(optimizer)) == []


@pytest.mark.parametrize("looked_at", [False, True], ids=["state never read", "state read on meta"])
def test_state_follows_a_parameter_from_meta_to_memory(looked_at):
    form = Mode(BF16, BF16, FP32, "fp32")
    param = torch.nn.Parameter(torch.empty(5, dtype=BF16, device="meta"))
    optimizer = FusedAdam([param], **form.arguments)
    if looked_at:
        assert optimizer.state[param]["exp_avg"].device.type == "meta"
    real = torch.nn.Parameter(torch.randn(5).to(BF16))
    kept = real.detach().clone()
    torch.utils.swap_tensors(param, real)
    param.grad = torch.zeros(5, dtype=BF16)
    optimizer.step()
    state = optimizer.state[param]
    assert {k: v.device.type for k, v in state.items()} == dict.fromkeys(state, "cpu")
    assert same_bits(state["master_param"], kept.float()) and same_bits(param, kept)


@either_form
def test_parameters_that_a_trainer_swapped_in_the_groups_are_followed(flat):
    """As accelerate does: new Parameter objects in module and groups alike."""
    form = Mode(BF16, BF16, BF16, "fp32")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build(form)
    train_model(model, optimizer, range(2))
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            setattr(module, name, new)
            for group in optimizer.param_groups:
                group["params"] = [new if param is old else param for param in group["params"]]
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    members = {id(param) for param in model.parameters()}
    assert all(id(param) in members for param in optimizer.state), "state of parameters that are gone"
    names = (
        {k.split(".exp_avg")[0].removeprefix("state.") for k in saved if k.endswith("exp_avg")}
        if flat
        else set(saved["state"])
    )
    assert names == set(TRAINED)
    train_model(model, optimizer, range(2, 3))
    steps = {name: optimizer.state[param]["step"].item() for name, param in model.named_parameters() if name in TRAINED}
    assert steps == {name: 0.0 if name == "unused.weight" else 1.0 for name in TRAINED}


def test_frozen_parameters_cost_nothing_and_train_when_unfrozen():
    model, optimizer = build(Mode(FP32))
    train_model(model, optimizer, range(2))
    optimizer.state_dict()
    assert all(param not in optimizer.state for param in model.frozen.parameters())
    model.frozen.requires_grad_(True)
    train_model(model, optimizer, range(2, 4))
    assert all(optimizer.state[param]["step"].item() == 2 for param in model.frozen.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert saved["state.frozen.weight.step"].item() == 2
    new_model, new = build(Mode(FP32), seed=2)
    new_model.frozen.requires_grad_(True)
    set_optimizer_state_dict(new_model, new, saved, options=options)
    assert same_bits(new.state[new_model.frozen.weight]["exp_avg"], optimizer.state[model.frozen.weight]["exp_avg"])
