"""A checkpoint of any mode in an optimizer of any other: values to the rounding of what holds them, or refused."""

import copy

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import FORMS
from helpers.stored import decoded, scale_of_each, storage_error
from helpers.training import build, train


def refused(saved, wanted, params):
    """Remainders are no masters, and masters no remainders."""
    masters = [(saved.stored(p).get("master_param"), wanted.stored(q).get("master_param")) for p, q in params]
    return any(a and b and (a is torch.int16) != (b is torch.int16) for a, b in masters)


def check(saved_by, loaded_by):
    one, other = build(saved_by), build(loaded_by, seed=5, lr=0.7)
    train(one, range(3))
    train(other, range(20, 22))
    saved = copy.deepcopy(one.state_dict())
    theirs = [p for group in one.param_groups for p in group["params"]]
    ours = [p for group in other.param_groups for p in group["params"]]
    if refused(saved_by, loaded_by, zip(theirs, ours, strict=True)):
        before = snapshot(other)
        with pytest.raises(
            ValueError, match=r"master_param of parameter \d.*store_param_remainders=.*nothing was loaded"
        ):
            other.load_state_dict(saved)
        assert differences(before, snapshot(other)) == []
        return
    other.load_state_dict(saved)
    for number, param in enumerate(ours):
        state = other.state[param]
        assert state["step"].item() == 3
        for name, dtype in loaded_by.stored(param).items():
            value = saved["state"][number].get(name, param.detach())  # without a master it starts at the weight
            assert state[name].dtype is dtype
            if dtype is torch.int16:
                assert torch.equal(state[name], value if value.dtype is torch.int16 else torch.zeros_like(state[name]))
                continue
            scale, root = scale_of_each(other, param, name), name == "exp_avg_sq"
            allowed = storage_error(value, dtype, scale=scale, root=root) if dtype is not torch.float32 else 0.0
            moved = (decoded(other, param, name).double() - value.double()).abs()
            assert torch.all(moved <= allowed), (number, name)
            if root:
                assert torch.all((decoded(other, param, name) == 0) == (value == 0)), number
    train(other, range(22, 24))
    assert all(torch.isfinite(param).all() for param in ours)


@pytest.mark.parametrize("number", range(len(FORMS)), ids=lambda i: str(FORMS[i]))
def test_each_mode_loads_what_another_saved_and_is_loaded_by_another(number):
    check(FORMS[number], FORMS[(29 * number + 11) % len(FORMS)])


@pytest.mark.long
@pytest.mark.parametrize("saved_by", FORMS, ids=str)
def test_any_mode_loads_what_any_other_saved(saved_by):
    """6,084 pairs, two minutes in all."""
    for loaded_by in FORMS:
        check(saved_by, loaded_by)
