"""Inputs and uses that nobody planned for: right, as the optimizer itself would have it, or one clear error."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.nn import Parameter

from .conftest import assert_same_training, make_params, set_grads, train

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, master_weights=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
CHUNK = 3_000


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def make_for_later(make):
    """Of the makers those whose optimizer takes parameters that are added later: Adagrad of torch 2.9 does not."""
    optimizer, added = make([Parameter(torch.ones(1))]), Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        pytest.skip("torch's own optimizer fails too")
    return make


class Pair:
    """An offloaded optimizer and the plain one, each on parameters of its own."""

    def __init__(self, make, params=make_params):
        self.params, self.reference = params(), params()
        self.optimizer, self.plain = CPUOffloadOptimizer(make(self.params), CHUNK), make(self.reference)

    def both(self):
        return (self.optimizer, self.params), (self.plain, self.reference)

    def train(self, steps):
        for optimizer, params in self.both():
            train(optimizer, params, steps)

    def judge(self):
        assert_same_training(self.params, self.optimizer, self.reference, self.plain)


# ---- parameters ----


def test_parameters_without_dimensions_of_one_element_and_of_none(make):
    pair = Pair(make, lambda: make_params(shapes=[(), (1,), (0,), (5,), (3, 0)]))
    pair.train(range(3))
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.train(range(3, 5))
    pair.judge()


def test_views_of_one_buffer_as_parameters_and_as_gradients(make):
    def views():
        whole = torch.randn(5000, generator=torch.Generator().manual_seed(1))
        return [Parameter(whole[a:b]) for a, b in ((0, 2000), (2000, 2100), (2100, 5000))]

    pair = Pair(make, views)
    for step in range(3):
        gradients = torch.randn(5000, generator=torch.Generator().manual_seed(step))
        for optimizer, params in pair.both():
            for p, (a, b) in zip(params, ((0, 2000), (2000, 2100), (2100, 5000)), strict=True):
                p.grad = gradients.clone()[a:b]
            optimizer.step()
    pair.judge()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice_is_stepped_as_the_optimizer_steps_it(make):
    pair = Pair(lambda p: make([*p, p[0]]))
    pair.train(range(3))
    pair.judge()


def test_a_tied_weight_has_one_state(make):
    def tied(build):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
        model[1].weight = model[0].weight
        optimizer = build(model.parameters())
        for step in range(3):
            model(torch.full((2, 20), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), optimizer

    params, optimizer = tied(lambda p: CPUOffloadOptimizer(make(p), CHUNK))
    assert len(params) == 3
    assert_same_training(params, optimizer, *tied(make))


def test_a_parameter_in_two_groups_is_refused_and_leaves_no_trace(make):
    pair = Pair(make)
    with pytest.raises(ValueError, match=r"more than one|another"):
        pair.optimizer.add_param_group({"params": [pair.params[0]]})
    assert len(pair.optimizer.param_groups) == 1
    pair.train(range(2))
    pair.judge()


def test_complex_parameters_go_on_or_are_refused_by_name(make, request):
    def params():
        return [Parameter(torch.randn(40, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)))]

    if "fused_adam" in request.node.name:
        for optimizer, ps in Pair(make, params).both():
            ps[0].grad = torch.ones(40, 3, dtype=torch.complex64)
            with pytest.raises(ValueError, match="parameter 0 of group 0: complex"):
                optimizer.step()
        return
    pair = Pair(make, params)
    for step in range(4):
        for optimizer, ps in pair.both():
            ps[0].grad = torch.randn(40, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        if step == 1:
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.judge()


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "adagrad"])
def test_parameters_of_float16_and_float64(name):
    def params():
        half, double = make_params(torch.float16, [(50, 20)]), make_params(torch.float64, [(7,)])
        return [*half, *double]

    pair = Pair(MAKERS[name], params)
    pair.train(range(3))
    pair.judge()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(make, request):
    """Adagrad takes them; the others refuse them or make sparse state, and say so, with nothing changed."""

    def embedding():
        torch.manual_seed(0)
        return torch.nn.Embedding(50, 8, sparse=True)

    models = [embedding(), embedding()]
    optimizer, plain = CPUOffloadOptimizer(make(models[0].parameters()), CHUNK), make(models[1].parameters())
    takes_them = "adagrad" in request.node.name
    refusal = "only dense state is streamed" if "sgd" in request.node.name else "not support sparse"
    for step in range(3):
        for model in models:
            model.weight.grad = None
            model(torch.tensor([1, 3, 5, step])).square().sum().backward()
        if takes_them:
            plain.step()
            optimizer.step()
            continue
        gradient = models[0].weight.grad
        with pytest.raises((RuntimeError, ValueError), match=refusal):
            optimizer.step()
        assert models[0].weight.grad is gradient
    assert torch.equal(models[0].weight, models[1].weight)


# ---- modes and threads ----


def test_built_in_inference_mode_it_trains_outside_of_it(make):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    with torch.inference_mode():
        optimizer = CPUOffloadOptimizer(make(params), CHUNK)
    plain = make(reference)
    train(optimizer, params, range(2))
    train(plain, reference, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, params, [2])
    train(plain, reference, [2])
    assert_same_training(params, optimizer, reference, plain)


def test_saved_and_loaded_in_inference_mode(make):
    pair = Pair(make)
    pair.train([0])
    with torch.inference_mode():
        saved = pair.optimizer.state_dict()
        pair.optimizer.load_state_dict(saved)
    pair.train([1])
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.train([2])
    pair.judge()


def test_memory_that_is_taken_in_inference_mode_serves_outside_of_it(make_for_later):
    """For a group that is added, and for parameters that have their first gradient, or state to load."""
    params, reference = make_params(), make_params()
    for p in (params[1], params[2], reference[1], reference[2]):
        p.requires_grad_(False)
    optimizer, plain = CPUOffloadOptimizer(make_for_later(params[:3]), CHUNK), make_for_later(reference[:3])
    with torch.inference_mode():
        optimizer.add_param_group({"params": params[3:]})
    plain.add_param_group({"params": reference[3:]})
    train(optimizer, params, [0], lambda _: (1, 2))
    train(plain, reference, [0], lambda _: (1, 2))
    saved, other = optimizer.state_dict(), make_for_later(make_params())
    train(other, other.param_groups[0]["params"], [0])
    saved["state"][1] = other.state_dict()["state"][1]
    with torch.inference_mode():
        optimizer.load_state_dict(saved)
    plain.load_state_dict(saved)
    set_grads(params, 1)
    set_grads(reference, 1)
    if isinstance(plain, FusedAdam):  # torch's own cannot go on from a first step in inference mode
        with torch.inference_mode():
            optimizer.step()
    else:
        optimizer.step()
    plain.step()
    train(optimizer, params, [2])
    train(plain, reference, [2])
    assert_same_training(params, optimizer, reference, plain)


def test_a_fused_adam_may_step_in_inference_mode_first_and_outside_later():
    pair = Pair(MAKERS["fused_adam"], lambda: make_params(torch.bfloat16))
    with torch.inference_mode():
        pair.train([0])
    pair.train([1])
    pair.judge()


def test_threads_step_optimizers_of_their_own(make):
    failures = []

    def work(seed):
        try:
            pair = Pair(make, lambda: make_params(seed=seed))
            pair.train(range(5))
            pair.judge()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_each_step_in_a_thread_of_its_own(make):
    pair = Pair(make)
    for step in range(3):
        set_grads(pair.params, step)
        thread = threading.Thread(target=pair.optimizer.step)
        thread.start()
        thread.join()
    train(pair.plain, pair.reference, range(3))
    pair.judge()


# ---- hooks and closures that do things ----


def test_a_hook_that_changes_the_learning_rate_changes_this_step(make):
    pair = Pair(make)
    for optimizer, _ in pair.both():
        optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.5))
    pair.train(range(3))
    pair.judge()


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_adds_a_group_in_the_middle_of_a_step(make_for_later, when):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make_for_later(params[:3]), CHUNK), make_for_later(reference[:3])

    def adding(rest):
        def hook(o, *_):
            if len(o.param_groups) == 1:
                o.add_param_group({"params": rest, "lr": 0.3})

        return hook

    for o, rest in ((optimizer, params[3:]), (plain, reference[3:])):
        register = o.register_step_pre_hook if when == "pre" else o.register_step_post_hook
        register(adding(rest))
    train(optimizer, params, range(3))
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)


def test_a_group_that_was_added_to_the_inner_optimizer(make_for_later):
    params, reference = make_params(), make_params()
    inner, plain = make_for_later(params[:3]), make_for_later(reference[:3])
    optimizer = CPUOffloadOptimizer(inner, CHUNK)
    train(optimizer, params[:3], [0])
    train(plain, reference[:3], [0])
    inner.add_param_group({"params": params[3:]})
    plain.add_param_group({"params": reference[3:]})
    optimizer.state_dict()
    train(optimizer, params, range(1, 3))
    train(plain, reference, range(1, 3))
    assert_same_training(params, optimizer, reference, plain)


def test_hooks_that_save_and_load(make):
    pair = Pair(make)
    pair.train([0])
    exports = []
    for optimizer, _ in pair.both():
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.register_step_pre_hook(lambda o, *_: exports.append(o.state_dict()))
        optimizer.register_step_post_hook(lambda o, *_, saved=saved: o.load_state_dict(copy.deepcopy(saved)))
    pair.train([1, 2])
    pair.judge()


def test_a_copy_made_in_the_middle_of_a_step(make):
    pair = Pair(make)
    copies = []
    handle = pair.optimizer.register_step_post_hook(lambda o, *_: copies.append(copy.deepcopy(o)))
    train(pair.optimizer, pair.params, [0])
    handle.remove()
    (other,) = copies
    params = [p for group in other.param_groups for p in group["params"]]
    train(other, params, range(1, 3))
    train(pair.plain, pair.reference, range(3))
    assert_same_training(params, other, pair.reference, pair.plain)


def test_a_closure_that_clears_the_gradients(make):
    pair = Pair(make)
    for _ in range(3):
        for optimizer, params in pair.both():

            def closure(optimizer=optimizer, params=params):
                optimizer.zero_grad()
                loss = sum(((p - 1) ** 2).sum() for p in params)
                loss.backward()
                return loss

            optimizer.step(closure)
    pair.judge()
    set_grads(pair.params, 0)
    before = [p.detach().clone() for p in pair.params]
    pair.optimizer.step(pair.optimizer.zero_grad)
    assert all(torch.equal(p, old) for p, old in zip(pair.params, before, strict=True))


# ---- groups and state that others change ----


def test_empty_groups(make):
    pair = Pair(lambda p: make([{"params": []}, {"params": p}, {"params": []}]))
    pair.train(range(3))
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.train([3])
    pair.judge()
    for mine, theirs in zip(pair.optimizer.param_groups, pair.plain.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_nothing_but_an_empty_group(make_for_later):
    optimizer = CPUOffloadOptimizer(make_for_later([{"params": []}]), CHUNK)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer = copy.deepcopy(optimizer)
    params = make_params()
    optimizer.add_param_group({"params": params})
    train(optimizer, params, [0])
    assert optimizer.plan.host_bytes > 0


def test_named_parameters(make):
    def models():
        torch.manual_seed(0)
        return list(torch.nn.Linear(20, 30).named_parameters())

    mine, theirs = models(), models()
    optimizer, plain = CPUOffloadOptimizer(make(mine), CHUNK), make(theirs)
    params, reference = [p for _, p in mine], [p for _, p in theirs]
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(saved)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [2])
    assert_same_training(params, optimizer, reference, plain)


def test_a_parameter_that_leaves_its_group_and_comes_back(make):
    pair = Pair(make)
    pair.train([0])
    for optimizer, params in pair.both():
        left = optimizer.param_groups[0]["params"].pop(2)
        train(optimizer, params, [1])
        optimizer.param_groups[0]["params"].append(left)
    pair.train([2])
    pair.judge()


@pytest.mark.parametrize("name", ["fused_adam", "adamw", "sgd_momentum"])
def test_state_that_is_cleared_or_taken_out_begins_anew(name):
    pair = Pair(MAKERS[name])
    pair.train([0])
    for optimizer, params in pair.both():
        optimizer.state.pop(params[2])
    pair.train([1])
    pair.judge()
    for optimizer, _ in pair.both():
        optimizer.state.clear()
    pair.train([2])
    pair.judge()


def test_built_again_over_the_same_optimizer_it_goes_on(make):
    """As one does who wants another budget."""
    pair = Pair(make)
    pair.train([0])
    old, pair.optimizer = pair.optimizer, CPUOffloadOptimizer(pair.optimizer.inner, 50_000)
    pair.train([1])
    pair.judge()
    for call in (old.step, old.state_dict, lambda: old.load_state_dict(pair.optimizer.state_dict())):
        with pytest.raises(RuntimeError, match="another CPUOffloadOptimizer"):
            call()
    copied = copy.deepcopy(pair.optimizer)
    params = [p for group in copied.param_groups for p in group["params"]]
    train(copied, params, [2])
    train(pair.plain, pair.reference, [2])
    assert_same_training(params, copied, pair.reference, pair.plain)
