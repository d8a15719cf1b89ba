"""A save exports the masters that the next step would start from, and writes none of them.

What is right is said by that step: with a learning rate of 0 it changes nothing but what was to be brought back to
weights that were written.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.bits import same_bits
from helpers.quantized import Float8
from statestream import CPUOffloadOptimizer, FusedAdam, kernels
from statestream.convert import convert_checkpoint, fp32_weights
from statestream.state import stored
from statestream.state.state_format import MASTER
from torch.nn import Parameter

BF16, FP16 = torch.bfloat16, torch.float16

FORMS = {
    "fp32 masters": (BF16, {}),
    "fp32 masters of fp16": (FP16, {"exp_avg_dtype": "bf16"}),
    "fp16 masters": (BF16, {"master_weight_dtype": "fp16", "exp_avg_sq_dtype": "fp8"}),
    "fp16 masters of fp16": (FP16, {"master_weight_dtype": "fp16"}),
    "remainders": (BF16, {"store_param_remainders": True}),
    "remainders, fp16": (FP16, {"store_param_remainders": True}),
}
HOLDERS = {
    "to the host": lambda params, **options: FusedAdam(params, **options, state_dict_cpu_offload=True),
    "on the device": FusedAdam,
    "offloaded": lambda params, **options: CPUOffloadOptimizer(FusedAdam(params, **options), 8_000),
    "offloaded, live": lambda params, **options: CPUOffloadOptimizer(
        FusedAdam(params, **options), 8_000, state_dict_snapshot=False
    ),
}
SHAPES = [(600,), (4, 3, 5, 5), (1,), (0,), (30, 20)]
NEVER_STEPPED = 4


@torch.no_grad()
def everywhere(optimizer, params):
    for i, param in enumerate(params):
        param.copy_(values(param, 50 + i))


@torch.no_grad()
def in_part(optimizer, params):
    for param in params:
        param[1:2] *= 2.5


@torch.no_grad()
def by_a_loaded_model(optimizer, params):
    module = torch.nn.Module()
    module.params = torch.nn.ParameterList(params)
    module.load_state_dict({f"params.{i}": values(param, 70 + i) for i, param in enumerate(params)})


def by_other_memory(optimizer, params):
    for i, param in enumerate(params):
        param.data = torch.empty_like(param.data).copy_(values(param, 90 + i))


def with_their_own_values(optimizer, params):
    with torch.no_grad():
        for param in params:
            param.copy_(param.clone())


def without_a_trace(optimizer, params):
    for i, param in enumerate(params):
        param.data.copy_(values(param, 110 + i))
    optimizer.refresh_masters()


def not_at_all(optimizer, params):
    pass


WRITES = {
    f.__name__: f
    for f in (
        everywhere,
        in_part,
        by_a_loaded_model,
        by_other_memory,
        with_their_own_values,
        without_a_trace,
        not_at_all,
    )
}


def values(like, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def make_params(dtype):
    params = [Parameter(values(torch.empty(shape, dtype=dtype), i)) for i, shape in enumerate(SHAPES)]
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    return params


def train(optimizer, params, steps, skip=(NEVER_STEPPED,)):
    for step in steps:
        for i, param in enumerate(params):
            param.grad = None if i in skip else values(param, 1000 * step + i)
        optimizer.step()


def live_masters(optimizer, params):
    """As they lie in memory, with their scales."""
    factory = getattr(optimizer, "inner", optimizer).backend
    return [
        (optimizer.state[p][MASTER].clone(), copy.deepcopy(factory.scales.get(p, {}).get(MASTER)))
        for p in params
        if MASTER in optimizer.state[p]
    ]


def assert_masters(found, expected):
    for i, ((a, scale), (b, other)) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(a, b) and (scale is None or same_bits(scale, other)), f"master {i}"


def masters_of_the_next_step(optimizer, params):
    """By a step of every parameter that moves nothing."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    found = []
    for master, scale in live_masters(optimizer, params):
        if scale is None:
            found.append(master)
        else:
            out = torch.empty(master.numel())
            kernels.decode(master.as_strided((master.numel(),), (1,)), out, scale=scale)
            found.append(out.as_strided(master.shape, master.stride()))
    return found


def build(holder, form):
    dtype, options = FORMS[form]
    params = make_params(dtype)
    return params, HOLDERS[holder](params, lr=0.01, master_weights=True, **options)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("write", WRITES)
def test_a_save_exports_what_the_next_step_starts_from_and_writes_nothing(write, form, holder, monkeypatch):
    monkeypatch.setattr(stored, "_SLICE", 256)  # so that a parameter has several
    params, optimizer = build(holder, form)
    train(optimizer, params, range(3))
    optimizer.state_dict()  # makes what is missing: the masters of the one that is not stepped are at its first weights
    WRITES[write](optimizer, params)
    before, weights = live_masters(optimizer, params), [p.detach().clone() for p in params]
    exported = copy.deepcopy(optimizer.state_dict()["state"])
    read = [getattr(optimizer, "inner", optimizer).get_unscaled_state(p, MASTER).clone() for p in params]
    again = optimizer.state_dict()["state"]
    assert_masters(live_masters(optimizer, params), before)
    assert all(map(same_bits, params, weights))
    started_from = masters_of_the_next_step(optimizer, params)
    for i, master in enumerate(started_from):
        assert exported[i][MASTER].dtype is master.dtype and same_bits(exported[i][MASTER], master), i
        assert same_bits(read[i], master) and same_bits(exported[i][MASTER], again[i][MASTER]), i
        assert exported[i][MASTER].stride() == params[i].stride()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_optimizer_and_one_that_was_loaded_alone_export_their_weights(form, holder):
    """The one never stepped, the other's state from a run of other weights; then the model is loaded."""
    params, optimizer = build(holder, form)
    others, source = build("to the host", form)
    train(source, others, range(2))
    for loaded in (False, True):
        if loaded:
            optimizer.load_state_dict(source.state_dict())
        everywhere(optimizer, params)
        exported = copy.deepcopy(optimizer.state_dict()["state"])
        for i, (param, state) in enumerate(zip(params, exported.values(), strict=True)):
            if state[MASTER].dtype is not torch.int16:
                assert same_bits(state[MASTER].to(param.dtype), param), i
    for i, master in enumerate(masters_of_the_next_step(optimizer, params)):
        assert same_bits(exported[i][MASTER], master), i


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("form", FORMS)
def test_averaged_weights_swapped_in_for_a_save_leave_every_master_as_it_was(form, holder):
    (params, optimizer), (others, never_saved) = build(holder, form), build(holder, form)
    for o, ps in ((optimizer, params), (never_saved, others)):
        train(o, ps, range(3), skip=())
    before, weights = live_masters(optimizer, params), [p.detach().clone() for p in params]
    everywhere(optimizer, params)
    averaged = copy.deepcopy(optimizer.state_dict()["state"])
    for i, param in enumerate(params):
        if averaged[i][MASTER].dtype is not torch.int16:
            assert same_bits(averaged[i][MASTER].to(param.dtype), param)
        with torch.no_grad():
            param.copy_(weights[i])
    assert_masters(live_masters(optimizer, params), before)
    for o, ps in ((optimizer, params), (never_saved, others)):
        train(o, ps, range(3, 5), skip=())
    assert all(map(same_bits, params, others))
    assert_masters(live_masters(optimizer, params), live_masters(never_saved, others))


def test_on_the_device_the_live_master_is_handed_out_unless_a_step_would_make_another():
    params, optimizer = build("on the device", "fp32 masters")

    def live():
        exported = optimizer.state_dict()["state"]
        for i, param in enumerate(params):
            alike = optimizer.get_unscaled_state(param, MASTER) is optimizer.state[param][MASTER]
            assert (exported[i][MASTER] is optimizer.state[param][MASTER]) is alike
        return [exported[i][MASTER] is optimizer.state[p][MASTER] for i, p in enumerate(params)]

    assert all(live()), "a fresh optimizer's"
    train(optimizer, params, range(2))
    with_their_own_values(optimizer, params)
    assert all(live()), "written with its own values"
    with torch.no_grad():
        params[0][7] += 1.0
    assert live() == [False, True, True, True, True]
    train(optimizer, params, [2])
    assert all(live())


@pytest.mark.parametrize("holder", ["to the host", "on the device"])
def test_masters_of_quantised_weights_that_were_written_are_exported_as_the_next_step_takes_them(holder):
    param = Parameter(Float8.of(values(torch.empty(40, 20), 0)))
    optimizer = HOLDERS[holder]([param], lr=0.01, master_weights=True)
    param.grad = values(torch.empty(40, 20, dtype=BF16), 1)
    optimizer.step()
    for written in range(2):
        before = optimizer.state[param][MASTER].clone()
        exported = optimizer.state_dict()["state"][0][MASTER].clone()
        assert same_bits(optimizer.state[param][MASTER], before)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        assert same_bits(exported, optimizer.state[param][MASTER])
        with torch.no_grad():
            param.copy_(values(torch.empty(40, 20), 2 + written))
        assert not same_bits(exported, optimizer.state_dict()["state"][0][MASTER]), "nothing was written"


@pytest.mark.parametrize("form", FORMS)
def test_both_refresh_masters_mean_the_same(form):
    masters = {}
    for holder in ("to the host", "offloaded"):
        params, optimizer = build(holder, form)
        train(optimizer, params, range(2))
        optimizer.state_dict()
        without_a_trace(optimizer, params)
        masters[holder] = live_masters(optimizer, params)
        for i, (master, scale) in enumerate(masters[holder]):
            if scale is None and master.dtype is not torch.int16:
                assert same_bits(master.to(params[i].dtype), params[i]), "not brought back at once"
    assert_masters(*masters.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("holder", ["on the device", "offloaded"])
def test_the_weights_of_a_checkpoint_are_the_models_whichever_way_they_are_made(holder, tmp_path):
    """A model loaded after the optimizer was built, of which one layer is not stepped."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 5, bias=False, dtype=BF16) for name in ("used", "rare")})
    optimizer = HOLDERS[holder](model.named_parameters(), lr=1e-3, master_weights=True)
    optimizer.state_dict()
    model.load_state_dict({f"{name}.weight": values(layer.weight, i) for i, (name, layer) in enumerate(model.items())})
    model["used"].weight.grad = values(model["used"].weight, 5)
    optimizer.step()
    model["used"].weight.grad = None
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "saved")
    convert_checkpoint(tmp_path / "saved", tmp_path / "converted", to="torch", masters="weights")
    converted = {name: torch.zeros(5, 6) for name in weights}
    dcp.load({"model": converted}, checkpoint_id=tmp_path / "converted")
    made = dict(fp32_weights(optimizer.state_dict(), list(model.parameters())))
    for i, (name, param) in enumerate(model.named_parameters()):
        assert same_bits(made[i].to(BF16), param) and same_bits(converted[name], made[i]), name


@pytest.mark.parametrize("before", ["nothing", "a step", "a step and a write"])
@pytest.mark.parametrize("form", [form for form in FORMS if "remainders" not in form])
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_master_that_is_set_is_what_the_next_step_starts_from_and_a_save_exports(holder, form, before):
    dtype, options = FORMS[form]
    param = Parameter(torch.ones(600).to(dtype))
    optimizer = holder([param], lr=0.0, master_weights=True, **options)
    param.grad = torch.ones_like(param)
    if before != "nothing":
        optimizer.step()
    if before == "a step and a write":
        with torch.no_grad():
            param.fill_(2)
    weight, wanted = param.detach().clone(), torch.linspace(3, 4, 600)
    optimizer.set_scaled_state(param, MASTER, wanted)
    optimizer.set_scaled_state(param, "exp_avg", torch.zeros(600))
    assert same_bits(param, weight)
    exported = optimizer.state_dict()["state"][0][MASTER].clone()
    torch.testing.assert_close(exported.float(), wanted, rtol=0, atol=2e-3 if "fp16 m" in form else 0)
    optimizer.step()
    assert same_bits(param, exported.to(dtype))
    assert same_bits(optimizer.state_dict()["state"][0][MASTER], exported)
