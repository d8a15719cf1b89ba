"""Room follows the parameter: whatever became of it, on whatever way its state is reached, its state is where no other
parameter's is, and all training is that of the plain optimizer."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from helpers.devices import Beyond
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.device.queues import HostMemory
from statestream.offload.adam import host_share
from statestream.offload.host.arena import Arena
from torch.nn import Parameter

from .conftest import assert_same_training, assert_same_values, make_params, train

SHAPES = [(600,), (20, 30), (300,), (1000,)]
MATRICES = [(20, 30), (15, 20), (30, 10), (40, 25)]
CHANGED = (1, 2)

FORMS = {
    "masters": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": "bf16"},
    "fp8": {
        "master_weights": True,
        "master_weight_dtype": "fp16",
        "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp8",
    },
}


def another_dtype(param):
    param.data = param.data.to(torch.bfloat16 if param.dtype is torch.float32 else torch.float32)


def grown(param):
    param.data = torch.cat([param.data, torch.ones_like(param.data)])


def shrunk(param):
    param.data = param.data[: len(param) // 3].clone()


def through_meta(param):
    """As a model that is rebuilt: without data for a while, in place."""
    real = Parameter(param.detach().clone().repeat(2, *[1] * (param.dim() - 1)))
    torch.utils.swap_tensors(param, Parameter(torch.empty_like(param, device="meta")))
    torch.utils.swap_tensors(param, real)


def replaced(param):
    return Parameter(torch.cat([param.detach(), param.detach()]).to(torch.bfloat16))


CHANGES = {f.__name__: f for f in (another_dtype, grown, shrunk, through_meta, replaced)}


def nothing_else(optimizer, params, donor):
    pass


def state_read(optimizer, params, donor):
    for i in CHANGED:
        optimizer.state[params[i]].get("exp_avg")


def state_loaded(optimizer, params, donor):
    optimizer.load_state_dict(donor.state_dict())


def loaded_without_state(optimizer, params, donor):
    saved = donor.state_dict()
    saved["state"] = {key: value for key, value in saved["state"].items() if key not in CHANGED}
    optimizer.load_state_dict(saved)


def state_cleared(optimizer, params, donor):
    optimizer.state.clear()


def state_popped(optimizer, params, donor):
    for i in CHANGED:
        optimizer.state.pop(params[i], None)


def state_put_by_hand(optimizer, params, donor):
    """In the form that the parameter wants now."""
    for i, param in enumerate(donor.param_groups[0]["params"]):
        if i in CHANGED:
            optimizer.state[params[i]] = {name: value.clone() for name, value in donor.state[param].items()}


def exported(optimizer, params, donor):
    optimizer.state_dict()


WAYS = {
    f.__name__: f
    for f in (
        nothing_else,
        state_read,
        state_loaded,
        loaded_without_state,
        state_cleared,
        state_popped,
        state_put_by_hand,
        exported,
    )
}


def backward(optimizer, params, step, missing=()):
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(params):
        factor = torch.randn(param.shape, generator=generator).to(param.dtype)
        if i not in missing:
            (param * factor).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def a_run(make, change, way, shapes=SHAPES):
    params = make_params("mixed", shapes)
    optimizer = make(params)
    for step in (0, 1):
        backward(optimizer, params, step)
    for i in CHANGED:
        other = change(params[i])
        if other is not None:
            optimizer.state.pop(params[i], None)
            params[i] = other
        params[i].grad = None
    optimizer.param_groups[0]["params"][:] = params
    donor_params = [Parameter(torch.ones_like(p)) for p in params]
    donor = make(donor_params)
    backward(donor, donor_params, 7)
    way(optimizer, params, donor)
    for step in (2, 3, 4):
        backward(optimizer, params, step, missing=(2,) if step == 2 else ())
    return params, optimizer


def assert_apart(optimizer, params):
    """No two states share memory."""
    spans = []
    for param in params:
        for name, value in optimizer.state[param].items():
            spans.append((value.data_ptr(), value.data_ptr() + value.nbytes, f"{name} of {tuple(param.shape)}"))
    for (begin, end, a), (other, other_end, b) in combinations(spans, 2):
        assert end <= other or other_end <= begin, f"{a} and {b} overlap"


def assert_same(params, optimizer, reference, plain):
    """Parameters, and all state as it is saved."""
    saved, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for i, (p, q) in enumerate(zip(params, reference, strict=True)):
        assert_same_values(p, q, f"parameter {i}")
        assert saved[i].keys() == expected[i].keys()
        for name in saved[i]:
            assert_same_values(saved[i][name], expected[i][name], f"{name} of parameter {i}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_state_of_a_parameter_that_changed_lies_apart_and_trains_as_the_plain_optimizers(change, way, form):
    def make(params):
        return FusedAdam(params, lr=0.1, weight_decay=0.1, **FORMS[form])

    reference, plain = a_run(make, CHANGES[change], WAYS[way])
    for gradients in (False, True):
        params, optimizer = a_run(
            lambda params, gradients=gradients: CPUOffloadOptimizer(make(params), 8_000, offload_gradients=gradients),
            CHANGES[change],
            WAYS[way],
        )
        assert_apart(optimizer, params)
        assert_same(params, optimizer, reference, plain)


OTHERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "muon": lambda params: torch.optim.Muon(params, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_torchs_optimizers_whose_parameters_changed_go_on_where_they_would_by_themselves(change, way, name):
    """Where one refuses the state that it has, so it does here."""
    args = CHANGES[change], WAYS[way], MATRICES if name == "muon" else SHAPES
    plain = None
    try:
        reference, plain = a_run(OTHERS[name], *args)
    except (KeyError, RuntimeError) as error:
        refused = error
    if plain is None:
        with pytest.raises((KeyError, RuntimeError, ValueError)):
            a_run(lambda params: CPUOffloadOptimizer(OTHERS[name](params), 8_000), *args)
        assert way in ("nothing_else", "state_read", "exported", "state_put_by_hand"), refused
        return
    params, optimizer = a_run(lambda params: CPUOffloadOptimizer(OTHERS[name](params), 8_000), *args)
    assert_same(params, optimizer, reference, plain)


@pytest.mark.parametrize("shape", [(40, 10), (1,)], ids=str)
def test_a_parameter_with_gaps_between_its_elements_has_state_without(shape):
    """Its strides reach beyond its place. A step refuses it by its name, as the plain optimizer's does."""
    params = [Parameter(torch.randn(shape[0], 20)[:, ::2]), Parameter(torch.randn(300))]
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1))
    assert_apart(optimizer, params)
    for param in params:
        optimizer.state[param]["exp_avg"].fill_(float(param.numel()))
    assert (optimizer.state[params[1]]["exp_avg"] == 300.0).all()
    saved = optimizer.state_dict()["state"][0]["exp_avg"]
    assert saved.shape == params[0].shape and (saved == params[0].numel()).all()


def test_a_view_that_is_larger_than_its_place_is_refused():
    arena = Arena("exp_avg", [1024, 2048], [1024, 1024], HostMemory())
    assert arena.view(0, torch.float32, torch.empty(16, 16)).untyped_storage().nbytes() == 3072
    with pytest.raises(RuntimeError, match=r"exp_avg of unit 0: 1028 bytes are wanted .* its place has 1024"):
        arena.view(0, torch.float32, torch.empty(257))
    with pytest.raises(RuntimeError, match="2048 bytes are wanted"):
        arena.view(0, torch.float64, torch.empty(256))


@pytest.mark.parametrize("cpu_fraction", [0.5, 1.0])
@pytest.mark.parametrize("old, new", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_weights_that_take_more_room_than_before_pass_through_the_hosts_slots(
    old, new, cpu_fraction, on_device, monkeypatch
):
    """The state is as large as it was, and the slots are: only how many weights one holds has changed."""
    monkeypatch.setattr(host_share, "SLOT_BYTES", 8192)
    on_device(Beyond())
    params, reference = make_params(old), make_params(old)
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 20_000, cpu_fraction=cpu_fraction)
    plain = FusedAdam(reference, lr=0.1)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        for p in ps:
            p.grad = None
            p.data = p.data.to(new)
        train(o, ps, [1, 2])
    assert_same_training(params, optimizer, reference, plain)


def test_clipping_refuses_gradients_of_another_shape_than_the_parameters():
    param = Parameter(torch.ones(1))
    optimizer = CPUOffloadOptimizer(FusedAdam([param], lr=0.1), offload_gradients=True)
    param.sum().backward()
    param.data = torch.ones(300)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: its local shape is \(300,\)"):
        optimizer.clip_grad_norm_(1.0)
