"""It is a torch.optim.Optimizer: hooks, closures, schedulers, groups, scalers, copies, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .conftest import assert_same_training, assert_same_values, make_params, set_grads, train
from .makers import SignDescent

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, master_weights=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}
CHUNK = 60_000


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def test_it_is_an_optimizer_and_shares_groups_state_and_defaults(make):
    inner = make(make_params())
    optimizer = CPUOffloadOptimizer(inner, CHUNK)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults


def test_wrapping_adds_no_group_key_or_default():
    inner = SignDescent(make_params())
    keys, defaults = set(inner.param_groups[0]), dict(inner.defaults)
    optimizer = CPUOffloadOptimizer(inner, per_parameter=True)
    assert set(optimizer.param_groups[0]) == keys and optimizer.defaults == defaults


def test_every_hook_fires_once_a_step(make):
    params = make_params()
    inner = make(params)
    optimizer = CPUOffloadOptimizer(inner, 20_000 if isinstance(inner, FusedAdam) else CHUNK)
    calls = []
    inner.register_step_pre_hook(lambda o, a, k: calls.append(("inner pre", o)))
    inner.register_step_post_hook(lambda o, a, k: calls.append(("inner post", o)))
    optimizer.register_step_pre_hook(lambda o, a, k: calls.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, a, k: calls.append(("post", o)))
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append(("global pre", o))),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append(("global post", o))),
    ]
    try:
        train(optimizer, params, [0])
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [
        ("global pre", optimizer),
        ("pre", optimizer),
        ("inner pre", inner),
        ("inner post", inner),
        ("post", optimizer),
        ("global post", optimizer),
    ]


def test_a_closure_is_evaluated_once_with_grad_mode_before_anything_moves(make):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    seen = []

    def closure_for(ps):
        def closure():
            seen.append(torch.is_grad_enabled())
            for p in ps:
                p.grad = None
            loss = sum((p**2).sum() for p in ps)
            loss.backward()
            return loss

        return closure

    for _ in range(2):
        assert_same_values(optimizer.step(closure_for(params)), plain.step(closure_for(reference)))
    assert seen == [True] * 4
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
            milestones=[2],
        ),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ],
)
def test_schedulers(make, schedule):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        scheduler = schedule(o)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        for step in range(5):
            train(o, ps, [step])
            scheduler.step(*([1.0] if plateau else []))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same_training(params, optimizer, reference, plain)


def test_a_scheduler_of_the_inner_optimizer_goes_on_without_a_warning(make, recwarn):
    params = make_params()
    inner = make(params)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = CPUOffloadOptimizer(inner, CHUNK)
    train(optimizer, params, [0])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_settings_edited_before_and_after_a_load_count_at_once(make):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        o.param_groups[0]["lr"] = 0.01
        train(o, ps, [1])
        o.load_state_dict(o.state_dict())
        o.param_groups[0].update(lr=0.5, weight_decay=0.25)
        train(o, ps, [2])
    assert_same_training(params, optimizer, reference, plain)


def test_a_group_added_later(make):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params[:3]), CHUNK), make(reference[:3])
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps[:3], [0])
        o.add_param_group({"params": ps[3:], "lr": 0.3})
        train(o, ps, [1, 2])
    assert_same_training(params, optimizer, reference, plain)


def test_a_refused_group_leaves_no_trace():
    params = make_params()
    optimizer = CPUOffloadOptimizer(torch.optim.AdamW(params[:3]), CHUNK)
    with pytest.raises(ValueError, match="capturable"):
        optimizer.add_param_group({"params": params[3:], "capturable": True})
    assert len(optimizer.param_groups) == 1
    train(optimizer, params[:3], [0])


def test_zero_grad_both_ways(make):
    params = make_params()
    optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    set_grads(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_a_parameter_without_gradient_is_untouched_and_its_gradient_stays_none(make):
    params = make_params()
    optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    train(optimizer, params, [0])
    before = params[2].detach().clone()
    state = copy.deepcopy(dict(optimizer.state.get(params[2], {})))
    train(optimizer, params, [1], missing=lambda _: (2,))
    assert params[2].grad is None and torch.equal(params[2], before)
    for name, value in state.items():
        assert_same_values(optimizer.state[params[2]][name], value, name)


def test_grad_scaler_scales_and_skips(make):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))  # where it makes its state
        for step in range(4):
            set_grads(ps, step)
            unscaled = [p.grad.clone() for p in ps]
            for p in ps:
                p.grad.mul_(1024.0)
            if step == 2:
                ps[0].grad[0, 0] = float("inf")
            scaler.step(o)
            scaler.update(1024.0)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(ps, unscaled, strict=True))
    assert "found_inf" not in vars(optimizer.inner) and "grad_scale" not in vars(optimizer.inner)
    assert_same_training(params, optimizer, reference, plain)


def test_a_scaler_handed_to_the_step_divides_and_skips_as_it_does_without_offload():
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(MAKERS["fused_adam"](params), CHUNK), MAKERS["fused_adam"](reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        for step in range(3):
            set_grads(ps, step)
            unscaled = [p.grad.clone() for p in ps]
            for p in ps:
                p.grad.mul_(1024.0)
            if step == 1:
                ps[0].grad[0, 0] = float("inf")
            o.step(grad_scaler=scaler)
            scaler.update(1024.0)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(ps, unscaled, strict=True))
    assert optimizer.state[params[0]]["step"].item() == 2
    assert_same_training(params, optimizer, reference, plain)


# ---- copies ----


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself(make, how):
    params, reference = make_params("mixed"), make_params("mixed")
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    train(optimizer, params, range(2))
    train(plain, reference, range(4))
    if how == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = pickle.loads(pickle.dumps(optimizer))
    copied = [p for g in other.param_groups for p in g["params"]]
    train(other, copied, range(2, 4))
    assert_same_training(copied, other, reference, plain)
    assert other.step_chunk_bytes == CHUNK and other.strategy.store is not optimizer.strategy.store
    train(optimizer, params, range(2, 4))  # and the copy has not touched the original
    assert_same_training(params, optimizer, reference, plain)


def test_a_pickle_holds_each_state_once():
    params = make_params(shapes=[(1000,)] * 50)
    optimizer = CPUOffloadOptimizer(FusedAdam(params), CHUNK)
    train(optimizer, params, [0])
    for p in params:
        p.grad = None
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    needed = 50 * 1000 * 4 * 3
    assert needed < buffer.tell() < 1.2 * needed


def test_host_memory_goes_with_the_optimizer(make):
    params = make_params()
    optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    train(optimizer, params, [0])
    blocks = [weakref.ref(a.block) for b in optimizer.strategy.store.banks for a in b.arenas]
    del optimizer
    assert all(block() is None for block in blocks)


def test_autograd_notices_that_weights_were_written():
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam(params, master_weights=True), 3_000)
    loss = (params[0] ** 2).sum()
    versions = [p._version for p in params]
    train(optimizer, params, [0], missing=lambda _: (2,))
    assert [p._version > v for p, v in zip(params, versions, strict=True)] == [i != 2 for i in range(6)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
