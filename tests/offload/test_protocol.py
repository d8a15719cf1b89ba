"""It is a torch.optim.Optimizer: hooks, closures, schedulers, groups, scalers, copies, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .conftest import assert_same_training, assert_same_values, make_params, set_grads, train

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


class SignDescent(torch.optim.Optimizer):
    """A third party's: momentum made at once, updates counted in the group and on itself, may be told to fail."""

    def __init__(self, params, lr=0.1):
        self.calls, self.fail_at = 0, None
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                if self.fail_at is not None and p.numel() == self.fail_at:
                    p.add_(1000.0)
                    self.state[p]["momentum"].fill_(float("nan"))
                    raise ArithmeticError("told to fail")
                momentum = self.state[p]["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(momentum.sign() * group["lr"] / group["step"])


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
    optimizer = CPUOffloadOptimizer(inner, elementwise=True)
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


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_frozen_parameters_cost_nothing_and_train_when_they_are_unfrozen(name):
    shapes = [(1000,)] * 10
    params, reference = make_params(shapes=shapes), make_params(shapes=shapes)
    for ps in (params, reference):
        for p in ps[1:]:
            p.requires_grad_(False)
    optimizer, plain = CPUOffloadOptimizer(MAKERS[name](params), 20_000), MAKERS[name](reference)
    one = optimizer.host_state_bytes
    assert one == 2 * 1024 * 4
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0, 1], missing=lambda _: range(1, 10))
        for p in ps:
            p.requires_grad_(True)
        train(o, ps, [2, 3])
    assert optimizer.host_state_bytes == 10 * one
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_parameters_that_are_replaced_are_followed(name):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(MAKERS[name](params), 20_000), MAKERS[name](reference)
    size = optimizer.host_state_bytes
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        fresh = make_params(seed=4)
        o.param_groups[0]["params"][:] = fresh
        ps[:] = fresh
        train(o, ps, [1, 2])
    assert_same_training(params, optimizer, reference, plain)
    assert optimizer.host_state_bytes == size, "memory of parameters that are gone is kept"


@pytest.mark.parametrize("name", ["fused_adam", "adamw", "adamw_masters"])
@pytest.mark.parametrize("then", ["step", "save"])
def test_tensors_that_a_trainer_puts_in_the_state_are_taken_back(name, then):
    """Lightning, for one, replaces every state by a copy on the model's device."""
    make = (lambda p: FusedAdam(p, lr=0.1, master_weights=True)) if name == "adamw_masters" else MAKERS[name]
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        for p in ps:
            o.state[p] = {k: v.clone().mul_(2.0) for k, v in o.state[p].items()}
        if then == "step":
            train(o, ps, [2])
    saved = optimizer.state_dict()
    storages = {a.block.untyped_storage().data_ptr() for b in optimizer.units.store.banks for a in b.arenas}
    assert all(optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() in storages for p in params)
    for i, state in plain.state_dict()["state"].items():
        for key, value in state.items():
            assert_same_values(saved["state"][i][key], value, key)
    train(optimizer, params, range(3, 5))
    train(plain, reference, range(3, 5))
    assert_same_training(params, optimizer, reference, plain)
    for p in params:
        assert optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() in storages


def test_parameters_that_change_their_shape_in_place():
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 3_000), FusedAdam(reference, lr=0.1)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        for i in (0, 4):
            ps[i].data = torch.ones(5, 300 + i)
        train(o, ps, range(2, 4))
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_an_older_group_may_go_and_a_newer_one_stay(name):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(MAKERS[name](params[:3]), 20_000), MAKERS[name](reference[:3])
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps[:3], [0])
        o.add_param_group({"params": ps[3:]})
        train(o, ps, [1])
        ps[:3] = make_params(seed=4)[:3]
        o.param_groups[0]["params"][:] = ps[:3]
        train(o, ps, [2, 3])
    assert len(optimizer.units.store.banks) == 2
    assert_same_training(params, optimizer, reference, plain)


def test_grad_scaler_scales_and_skips(make):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))  # where it makes its state
        for step in range(4):
            set_grads(ps, step)
            for p in ps:
                p.grad.mul_(1024.0)
            if step == 2:
                ps[0].grad[0, 0] = float("inf")
            scaler.step(o)
            scaler.update(1024.0)
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
            for p in ps:
                p.grad.mul_(1024.0)
            if step == 1:
                ps[0].grad[0, 0] = float("inf")
            o.step(grad_scaler=scaler)
            scaler.update(1024.0)
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
    assert other.step_chunk_bytes == CHUNK and other.units.store is not optimizer.units.store
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
    blocks = [weakref.ref(a.block) for b in optimizer.units.store.banks for a in b.arenas]
    del optimizer
    gc.collect()
    assert all(block() is None for block in blocks)


# ---- third parties ----


def test_a_third_party_has_to_say_that_it_is_elementwise():
    with pytest.raises(ValueError, match=r"SignDescent.*elementwise=True"):
        CPUOffloadOptimizer(SignDescent(make_params()), CHUNK)
    with pytest.raises(ValueError, match=r"Adafactor.*elementwise=False"):
        CPUOffloadOptimizer(torch.optim.Adafactor(make_params()), CHUNK)
    with pytest.raises(ValueError, match="LBFGS"):
        CPUOffloadOptimizer(torch.optim.LBFGS(make_params()), elementwise=True)


@pytest.mark.parametrize(("chunk", "elementwise"), [(60_000, True), (None, True), (None, False)])
def test_what_a_third_party_counts_by_itself_is_counted_once_a_step(chunk, elementwise):
    params, reference = make_params(), make_params()
    optimizer = CPUOffloadOptimizer(SignDescent(params), chunk, elementwise=elementwise)
    plain = SignDescent(reference)
    if elementwise and chunk:
        assert len(optimizer.units.store.plan.chunks) > 1
    train(optimizer, params, range(4))
    train(plain, reference, range(4))
    assert optimizer.param_groups[0]["step"] == 4 and optimizer.inner.calls == 4
    assert_same_training(params, optimizer, reference, plain)


def test_a_chunk_sees_its_own_parameters_and_gradients_alone():
    """By the groups, and for an optimizer that keeps a list of its own, by the gradients."""
    seen = []

    class Watching(SignDescent):
        def __init__(self, params):
            super().__init__(params)
            self.mine = list(params)

        def step(self, closure=None):
            seen.append(
                (len(self.param_groups[0]["params"]), [i for i, p in enumerate(self.mine) if p.grad is not None])
            )
            super().step()

    params = make_params()
    optimizer = CPUOffloadOptimizer(Watching(params), CHUNK, elementwise=True)
    train(optimizer, params, [0])
    seen.clear()  # what the first step makes, it makes in chunks of its own
    train(optimizer, params, [1], missing=lambda _: (5,))
    assert len(seen) > 1
    assert sorted(i for _, grads in seen for i in grads) == [0, 1, 2, 3, 4]
    assert all(count == len(grads) for count, grads in seen)
    assert [p.grad is None for p in params] == [False] * 5 + [True]


def test_whoever_holds_a_parameters_state_goes_on_seeing_it():
    params = make_params()
    optimizer = CPUOffloadOptimizer(torch.optim.AdamW(params), CHUNK)
    train(optimizer, params, [0])
    held = optimizer.state[params[0]]
    moment = held["exp_avg"]
    before = moment.clone()
    train(optimizer, params, [1])
    assert optimizer.state[params[0]] is held and held["step"] == 2
    assert held["exp_avg"].data_ptr() == moment.data_ptr() and not torch.equal(moment, before)


def test_a_state_that_is_bound_anew_in_every_step_is_stored():
    class Rebinding(SignDescent):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["momentum"] = self.state[p].get("momentum", torch.zeros_like(p)) * 0.9 + p.grad
                    p.sub_(self.state[p]["momentum"] * 0.1)

    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(Rebinding(params), CHUNK, elementwise=True), Rebinding(reference)
    train(optimizer, params, range(3))
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)


def test_state_that_is_made_in_the_constructor_is_taken_over():
    class Eager(SignDescent):
        def __init__(self, params):
            super().__init__(params)
            for p in self.param_groups[0]["params"]:
                self.state[p]["momentum"] = torch.full_like(p, 0.5)

        def step(self, closure=None):
            assert all("momentum" in self.state[p] for p in self.param_groups[0]["params"])
            super().step()

    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(Eager(params), CHUNK, elementwise=True), Eager(reference)
    train(optimizer, params, range(3))
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)


def test_a_group_without_state_beside_one_with():
    params, reference = make_params(), make_params()

    def groups(ps):
        return [{"params": ps[:2]}, {"params": ps[2:4], "momentum": 0.9}, {"params": ps[4:]}]

    optimizer = CPUOffloadOptimizer(torch.optim.SGD(groups(params), lr=0.1), CHUNK)
    plain = torch.optim.SGD(groups(reference), lr=0.1)
    train(optimizer, params, range(3))
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)
    assert optimizer.host_state_bytes == (4096 + 256) * 4


def test_an_optimizer_that_is_not_elementwise_runs_in_one_pass():
    params, reference = make_params(), make_params()
    optimizer = CPUOffloadOptimizer(torch.optim.Adafactor(params), elementwise=False)
    plain = torch.optim.Adafactor(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        o.load_state_dict(o.state_dict())
        train(o, ps, range(2, 4))
    assert_same_training(params, optimizer, reference, plain)
    with pytest.raises(ValueError, match="one pass"):
        CPUOffloadOptimizer(torch.optim.Adafactor(make_params()), CHUNK, elementwise=False)


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_fails_in_the_middle_of_a_chunk_is_undone(step, elementwise):
    """The chunk's other parameters were updated already, the failing one and its state were spoilt."""
    params = make_params()
    optimizer = CPUOffloadOptimizer(SignDescent(params), None if not elementwise else 60_000, elementwise=elementwise)
    train(optimizer, params, range(step))
    before = [p.detach().clone() for p in params]
    states = [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in params]
    set_grads(params, step)
    grads = [p.grad for p in params]
    optimizer.inner.fail_at = params[3].numel()
    with pytest.raises(ArithmeticError, match="told to fail"):
        optimizer.step()
    optimizer.inner.fail_at = None
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert [len(g["params"]) for g in optimizer.param_groups] == [6]
    for p, old, state in zip(params[3:], before[3:], states[3:], strict=True):
        assert torch.equal(p, old)
        for name, value in state.items():
            assert_same_values(optimizer.state[p][name], value, name)
    optimizer.step()
    assert all(torch.isfinite(p).all() and p.abs().max() < 100 for p in params)


def test_state_that_appears_later_is_carried_along_with_a_warning():
    class Late(SignDescent):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and self.param_groups[0]["step"] > 1:
                    self.state[p]["slow"] = self.state[p].get("slow", torch.zeros_like(p)) + p

    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(Late(params), CHUNK, elementwise=True), Late(reference)
    train(plain, reference, range(4))
    with pytest.warns(RuntimeWarning, match="'slow'"):
        train(optimizer, params, range(4))
    assert_same_training(params, optimizer, reference, plain)


# ---- refusals ----


def test_capturable_and_differentiable_are_refused_by_name():
    with pytest.raises(ValueError, match="FusedAdam: capturable=True"):
        CPUOffloadOptimizer(FusedAdam(make_params(), capturable=True))
    with pytest.raises(ValueError, match="AdamW: capturable=True"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params(), capturable=True))
    with pytest.raises(ValueError, match="differentiable=True"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params(), differentiable=True))


@pytest.mark.parametrize(("bytes_", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_budget_that_is_no_number_of_bytes_is_refused(bytes_, error):
    inner = FusedAdam(make_params())
    form = inner.form
    with pytest.raises(error, match="step_chunk_bytes"):
        CPUOffloadOptimizer(inner, bytes_)
    assert inner.form is form, "a refused optimizer was changed"


def test_only_an_optimizer_and_only_once():
    with pytest.raises(TypeError, match="not a torch"):
        CPUOffloadOptimizer(make_params())
    with pytest.raises(TypeError, match="already"):
        CPUOffloadOptimizer(CPUOffloadOptimizer(FusedAdam(make_params())))


def test_parameters_on_two_devices_are_refused():
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(3, device=d)) for d in ("cpu", "cuda:0")]
        inner = torch.optim.AdamW([{"params": [p]} for p in params])
    with pytest.raises(ValueError, match="on cpu, cuda:0"):
        CPUOffloadOptimizer(inner)


def test_a_bad_gradient_is_refused_before_anything_changes():
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam(params), CHUNK)
    train(optimizer, params, [0])
    before = [p.detach().clone() for p in params]
    set_grads(params, 1)
    params[4].grad = torch.sparse_coo_tensor([[0]], [1.0], (1000,)).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    train(optimizer, params, [1])


def test_a_parameter_larger_than_the_budget_is_reported_with_both_numbers():
    with pytest.warns(RuntimeWarning, match=r"step_chunk_bytes=5000 .*, the largest 49152 bytes"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params()), 5000)


@pytest.mark.parametrize("swap", [True, False])
def test_meta_parameters_that_become_real_later(swap, monkeypatch):
    """In place, or as new parameters that are put in the groups."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    with torch.device("meta"):
        model = torch.nn.Linear(20, 30).to(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam(model.parameters(), lr=0.1, master_weights=True), 3000)
    reference = torch.nn.Linear(20, 30).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    params, others = list(model.parameters()), list(reference.parameters())
    if not swap:
        optimizer.param_groups[0]["params"][:] = params
    plain = FusedAdam(others, lr=0.1, master_weights=True)
    train(optimizer, params, range(3))
    train(plain, others, range(3))
    assert_same_training(params, optimizer, others, plain)


def test_autograd_notices_that_weights_were_written():
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam(params, master_weights=True), 3_000)
    loss = (params[0] ** 2).sum()
    versions = [p._version for p in params]
    train(optimizer, params, [0], missing=lambda _: (2,))
    assert [p._version > v for p, v in zip(params, versions, strict=True)] == [i != 2 for i in range(6)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
