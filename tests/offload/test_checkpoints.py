"""Checkpoints come out of host memory and go into it: keys, dtypes, snapshots, DCP, bytes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from simulated_device.device import SimulatedDevice
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from .conftest import assert_same_training, assert_same_values, bits, make_params, set_grads, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1),
    "fused_adam_bf16": lambda p: FusedAdam(p, lr=0.1, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "fused_adam_masters": lambda p: FusedAdam(p, lr=0.1, master_weights=True, state_dict_cpu_offload=True),
    "fused_adam_remainders": lambda p: FusedAdam(p, lr=0.1, master_weights=True, store_param_remainders=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}
CHUNK = 60_000


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def assert_same_dict(a, b, what=""):
    if isinstance(a, dict):
        assert list(a) == list(b), what
        for key in a:
            assert_same_dict(a[key], b[key], f"{what}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), what
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_dict(x, y, f"{what}/{i}")
    else:
        assert_same_values(a, b, what)


def tensors_of(state_dict):
    return [v for s in state_dict["state"].values() for v in s.values() if isinstance(v, torch.Tensor)]


def test_the_state_dict_is_that_of_the_optimizer_itself(make):
    params, reference = make_params("mixed"), make_params("mixed")
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(3), missing=lambda _: (3,))
    assert_same_dict(optimizer.state_dict(), plain.state_dict())


def test_a_dict_that_was_loaded_may_be_written_afterwards(make):
    """Counters too: a program may go on with the dict."""
    params = make_params("mixed")
    optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    wanted = copy.deepcopy(optimizer.state_dict())
    for tensor in tensors_of(saved):
        tensor.fill_(77)
    assert_same_dict(optimizer.state_dict(), wanted)


def test_it_loads_into_the_optimizer_itself_and_back(make):
    params, reference = make_params("mixed"), make_params("mixed")
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    train(optimizer, params, range(2))
    train(plain, reference, range(2))

    def built(saved, wrap):
        ps = make_params("mixed")
        o = CPUOffloadOptimizer(make(ps), None) if wrap else make(ps)
        o.load_state_dict(saved)
        with torch.no_grad():
            for p, q in zip(ps, params, strict=True):
                p.copy_(q)
        train(o, ps, [2])
        return ps, o

    # torch's own load casts some states to the parameter's dtype: what it gives from its own dict is the measure.
    assert_same_training(*built(optimizer.state_dict(), False), *built(plain.state_dict(), False))
    wrapped = built(plain.state_dict(), True)
    train(plain, reference, [2])
    assert_same_training(*wrapped, reference, plain)


def test_a_snapshot_keeps_its_values_and_live_views_do_not(make):
    params = make_params("mixed")
    optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    kept = [bits(t).clone() for t in tensors_of(saved)]
    train(optimizer, params, range(2, 4))
    assert all(torch.equal(a, bits(b)) for a, b in zip(kept, tensors_of(saved), strict=True))
    arenas = {a.block.untyped_storage().data_ptr() for b in optimizer.strategy.store.banks for a in b.arenas}
    assert not arenas & {t.untyped_storage().data_ptr() for t in tensors_of(saved)}


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_live_views_cost_no_memory_and_follow_the_steps(name):
    params = make_params()
    optimizer = CPUOffloadOptimizer(MAKERS[name](params), CHUNK, state_dict_snapshot=False)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    arenas = {a.block.untyped_storage().data_ptr() for b in optimizer.strategy.store.banks for a in b.arenas}
    moments = [s["exp_avg"] for s in saved["state"].values()]
    assert {t.untyped_storage().data_ptr() for t in moments} <= arenas
    before = moments[0].clone()
    train(optimizer, params, [2])
    assert not torch.equal(moments[0], before)


def test_a_load_writes_into_the_same_host_memory(make):
    params, others = make_params("mixed"), make_params("mixed")
    source, optimizer = CPUOffloadOptimizer(make(params), CHUNK), CPUOffloadOptimizer(make(others), CHUNK)
    train(source, params, range(3))
    train(optimizer, others, [7])
    arenas = [a for b in optimizer.strategy.store.banks for a in b.arenas]
    addresses = [a.block.data_ptr() for a in arenas]
    old_lr = 0.02
    source.param_groups[0]["lr"] = old_lr
    optimizer.load_state_dict(source.state_dict())
    assert optimizer.param_groups[0]["lr"] == old_lr
    assert [a for b in optimizer.strategy.store.banks for a in b.arenas] == arenas
    assert [a.block.data_ptr() for a in arenas] == addresses
    storages = {a.block.untyped_storage().data_ptr() for a in arenas}
    for p, q in zip(params, others, strict=True):
        for name, value in source.state[p].items():
            mine = optimizer.state[q][name]
            assert_same_values(mine, value, name)
            if isinstance(mine, torch.Tensor) and mine.dim():
                assert mine.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("name", ["fused_adam_masters", "adamw"])
def test_a_load_that_does_not_fit_changes_nothing(name):
    params = make_params()
    optimizer = CPUOffloadOptimizer(MAKERS[name](params), CHUNK)
    train(optimizer, params, range(2))
    good = optimizer.state_dict()
    train(optimizer, params, [2])
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(good)
    bad["state"][5]["exp_avg"] = torch.zeros(3, 5, 8)
    bad["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"exp_avg of parameter 5.*\(3, 5, 8\).*\(3, 5, 7\)"):
        optimizer.load_state_dict(bad)
    short = copy.deepcopy(good)
    short["param_groups"][0]["params"] = short["param_groups"][0]["params"][:-1]
    with pytest.raises(ValueError, match=r"5.*parameters"):
        optimizer.load_state_dict(short)
    assert_same_dict(before, optimizer.state_dict())
    optimizer.load_state_dict(good)


def test_a_parameter_that_the_checkpoint_has_no_state_for_starts_anew(make):
    params, others = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(others)
    train(optimizer, params, range(2))
    train(plain, others, range(2))
    partial = plain.state_dict()
    partial["state"] = {k: v for k, v in partial["state"].items() if k != 2}
    for o, ps in ((optimizer, params), (plain, others)):
        o.load_state_dict(copy.deepcopy(partial))
        train(o, ps, [2])
    assert_same_training(params, optimizer, others, plain)


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_how_the_optimizer_runs_is_not_the_checkpoints_affair(name):
    params = make_params()
    optimizer = CPUOffloadOptimizer(MAKERS[name](params), CHUNK)
    train(optimizer, params, [0])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(capturable=True, foreach=True, differentiable=True, lr=0.03)
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["capturable"], group["foreach"], group["differentiable"], group["lr"]) == (False, None, False, 0.03)
    train(optimizer, params, [1])


def test_a_file_holds_each_state_once(make):
    params = make_params(torch.bfloat16, shapes=[(1000,)] * 30)
    optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    train(optimizer, params, [0])
    saved = optimizer.state_dict()
    needed = sum(t.numel() * t.element_size() for t in tensors_of(saved))
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    assert buffer.tell() < 1.05 * needed + 300 * 40 * 3
    buffer.seek(0)
    assert_same_dict(saved, torch.load(buffer, weights_only=True))


def test_hooks_see_what_is_saved_and_may_replace_it(make):
    params = make_params()
    inner = make(params)
    optimizer = CPUOffloadOptimizer(inner, CHUNK)
    train(optimizer, params, [0])
    calls = []
    inner.register_state_dict_pre_hook(lambda o: calls.append("inner pre"))
    inner.register_state_dict_post_hook(lambda o, sd: {**sd, "inner": len(sd["state"])})
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, sd: {**sd, "outer": sd["inner"]})
    saved = optimizer.state_dict()
    assert calls == ["pre", "inner pre"] and saved["outer"] == saved["inner"] == 6
    inner.register_load_state_dict_pre_hook(lambda o, sd: calls.append("inner load"))
    inner.register_load_state_dict_post_hook(lambda o: calls.append("inner loaded"))
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(saved)
    assert calls[2:] == ["load", "inner load", "inner loaded", "loaded"]


# ---- torch.distributed.checkpoint, one process ----


def model_and(make, chunk=CHUNK):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.ReLU(), torch.nn.Linear(50, 7))
    model.to(torch.bfloat16)
    inner = make(model.parameters())
    return model, inner if chunk == "plain" else CPUOffloadOptimizer(inner, chunk)


@pytest.mark.parametrize("flatten", [True, False])
def test_dcp_gives_what_it_gives_of_the_optimizer_itself(make, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, cpu_offload=True)
    results = []
    for chunk in ("plain", 2_500):
        model, optimizer = model_and(make, chunk)
        train(optimizer, list(model.parameters()), range(2))
        for p in model.parameters():
            p.grad = None
        results.append(get_optimizer_state_dict(model, optimizer, options=options))
    assert_same_dict(results[0], results[1])


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_dcp_save_load_and_go_on(make, flatten, asynchronous, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, cpu_offload=True)
    model, optimizer = model_and(make, 4_000)
    params = list(model.parameters())
    train(optimizer, params, range(2))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    for p in params:
        p.grad = None
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    if asynchronous:
        future = dcp.async_save(saved, checkpoint_id=tmp_path, no_dist=True)
        train(optimizer, params, range(2, 5))  # at once: the file keeps the values of the save
        future.result()
    else:
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        train(optimizer, params, range(2, 5))

    again, loaded = model_and(make, 10_000)
    again.load_state_dict(weights)
    fresh = {"optimizer": get_optimizer_state_dict(again, loaded, options=options)}
    dcp.load(fresh, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(again, loaded, fresh["optimizer"], options=options)
    assert_same_values(loaded.param_groups[0]["lr"], 0.1)
    train(loaded, list(again.parameters()), range(2, 5))
    assert_same_training(list(again.parameters()), loaded, params, optimizer)


@pytest.mark.parametrize("name", ["fused_adam_masters", "fused_adam"])
def test_dcp_leaves_a_fresh_fused_adam_alone(name):
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    model, optimizer = model_and(MAKERS[name])
    weights = [p.detach().clone() for p in model.parameters()]
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert all(not flat[k].any() for k in flat if k.startswith("state.") and k.endswith(("step", "exp_avg")))
    assert sum(k.startswith("state.") for k in flat) == 4 * (4 if name == "fused_adam_masters" else 3)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    set_grads(list(model.parameters()), 0)  # live gradients: nothing is dropped
    trained, source = model_and(MAKERS[name])
    train(source, list(trained.parameters()), range(2))
    set_optimizer_state_dict(
        model, optimizer, get_optimizer_state_dict(trained, source, options=options), options=options
    )
    for p, q in zip(model.parameters(), trained.parameters(), strict=True):
        for key, value in source.state[q].items():
            assert_same_values(optimizer.state[p][key], value, key)


def test_a_load_waits_for_the_last_store(on_device):
    params = make_params()
    device = on_device(SimulatedDevice(1, style="late"))
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 20_000)
    set_grads(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    set_grads(params, 1)
    optimizer.step()
    assert any(device.queues.values())
    optimizer.load_state_dict(saved)
    device.settle()
    for i, param in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_values(optimizer.state[param][name], saved["state"][i][name], f"{name} of parameter {i}")
