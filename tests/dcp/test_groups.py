"""Group settings over torch.distributed.checkpoint: kept for every group, the empty and the frozen one too."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.models import Net, grouped, train_model
from statestream import FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

KEPT = ("lr", "betas", "eps", "weight_decay", "initial_lr", "maximize", "bias_correction", "step")

either_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


def build(seed, empty=None, change=None, **arguments):
    torch.manual_seed(seed)
    model = Net()
    groups = grouped(model)
    if empty is not None:
        groups.insert(empty, {"params": [], "lr": 0.125, "betas": (0.5, 0.75), "eps": 1e-5, "initial_lr": 0.5})
    for group in groups:
        group.update(change or {})
    return model, FusedAdam(groups, **arguments)


def settings(optimizer):
    return [
        {key: float(v) if isinstance(v := group[key], torch.Tensor) else v for key in KEPT}
        for group in optimizer.param_groups
    ]


OTHER = {"lr": 1.0, "betas": (0.1, 0.2), "eps": 1.0, "weight_decay": 0.9, "initial_lr": 5.0}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("through_file", [False, True])
@either_form
def test_settings_of_every_group_survive(flat, through_file, capturable, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=True)
    model, optimizer = build(0, capturable=capturable)
    train_model(model, optimizer, range(3))
    wanted = settings(optimizer)
    new_model, new = build(1, change=OTHER, capturable=capturable)
    assert settings(new) != wanted
    if through_file:
        dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=tmp_path)
        saved = get_optimizer_state_dict(new_model, new, options=options)
        dcp.load(saved, checkpoint_id=tmp_path)
    else:
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(new_model, new, saved, options=options)
    assert settings(new) == wanted
    if capturable:
        assert all(isinstance(group["lr"], torch.Tensor) for group in new.param_groups)


def nested_round_trip(empty):
    options = StateDictOptions(flatten_optimizer_state_dict=False)
    model, optimizer = build(0, empty=empty)
    train_model(model, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    new_model, new = build(1, empty=empty, change=OTHER)
    set_optimizer_state_dict(new_model, new, saved, options=options)
    return optimizer, new_model, new


def test_settings_of_an_empty_group_survive_in_the_nested_form():
    optimizer, _, new = nested_round_trip(empty=3)
    assert settings(new) == settings(optimizer)


def test_an_empty_group_before_others_keeps_its_own_settings():
    """Upstream hands over an empty group's settings only where it is the last; nothing is mixed up by it."""
    optimizer, new_model, new = nested_round_trip(empty=1)
    assert settings(new)[:1] + settings(new)[2:] == settings(optimizer)[:1] + settings(optimizer)[2:]
    assert new.param_groups[1]["lr"] == OTHER["lr"] and set(new.param_groups[1]) == set(optimizer.param_groups[1])
    train_model(new_model, new, range(2, 4))


def test_the_flat_form_treats_an_empty_group_as_it_does_with_torchs_adamw():
    """Upstream cannot hold one: its form has no place for a group without parameters."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def attempt(make):
        model = Net()
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": []}]
        optimizer = make(groups)
        train_model(model, optimizer, range(1))
        try:
            set_optimizer_state_dict(
                model, optimizer, get_optimizer_state_dict(model, optimizer, options=options), options=options
            )
        except Exception as error:
            return type(error)
        return None

    assert attempt(FusedAdam) is attempt(torch.optim.AdamW)


@either_form
def test_settings_that_a_scheduler_changed_are_the_ones_saved(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build(0)
    for group in optimizer.param_groups:
        del group["initial_lr"]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2, 0.3], total_steps=10)
    for step in range(4):
        train_model(model, optimizer, [step])
        scheduler.step()
    keys = ("lr", "betas", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
    wanted = [{key: group[key] for key in keys} for group in optimizer.param_groups]
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    new_model, new = build(1)
    torch.optim.lr_scheduler.OneCycleLR(new, [0.9, 0.9, 0.9], total_steps=10)
    set_optimizer_state_dict(new_model, new, saved, options=options)
    assert [{key: group[key] for key in keys} for group in new.param_groups] == wanted


@pytest.mark.parametrize("capturable", [False, True])
def test_named_parameters_pass_through(capturable):
    options = StateDictOptions(flatten_optimizer_state_dict=False)
    model = Net()
    optimizer = FusedAdam([(n, p) for n, p in model.named_parameters() if p.requires_grad], capturable=capturable)
    train_model(model, optimizer, range(1))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert optimizer.param_groups[0]["param_names"] == [n for n, p in model.named_parameters() if p.requires_grad]
    train_model(model, optimizer, range(1, 2))


@either_form
def test_a_moment_that_the_checkpoint_lacks_is_an_error_and_nothing_changes(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build(0)
    train_model(model, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if flat:
        del saved["state.norm.bias.exp_avg"]
    else:
        del saved["state"]["norm.bias"]["exp_avg"]
    new_model, new = build(1)
    train_model(new_model, new, range(5, 6))
    before = copy.deepcopy(new.state_dict())
    # torch 2.9 notices a flat dict's missing key itself.
    with pytest.raises((ValueError, KeyError), match=r"exp_avg of 'norm\.bias' is missing|state\.norm\.bias\.exp_avg"):
        set_optimizer_state_dict(new_model, new, saved, options=options)
    after = new.state_dict()
    assert [g["lr"] for g in after["param_groups"]] == [g["lr"] for g in before["param_groups"]]
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][name]) for name, value in state.items())
