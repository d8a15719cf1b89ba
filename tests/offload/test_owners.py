"""One owner: of a parameter's gradients, of an optimizer's state, of its step. Second optimizers, closing, swapped
tensors, steps that someone replaced."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import warnings

import pytest
import torch
from helpers.devices import Beyond
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline
from statestream.device.host_memory import HostMemory
from statestream.offload import optimizer as optimizer_module
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.optim import lr_scheduler

from .conftest import Pinning, assert_same_training, make_params, train
from .makers import OPTIMIZERS

TAKEN = "another optimizer has taken over the gradients of"
WARNED = "a CPUOffloadOptimizer that offloads the gradients of"


@pytest.fixture(autouse=True)
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["in place", "copied"])
def where(request, on_device):
    if request.param == "copied":
        on_device(Beyond())


def backward(params, number: int = 0) -> None:
    generator = torch.Generator().manual_seed(number)
    sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()


def offloading(params, **options) -> CPUOffloadOptimizer:
    return CPUOffloadOptimizer(FusedAdam(params, lr=0.1, **options), 5_000, offload_gradients=True)


SECONDS = {
    "offloading gradients": offloading,
    "in host memory": lambda params: CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 5_000),
    "plain": lambda params: FusedAdam(params, lr=0.1),
    "an AdamW in host memory": lambda params: CPUOffloadOptimizer(torch.optim.AdamW(params, lr=0.1)),
    "in one pass": lambda params: CPUOffloadOptimizer(torch.optim.AdamW(params, lr=0.1), per_parameter=False),
}


def hooks_on(params) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in params)


def assert_trains(optimizer, params, make, numbers=range(3)) -> None:
    """From here on like one that is alone in the world."""
    reference = [Parameter(p.detach().clone()) for p in params]
    plain = make(reference)
    for number in numbers:
        for each, own in ((optimizer, params), (plain, reference)):
            backward(own, number)
            each.step()
            each.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(params, reference, strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(params, make_params(), strict=True))


# ---- a second optimizer over the same parameters ----


@pytest.mark.parametrize("second", SECONDS)
def test_the_second_takes_over_with_one_warning_and_the_first_refuses_by_name(second, where):
    params = make_params()
    first = offloading(params)
    backward(params)
    with pytest.warns(RuntimeWarning, match=WARNED + ".* and 5 more is still there.*close") as caught:
        newer = SECONDS[second](params)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert_trains(newer, params, SECONDS[second])
    before = [p.detach().clone() for p in params]
    for call in (first.step, lambda: first.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=f"{TAKEN} parameter 0 of group 0 and 5 more"):
            call()
    first.zero_grad()
    first.load_state_dict(first.state_dict())
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert_trains(newer, params, lambda ps: copied_over(SECONDS[second], newer, ps), range(3, 5))
    newer = None  # then the first is alone, and goes on
    first.zero_grad()
    assert_trains(first, params, lambda ps: copied_over(offloading, first, ps), range(5, 7))


@pytest.mark.parametrize("second", [name for name in SECONDS if name != "offloading gradients"])
def test_a_third_one_that_offloads_takes_over_from_one_that_does_not(second, where):
    params = make_params()
    first = offloading(params)
    with pytest.warns(RuntimeWarning, match=WARNED):
        newer = SECONDS[second](params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no gradients are lost: the second had taken none away
        third = offloading(params)
    assert_trains(third, params, offloading)
    with pytest.raises(RuntimeError, match=TAKEN):
        first.step()
    del newer


def copied_over(make, optimizer, params):
    other = make(params)
    other.load_state_dict(optimizer.state_dict())
    return other


def test_a_notebook_cell_that_is_run_twice(where):
    model = nn.Linear(20, 30)
    optimizer = offloading(model.parameters())
    with pytest.warns(RuntimeWarning, match=WARNED):
        optimizer = offloading(model.parameters())
    before = model.weight.detach().clone()
    model(torch.ones(2, 20)).sum().backward()
    assert model.weight.grad is None
    optimizer.step()
    assert not torch.equal(model.weight, before) and hooks_on(model.parameters()) == 2


@pytest.mark.parametrize("second", [*SECONDS, "torch's own"])
def test_a_first_one_that_is_gone_leaves_no_hook_and_no_warning(second, where, recwarn):
    params = make_params()
    first = offloading(params)
    backward(params)
    first.step()
    del first
    assert hooks_on(params) == 0
    make = SECONDS.get(second, lambda ps: torch.optim.AdamW(ps, lr=0.1))
    assert_trains(make(params), params, make)
    assert not [w for w in recwarn if "still there" in str(w.message)]


def test_of_parameters_that_are_shared_in_part_those_move(where):
    params = make_params()
    first = offloading(params[:4])
    with pytest.warns(RuntimeWarning, match="parameter 0 of group 0 and 1 more"):
        second = offloading(params[2:])
    backward(params)
    assert all(p.grad is None for p in params)
    with pytest.raises(RuntimeError, match=f"{TAKEN} parameter 2 of group 0 and 1 more"):
        first.step()
    weights = [p.detach().clone() for p in params]
    second.step()
    assert [torch.equal(p, w) for p, w in zip(params, weights, strict=True)] == [True, True, *[False] * 4]
    del first.param_groups[0]["params"][2:]  # with what is its own it goes on
    first.step()
    assert not any(torch.equal(p, w) for p, w in zip(params, weights, strict=True))


@pytest.mark.parametrize("second", ["plain", "in host memory", "offloading gradients"])
def test_a_group_that_is_added_is_taken_over(second):
    params = make_params()
    first, newer = offloading(params[:3]), SECONDS[second](params[3:])
    with pytest.raises(TypeError):
        newer.add_param_group({"params": [*params[:3], "no tensor"]})
    backward(params)
    first.step()
    with pytest.warns(RuntimeWarning, match="and 2 more is still there"):
        newer.add_param_group({"params": params[:3]})
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = None
    backward(params)
    newer.step()
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    with pytest.raises(RuntimeError, match=TAKEN):
        first.step()


def test_a_second_one_that_cannot_be_built_takes_nothing_over(monkeypatch):
    params = make_params()
    first = offloading(params)
    with pytest.raises(ValueError, match="lr"):
        FusedAdam([{"params": params[:2]}, {"params": params[2:], "lr": -1.0}])
    monkeypatch.setattr(HostMemory, "block", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
    with warnings.catch_warnings(), pytest.raises(OSError, match="no memory"):
        warnings.simplefilter("ignore")
        offloading(params)
    monkeypatch.undo()
    first.zero_grad()
    assert_trains(first, params, offloading)


def test_an_older_one_that_offloads_nothing_says_why_it_has_no_gradients():
    params = make_params()
    older = {name: make(params) for name, make in SECONDS.items() if name != "offloading gradients"}
    optimizer = offloading(params)
    backward(params)
    for each in older.values():
        with pytest.raises(RuntimeError, match=TAKEN):
            each.step()
    optimizer.step()


def test_two_that_offload_nothing_share_gradients_as_torchs_do(recwarn):
    params = make_params()
    pair = [FusedAdam(params, lr=0.1), CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 5_000)]
    backward(params)
    for optimizer in pair:
        before = params[0].detach().clone()
        optimizer.step()
        assert not torch.equal(params[0], before)
    assert hooks_on(params) == 0 and not list(recwarn)


def test_of_three_the_first_stays_refused_and_the_others_share():
    params = make_params()
    first = offloading(params)
    with pytest.warns(RuntimeWarning, match=WARNED):
        others = [FusedAdam(params, lr=0.1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others.append(FusedAdam(params, lr=0.1))
    backward(params)
    for optimizer in others:
        before = params[0].detach().clone()
        optimizer.step()
        assert not torch.equal(params[0], before)
    with pytest.raises(RuntimeError, match=TAKEN):
        first.step()


def test_a_parameter_that_leaves_its_group_keeps_its_gradient(where):
    params = make_params()
    optimizer = offloading(params)
    backward(params)
    optimizer.param_groups[0]["params"].pop(2)
    optimizer.step()
    assert [bool(p._post_accumulate_grad_hooks) for p in params] == [True, True, False, True, True, True]
    backward(params)
    assert [p.grad is None for p in params] == [True, True, False, True, True, True]


# ---- close() ----


def test_closing_gives_back_hooks_and_memory_whoever_holds_the_optimizer(monkeypatch, recwarn):
    pinning = Pinning()
    device = Beyond()
    device.memory = HostMemory(pinning.pin, pinning.unpin)
    monkeypatch.setattr(optimizer_module, "device_for", lambda _: device)
    params = make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 5_000, cpu_fraction=0.5, offload_gradients=True)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(params)
    optimizer.step()
    backward(params)
    assert pinning.pinned and hooks_on(params)
    optimizer.close()
    optimizer.close()
    assert not pinning.pinned and hooks_on(params) == 0
    monkeypatch.undo()
    assert_trains(torch.optim.AdamW(params, lr=0.1), params, lambda ps: torch.optim.AdamW(ps, lr=0.1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0005 and "FusedAdam" in repr(optimizer)
    assert not [w for w in recwarn if "still there" in str(w.message)]


@pytest.mark.parametrize("make", [*map(OPTIMIZERS.get, ["fused_adam", "fused_adam_fp8", "adamw"]), torch.optim.Muon])
def test_after_closing_every_call_is_refused_by_name(make):
    params = make_params(shapes=[(30, 20), (20, 10)])
    optimizer = CPUOffloadOptimizer(make(params))
    train(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    before = [p.detach().clone() for p in params]
    calls = {
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "state": lambda: optimizer.state,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "add_param_group": lambda: optimizer.add_param_group({"params": make_params(shapes=[(5, 5)])}),
        "memory_report": optimizer.memory_report,
        "plan": lambda: optimizer.plan,
        "deepcopy": lambda: copy.deepcopy(optimizer),
        "pickle": lambda: pickle.dumps(optimizer),
        "Timeline": lambda: Timeline(optimizer),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match="this CPUOffloadOptimizer was closed"):
            pytest.fail(f"{name} gave {call()}")
    inner = optimizer.inner
    for call in (inner.step, inner.state_dict, lambda: inner.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=f"this {type(inner).__name__} has no state any more"):
            call()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    resumed = CPUOffloadOptimizer(make(params))
    resumed.load_state_dict(saved)
    train(resumed, params, [1])


def test_closing_one_that_was_taken_over_leaves_the_others_state():
    params, reference = make_params(), make_params()
    first, plain = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 5_000), FusedAdam(reference, lr=0.1)
    train(first, params, [0])
    second = CPUOffloadOptimizer(first.inner, 9_000)
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    first.close()
    train(second, params, [1])
    train(plain, reference, range(2))
    assert_same_training(params, second, reference, plain)


# ---- hooks go where the tensor goes ----


def swapped(params, dtype=None):
    for param in params:
        torch.utils.swap_tensors(param, Parameter(param.detach().to(dtype or param.dtype).clone()))


LOOKS = {
    "step": lambda optimizer: optimizer.step(),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.inner.state_dict())),
}


@pytest.mark.parametrize("look", LOOKS)
def test_hooks_that_a_swap_of_tensors_left_behind_are_put_back_at_the_next_look(look, where):
    params = make_params()
    optimizer = offloading(params)
    backward(params)
    optimizer.step()
    swapped(params)
    LOOKS[look](optimizer)
    backward(params)
    assert all(p.grad is None for p in params)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_control_a_swap_of_tensors_takes_hooks_along():
    params = make_params()
    optimizer = offloading(params)
    swapped(params)
    backward(params)
    assert hooks_on(params) == 6 and all(p.grad is not None for p in params)
    optimizer.close()


@pytest.mark.parametrize("swap_between_micro_batches", [False, True])
def test_gradients_that_came_while_hooks_were_off_are_in_the_step(swap_between_micro_batches, where):
    params, reference = make_params(), make_params()
    optimizer, plain = offloading(params), FusedAdam(reference, lr=0.1)
    kept = []  # or another tensor might be where one was
    for number in range(2):
        if not swap_between_micro_batches or number:
            for param in params:
                kept.append(Parameter(param.detach().clone()))
                torch.utils.swap_tensors(param, kept[-1])
        backward(params, number)
        backward(reference, number)
        if not swap_between_micro_batches:
            optimizer.step()
            plain.step()
            plain.zero_grad()
    if swap_between_micro_batches:
        optimizer.step()
        plain.step()
    assert_same_training(params, optimizer, reference, plain)


def test_a_hook_that_went_to_a_strangers_tensor_takes_nothing_from_it():
    params, stranger = make_params(), Parameter(torch.ones(100, 33))
    optimizer = offloading(params)
    torch.utils.swap_tensors(params[0], stranger)
    optimizer.zero_grad()
    backward([stranger])
    assert stranger.grad is not None
    backward(params)
    assert all(p.grad is None for p in params)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("change", ["to_empty", "bfloat16"])
def test_hooks_of_sharded_parameters_come_back(change, mesh):
    with torch.device("meta" if change == "to_empty" else "cpu"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = offloading(model.parameters(), master_weights=True)
    model.to_empty(device="cpu") if change == "to_empty" else model.to(torch.bfloat16)
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 16, dtype=model[0].weight.dtype)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert all(optimizer.state[p]["step"] == number + 1 for p in model.parameters())


def test_swapped_dtensors_can_be_swapped_again(mesh):
    """torch refuses to swap a tensor that is weakly referred to."""
    params = [Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))]
    optimizer = offloading(params)
    for _ in range(2):
        params[0].square().sum().backward()
        optimizer.step()
        swapped(params)
    optimizer.zero_grad()
    params[0].square().sum().backward()
    assert params[0].grad is None


# ---- steps that someone replaced ----


class StepsTwice(FusedAdam):
    def step(self, closure=None):
        super().step()
        return super().step(closure)


class SparesMasters(FusedAdam):
    def refresh_masters(self):
        pass


class OnlyNamed(FusedAdam):
    """Has nothing that streaming would leave out."""

    updates = 0

    def update(self, grad_scale=None, found_inf=None):
        self.updates += 1
        super().update(grad_scale, found_inf)

    def zero_grad(self, set_to_none=None):
        self.zeroed = True
        super().zero_grad(set_to_none)


def test_a_subclass_whose_own_step_would_be_left_out_is_refused_by_name():
    params = make_params()
    with pytest.raises(ValueError, match=r"StepsTwice overrides step of FusedAdam.*hooks"):
        CPUOffloadOptimizer(StepsTwice(params))
    with pytest.raises(ValueError, match="SparesMasters overrides refresh_masters of FusedAdam"):
        CPUOffloadOptimizer(SparesMasters(params))
    optimizer = CPUOffloadOptimizer(OnlyNamed(params, lr=0.1))
    optimizer.zero_grad()
    assert optimizer.inner.zeroed
    assert_trains(optimizer, params, lambda ps: FusedAdam(ps, lr=0.1))
    assert optimizer.inner.updates > 0


def wrapped(optimizer):
    """As trainers do that average weights after each step."""
    step = optimizer.step

    @functools.wraps(step)
    def averaging(*args, **kwargs):
        return step(*args, **kwargs)

    optimizer.step = averaging


def bound(optimizer):
    def step(self, closure=None):
        pass

    optimizer.step = types.MethodType(step, optimizer)


def bound_and_scheduled(optimizer):
    bound(optimizer)
    lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("patch", [wrapped, bound, bound_and_scheduled])
@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_a_step_that_was_replaced_on_the_object_is_refused_by_name(name, patch):
    params = make_params()
    inner = OPTIMIZERS[name](params)
    patch(inner)
    refused = f"step of this {type(inner).__name__} was replaced on the object, by .*step|averaging"
    with pytest.raises(ValueError, match=refused):
        CPUOffloadOptimizer(inner)
    del inner.step
    optimizer = CPUOffloadOptimizer(inner)
    patch(inner)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=refused):
        train(optimizer, params, [0])
    assert torch.equal(params[0], before)


def as_accelerate_does(optimizer):
    optimizer.step = optimizer.step


def scheduled(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def scheduled_twice(optimizer):
    lr_scheduler.ConstantLR(optimizer, 1.0)
    return scheduled(optimizer)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("patch", [scheduled, scheduled_twice, as_accelerate_does])
@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_what_only_counts_a_step_goes_on_working(name, patch, after, recwarn):
    params, reference = make_params(), make_params()
    plain = OPTIMIZERS[name](reference)
    inner = OPTIMIZERS[name](params)
    schedulers = [patch(plain), None if after else patch(inner)]
    optimizer = CPUOffloadOptimizer(inner, None)
    schedulers[1] = patch(inner) if after else schedulers[1]
    for step in range(3):
        train(optimizer, params, [step])
        train(plain, reference, [step])
        for scheduler in filter(None, schedulers):
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same_training(params, optimizer, reference, plain)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


# ---- the optimizer inside ----


@pytest.fixture(params=["fused_adam", "fused_adam_fp8", "adamw", "sgd_momentum"])
def pair(request):
    params = make_params()
    inner = OPTIMIZERS[request.param](params)
    inner.ran = []
    inner.register_step_pre_hook(lambda *_: inner.ran.append(1))
    return params, inner, CPUOffloadOptimizer(inner, None)


def test_the_optimizer_inside_steps_and_loads_only_through_the_one_over_it(pair):
    params, inner, optimizer = pair
    train(optimizer, params, [0])
    before = [p.detach().clone() for p in params]
    name, state = type(inner).__name__, copy.deepcopy(optimizer.state_dict())
    scheduler = lr_scheduler.ExponentialLR(inner, 0.5)
    inner.ran.clear()
    with pytest.raises(RuntimeError, match=rf"step\(\) of this {name}: its state is in host memory.*over it"):
        train(inner, params, [1])
    with pytest.raises(RuntimeError, match=rf"load_state_dict\(\) of this {name}"):
        inner.load_state_dict(state)
    assert not inner.ran and all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    train(optimizer, params, [1])
    scheduler.step()
    assert inner.ran == [1]


def test_the_optimizer_inside_steps_by_itself_when_the_one_over_it_is_gone():
    params = make_params()
    inner = FusedAdam(params, lr=0.1)
    train(CPUOffloadOptimizer(inner, None), params, [0])
    train(inner, params, [1])
    inner.load_state_dict(inner.state_dict())
    assert inner.state[params[0]]["step"] == 2


def test_what_the_optimizer_inside_saves_is_what_the_one_over_it_saves(pair):
    params, inner, optimizer = pair
    train(optimizer, params, [0])
    theirs, mine = inner.state_dict(), optimizer.state_dict()
    assert theirs.keys() == mine.keys() and theirs["param_groups"] == mine["param_groups"]
    for number, state in mine["state"].items():
        assert all(torch.equal(torch.as_tensor(v), theirs["state"][number][k]) for k, v in state.items())


def test_a_group_added_to_the_optimizer_inside_trains():
    params, reference = make_params(), make_params()
    optimizer, plain = offloading(params[:4]), FusedAdam(reference[:4], lr=0.1)
    backward(params)
    optimizer.step()
    backward(reference)
    for p in reference[4:]:
        p.grad = None
    plain.step()
    plain.zero_grad()
    for p in params:
        p.grad = None
    optimizer.inner.add_param_group({"params": params[4:]})
    plain.add_param_group({"params": reference[4:]})
    for number in range(2):
        for each, own in ((optimizer, params), (plain, reference)):
            backward(own, number)
            each.step()
            each.zero_grad()
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "detached"])
@pytest.mark.parametrize("of_inner", [False, True])
def test_copies_step_by_themselves(how, of_inner, pair):
    params, inner, optimizer = pair
    lr_scheduler.ExponentialLR(inner, 0.5)
    train(optimizer, params, [0])
    source = inner if of_inner else optimizer
    if how == "detached":
        twin = optimizer.strategy.detached()
    else:
        twin = copy.deepcopy(source) if how == "deepcopy" else pickle.loads(pickle.dumps(source))
    own = [p for group in twin.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in own]
    train(twin, own, [1])
    assert not any(torch.equal(p, b) for p, b in zip(own, before, strict=True))
    if how != "detached":  # which shares parameters
        train(optimizer, params, [1])
        assert_same_training(params, optimizer, own, twin)


def test_a_third_partys_step_may_call_its_base_classs(recwarn):
    class Base(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)

    params, reference = make_params(), make_params()
    optimizer = CPUOffloadOptimizer(Base(params, lr=0.1, momentum=0.9), None, per_parameter=True)
    plain = torch.optim.SGD(reference, lr=0.1, momentum=0.9)
    for each, own in ((optimizer, params), (plain, reference)):
        train(each, own, range(3))
    assert_same_training(params, optimizer, reference, plain)
