"""Checkpoints whose parameters, or the optimizer itself, have the names that a checkpoint gives to its own parts."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.bits import differences, same_bits, snapshot
from statestream import FusedAdam
from statestream.convert import convert_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

NAMES = {
    "states": ["step", "exp_avg", "master_param", "state.step", "a.exp_avg.exp_avg"],
    "settings": ["params", "lr", "betas.lr"],
    "numbers": ["0", "1.0", "0x"],
    "groups": ["param_groups.0.params", "param_groups.0.lr", "b"],
    "ends of each other": ["w", "model.w", "model.model.w", "optim.w"],
    "parts within": ["a.state.b", "a.param_groups.b", "state.state"],
}
PLACES = ["optim", "state", "state_of", "param_groups", "a.state"]
CASES = [(names, place, flat) for names in NAMES for place in PLACES for flat in (False, True)]


def model_of(names, seed=0):
    """Bfloat16 parameters at these dotted paths."""
    torch.manual_seed(seed)
    model = torch.nn.Module()
    for name in names:
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(last, torch.nn.Parameter(torch.randn(3, 4).bfloat16()))
    return model, FusedAdam(model.parameters(), master_weights=True)


def parts(model, optimizer, place, flat):
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    whole = {"model": weights}
    *path, last = place.split(".")
    inside = whole
    for part in path:
        inside = inside.setdefault(part, {})
    inside[last] = state
    return whole, state


@pytest.mark.parametrize(
    ("names", "place", "flat"),
    # A sample with every kind of name.
    [case if i % 11 == 3 else pytest.param(*case, marks=pytest.mark.long) for i, case in enumerate(CASES)],
)
def test_a_run_goes_through_the_peers_form_and_back_whatever_its_parameters_are_called(names, place, flat, tmp_path):
    model, optimizer = model_of(NAMES[names])
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    dcp.save(parts(model, optimizer, place, flat)[0], checkpoint_id=tmp_path / "saved")
    told = {"optimizer": place, "model": "model"}
    convert_checkpoint(tmp_path / "saved", tmp_path / "theirs", "transformer_engine", **told)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "back", "statestream", **told)
    other, resumed = model_of(NAMES[names], seed=1)
    whole, state = parts(other, resumed, place, flat)
    dcp.load(whole, checkpoint_id=tmp_path / "back")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(other, resumed, model_state_dict=whole["model"], optim_state_dict=state, options=options)
    for param, there in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(param, there)
    assert differences(snapshot(optimizer), snapshot(resumed)) == []


@pytest.mark.parametrize("names", ["groups", "parts within"])
def test_where_it_is_not_clear_which_is_the_optimizer_the_choices_are_told(names, tmp_path):
    model, optimizer = model_of(NAMES[names])
    optimizer.state_dict()
    dcp.save(parts(model, optimizer, "optim", False)[0], checkpoint_id=tmp_path / "saved")
    with pytest.raises(ValueError, match=r"several optimizers; give optimizer= one of .*'optim'"):
        convert_checkpoint(tmp_path / "saved", tmp_path / "theirs", "transformer_engine")
    assert not (tmp_path / "theirs").exists()
