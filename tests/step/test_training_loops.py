"""The small ways of a training loop: closures, zero_grad, autograd, forks, configurations."""

import copy
import io
import os
import signal
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.bits import same_bits
from helpers.training import train
from statestream import FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32


def params(n=2, dtype=FP32):
    return [torch.nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(i)).to(dtype)) for i in range(n)]


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    (param,) = params(1)
    optimizer = FusedAdam([param], lr=0.1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    before = (param.detach() ** 2).sum()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and torch.equal(loss.detach(), before)
    assert optimizer.state[param]["step"].item() == 1


@pytest.mark.parametrize("set_to_none", [None, True, False])
@pytest.mark.parametrize("decoupled", [False, True])
def test_zero_grad_both_ways(set_to_none, decoupled):
    members = params()
    optimizer = FusedAdam(members, use_decoupled_grad=decoupled)
    name = "decoupled_grad" if decoupled else "grad"
    setattr(members[0], name, torch.ones(5))
    grad = getattr(members[0], name)
    optimizer.zero_grad(*([] if set_to_none is None else [set_to_none]))
    if set_to_none is False:
        assert getattr(members[0], name) is grad and not grad.any()
    else:
        assert getattr(members[0], name) is None
    assert getattr(members[1], name, None) is None


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_set_grad_none_is_taken_with_a_warning(set_grad_none):
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer = FusedAdam(params(), set_grad_none=set_grad_none)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones(5)
    optimizer.zero_grad()
    assert (param.grad is None) is set_grad_none
    with pytest.raises(ValueError, match="set_grad_none"):
        optimizer.zero_grad(set_to_none=not set_grad_none)


def test_a_step_is_seen_by_autograd_where_torchs_is():
    def use_after_step(cls):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = cls([weight], lr=0.1)
        loss = (weight**2).sum()
        weight.grad = torch.ones(3)
        version = weight._version
        optimizer.step()
        assert weight._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    use_after_step(torch.optim.AdamW)
    use_after_step(FusedAdam)


def test_a_parameter_without_gradient_keeps_its_version():
    a, b = params()
    optimizer = FusedAdam([a, b], lr=0.1)
    a.grad = torch.ones(5)
    version = b._version
    optimizer.step()
    assert b._version == version


def test_peer_methods_read_and_write_state_by_value():
    (param,) = params(1)
    optimizer = FusedAdam([param], exp_avg_dtype=BF16)
    train(optimizer, range(1))
    value = optimizer.get_unscaled_state(param, "exp_avg")
    assert value.dtype is FP32 and torch.equal(value, optimizer.state[param]["exp_avg"].float())
    assert optimizer.get_unscaled_state(param, "exp_avg_sq") is optimizer.state[param]["exp_avg_sq"]
    address = optimizer.state[param]["exp_avg"].data_ptr()
    wanted = torch.tensor([1.0, 1.00390625, -3.01, 1e-3, 0.0])
    optimizer.set_scaled_state(param, "exp_avg", wanted)
    assert optimizer.state[param]["exp_avg"].data_ptr() == address
    assert same_bits(optimizer.state[param]["exp_avg"], wanted.to(BF16))
    assert optimizer.get_unscaled_state(param, "exp_avg", skip_unscale=True) is optimizer.state[param]["exp_avg"]
    with pytest.raises(ValueError, match=r"state_name: 'master_param' is not a state .*; it has exp_avg, exp_avg_sq"):
        optimizer.get_unscaled_state(param, "master_param")


def test_optimizers_that_step_within_backward_equal_one_that_steps_after():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    optimizers = {param: FusedAdam([param], lr=0.1) for param in model.parameters()}

    def step_now(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    after = FusedAdam(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).sum().backward()
        plain(inputs).sum().backward()
        after.step()
        after.zero_grad()
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Configured(Sequence):
    """A configuration library's list, which is neither a list nor a tuple."""

    def __init__(self, *values):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]

    def __len__(self):
        return len(self.values)


@pytest.mark.parametrize("betas", [[0.5, 0.9], Configured(0.5, 0.9)], ids=["a list", "a configured list"])
def test_betas_of_a_configuration_become_a_pair(betas):
    optimizer = FusedAdam(params(), betas=betas)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)
    optimizer.add_param_group({"params": params(1), "betas": betas})
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.9)


def test_numbers_of_numpy_are_saved_as_plain_ones():
    """A cosine schedule written with NumPy leaves its floats in the groups."""
    optimizer = FusedAdam(params(), lr=np.float64(0.5), eps=np.float32(2.0**-20), weight_decay=np.float64(0.25))
    train(optimizer, range(1))
    optimizer.param_groups[0]["lr"] *= 0.5 * (1 + np.cos(np.float64(0.0)))
    optimizer.param_groups[0]["betas"] = (np.float64(0.5), np.float32(0.75))
    optimizer.param_groups[0]["warmup"] = np.int64(7)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    group = torch.load(file, weights_only=True)["param_groups"][0]
    found = {key: group[key] for key in ("lr", "eps", "weight_decay", "betas", "warmup")}
    assert found == {"lr": 0.5, "eps": 2.0**-20, "weight_decay": 0.25, "betas": (0.5, 0.75), "warmup": 7}
    assert type(group["maximize"]) is bool and type(group["step"]) is int


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_can_step(monkeypatch):
    """The threads that served the parent's step are not there in the child."""
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", "4")
    param = torch.nn.Parameter(torch.zeros(1 << 18))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        optimizer.step()
        os._exit(0 if optimizer.state[param]["step"].item() == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 2
