"""Optimizers of third parties, and what torch's own keep beside moments: nothing is lost or counted twice."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from simulated_device.device import SimulatedDevice
from statestream import CPUOffloadOptimizer

from .conftest import assert_same_training, make_params, train
from .makers import SignDescent

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

CHUNK = 60_000


def test_a_third_party_has_to_say_that_it_is_elementwise():
    with pytest.raises(ValueError, match=r"SignDescent.*per_parameter=True"):
        CPUOffloadOptimizer(SignDescent(make_params()), CHUNK)
    with pytest.raises(ValueError, match="LBFGS"):
        CPUOffloadOptimizer(torch.optim.LBFGS(make_params()), per_parameter=True)


@pytest.mark.parametrize("value", [0, 1, "yes", torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("make", [SignDescent, torch.optim.SGD])
def test_per_parameter_is_true_false_or_not_said(make, value):
    """0 is not False: an optimizer would be stepped some parameters at a time that must not be."""
    for name in ("per_parameter", "elementwise"):
        with pytest.raises(TypeError, match=r"per_parameter: .* is not valid; give True, False or None"):
            CPUOffloadOptimizer(make(make_params()), **{name: value})


def test_the_old_name_of_per_parameter_is_taken():
    for said, wanted in ((True, CHUNK), (False, None)):
        old = CPUOffloadOptimizer(SignDescent(make_params()), wanted, elementwise=said)
        new = CPUOffloadOptimizer(SignDescent(make_params()), wanted, per_parameter=said)
        assert type(old.strategy) is type(new.strategy)
    with pytest.raises(TypeError, match="elementwise: it is the old name of per_parameter"):
        CPUOffloadOptimizer(SignDescent(make_params()), elementwise=True, per_parameter=True)


@pytest.mark.parametrize(("chunk", "per_parameter"), [(60_000, True), (None, True), (None, False)])
def test_what_a_third_party_counts_by_itself_is_counted_once_a_step(chunk, per_parameter):
    params, reference = make_params(), make_params()
    optimizer = CPUOffloadOptimizer(SignDescent(params), chunk, per_parameter=per_parameter)
    plain = SignDescent(reference)
    if per_parameter and chunk:
        assert len(optimizer.strategy.store.plan.chunks) > 1
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
    optimizer = CPUOffloadOptimizer(Watching(params), CHUNK, per_parameter=True)
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


@pytest.mark.parametrize("name", ["sgd", "third party"])
def test_an_optimizer_without_state_is_passed_through_in_one_call(name, on_device):
    calls = []

    class SignSGD(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            calls.append(sum(p.grad is not None for p in self.param_groups[0]["params"]))
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * 0.1)

    make = SignSGD if name == "third party" else lambda p: torch.optim.SGD(p, lr=0.1)
    params, reference = make_params(), make_params()
    device = on_device(SimulatedDevice(0))
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK, per_parameter=True), make(reference)
    calls.clear()  # of the step on the meta device from which it is known
    train(optimizer, params, [0])
    assert calls == ([6] if name == "third party" else [])
    assert device.calls == 0 and optimizer.plan.host_bytes == optimizer.plan.device_bytes == 0
    train(plain, reference, [0])
    assert_same_training(params, optimizer, reference, plain)


def test_a_state_that_is_bound_anew_in_every_step_is_stored():
    class Rebinding(SignDescent):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["momentum"] = self.state[p].get("momentum", torch.zeros_like(p)) * 0.9 + p.grad
                    p.sub_(self.state[p]["momentum"] * 0.1)

    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(Rebinding(params), CHUNK, per_parameter=True), Rebinding(reference)
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
    optimizer, plain = CPUOffloadOptimizer(Eager(params), CHUNK, per_parameter=True), Eager(reference)
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
    optimizer = CPUOffloadOptimizer(torch.optim.Adafactor(params), per_parameter=False)
    plain = torch.optim.Adafactor(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        o.load_state_dict(o.state_dict())
        train(o, ps, range(2, 4))
    assert_same_training(params, optimizer, reference, plain)
    with pytest.raises(ValueError, match="one pass"):
        CPUOffloadOptimizer(torch.optim.Adafactor(make_params()), CHUNK, per_parameter=False)


def test_state_that_appears_later_is_carried_along_with_a_warning():
    class Late(SignDescent):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and self.param_groups[0]["step"] > 1:
                    self.state[p]["slow"] = self.state[p].get("slow", torch.zeros_like(p)) + p

    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(Late(params), CHUNK, per_parameter=True), Late(reference)
    train(plain, reference, range(4))
    with pytest.warns(RuntimeWarning, match="'slow'"):
        train(optimizer, params, range(4))
    assert_same_training(params, optimizer, reference, plain)


def test_a_one_pass_step_that_fails_leaves_state_on_the_host_as_it_was():
    params = make_params(shapes=[(40,), (7,)])
    optimizer = CPUOffloadOptimizer(SignDescent(params), None, per_parameter=False)
    train(optimizer, params, range(2))
    before = [(param.detach().clone(), optimizer.state[param]["momentum"].clone()) for param in params]
    optimizer.inner.fail_at = 7
    with pytest.raises(ArithmeticError):
        train(optimizer, params, range(2, 3))
    for param, (weight, momentum) in zip(params, before, strict=True):
        assert torch.equal(param, weight) and torch.equal(optimizer.state[param]["momentum"], momentum)


@pytest.mark.parametrize("per_parameter", [True, False])
@pytest.mark.parametrize("left", [lambda grad: None, lambda grad: 2 * grad], ids=["nothing", "another tensor"])
def test_what_an_optimizer_leaves_as_a_gradient_is_what_there_is_after_the_step(left, per_parameter):
    class Leaving(SignDescent):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad = left(p.grad)

    params, reference = make_params(), make_params()
    chunk = CHUNK if per_parameter else None
    optimizer, plain = CPUOffloadOptimizer(Leaving(params), chunk, per_parameter=per_parameter), Leaving(reference)
    train(optimizer, params, range(2), missing=lambda _: (3,))
    train(plain, reference, range(2), missing=lambda _: (3,))
    for p, q in zip(params, reference, strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


# ---- what an optimizer counts for itself ----


class Counting(torch.optim.Optimizer):
    """Momentum, with a bias correction by a count that `advance` makes and `count` reads."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def advance(self, group):
        pass

    def count(self, group):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            if number == 0:
                self.begin()
            self.advance(group)
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.sub_(momentum / (1 - 0.9 ** float(self.count(group))), alpha=group["lr"])

    def begin(self):
        pass


class InAGroup(Counting):
    def advance(self, group):
        group["step"] = group.get("step", 0) + 1

    def count(self, group):
        return group["step"]


class InAGroupWithGradients(InAGroup):
    def advance(self, group):
        if any(p.grad is not None for p in group["params"]):
            super().advance(group)


class InATensorOfAGroup(Counting):
    def advance(self, group):
        group.setdefault("step", torch.zeros(1)).add_(1)

    def count(self, group):
        return group["step"]


class InADictOfAGroup(Counting):
    def advance(self, group):
        counts = group.setdefault("counts", {})
        counts["step"] = counts.get("step", 0) + 1

    def count(self, group):
        return group["counts"]["step"]


class InAnAttribute(Counting):
    def begin(self):
        self.n = getattr(self, "n", 0) + 1

    def count(self, group):
        return self.n


class InADictMadeInTheConstructor(Counting):
    def __init__(self, params):
        super().__init__(params)
        self.counts = {"steps": [0]}

    def begin(self):
        self.counts["steps"][0] += 1

    def count(self, group):
        return self.counts["steps"][0]


class InATensorMadeInTheConstructor(Counting):
    def __init__(self, params):
        super().__init__(params)
        self.n = torch.zeros(())

    def begin(self):
        self.n.data.add_(1)  # which autograd does not count

    def count(self, group):
        return self.n


class InStateOfNoParameter(Counting):
    def begin(self):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
        self.state["k"] += 1

    def count(self, group):
        return self.state["k"]


class InStateMadeInTheConstructor(InStateOfNoParameter):
    def __init__(self, params):
        super().__init__(params)
        self.state["k"] = torch.tensor([0])


class ByParameterInAnAttribute(Counting):
    """A count of each parameter's own, outside of its state."""

    @torch.no_grad()
    def step(self, closure=None):
        if not hasattr(self, "counts"):
            self.counts = {}
        for p in [p for group in self.param_groups for p in group["params"]]:
            if p.grad is not None:
                self.counts[p] = self.counts.get(p, 0) + 1
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                p.sub_(momentum / (1 - 0.9 ** self.counts[p]), alpha=0.1)


WAYS = [
    *(InAGroup, InAGroupWithGradients, InATensorOfAGroup, InADictOfAGroup, InAnAttribute),
    *(InADictMadeInTheConstructor, InATensorMadeInTheConstructor, InStateOfNoParameter, InStateMadeInTheConstructor),
    ByParameterInAnAttribute,
]
"""Ways in which optimizers count."""

MISSING = {
    "none": lambda step: (),
    "one": lambda step: (3,),
    "a whole group at first": lambda step: (3, 4, 5) if step < 2 else (),
    "all in one step": lambda step: range(6) if step == 1 else (),
}
"""Parameters without gradients, by step."""


def plainly(value, params):
    """A value to be compared: parameters as their numbers, tensors as lists."""
    if isinstance(value, dict):
        return {plainly(k, params): plainly(v, params) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        known = [i for i, p in enumerate(params) if p is value]
        return f"parameter {known[0]}" if known else value.tolist()
    return value


def counted(optimizer, params):
    """All that the optimizer keeps beside its parameters' states."""
    inner = getattr(optimizer, "inner", optimizer)
    groups = [{k: plainly(v, params) for k, v in group.items() if k != "params"} for group in inner.param_groups]
    own = {k: plainly(v, params) for k, v in vars(inner).items() if k in ("n", "counts")}
    return groups, own, {k: plainly(v, params) for k, v in inner.state.items() if not isinstance(k, torch.Tensor)}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize(("chunk", "per_parameter"), [(1000, True), (CHUNK, True), (None, True), (None, False)])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_it_counts_a_step_is_counted_once(way, chunk, per_parameter, missing):
    params, reference = make_params(), make_params()
    groups, theirs = ([{"params": ps[:3]}, {"params": ps[3:]}] for ps in (params, reference))
    optimizer, plain = CPUOffloadOptimizer(way(groups), chunk, per_parameter=per_parameter), way(theirs)
    assert counted(optimizer, params) == counted(way([{"params": ps} for ps in (params[:3], params[3:])]), params)
    train(optimizer, params, range(4), missing=MISSING[missing])
    train(plain, reference, range(4), missing=MISSING[missing])
    assert counted(optimizer, params) == counted(plain, reference)
    assert all(torch.equal(a, b) for a, b in zip(params, reference, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_step_that_failed_has_counted_does_not_count(way):
    """Chunk by chunk: with the first one failing nothing is counted, with a later one what was stepped is."""

    class Failing(way):
        def __init__(self, params):
            super().__init__(params)
            self.fails = None

        def step(self, closure=None):
            super().step()
            if self.fails is not None and any(
                p is self.fails for group in self.param_groups for p in group["params"] if p.grad is not None
            ):
                raise RuntimeError("planted")

    params, reference = make_params(), make_params()
    groups, theirs = ([{"params": ps[:3]}, {"params": ps[3:]}] for ps in (params, reference))
    optimizer, plain = CPUOffloadOptimizer(Failing(groups), 1000, per_parameter=True), way(theirs)
    train(optimizer, params, range(1))
    train(plain, reference, range(1))
    before = counted(optimizer, params)
    optimizer.inner.fails = params[0]
    with pytest.raises(RuntimeError, match="planted"):
        train(optimizer, params, [1])
    assert counted(optimizer, params) == before
    optimizer.inner.fails = None
    train(optimizer, params, [1])
    train(plain, reference, [1])
    assert counted(optimizer, params) == counted(plain, reference)
    assert all(torch.equal(a, b) for a, b in zip(params, reference, strict=True))


class NotCopied:
    """What a user keeps in a state, which cannot be brought to the device once `fails` is set."""

    fails = False

    def __deepcopy__(self, memo):
        if self.fails:
            raise RuntimeError("planted")
        return self


@pytest.mark.parametrize("failing", range(1, 5))
def test_chunks_before_one_whose_state_does_not_come_are_counted(failing):
    params = make_params()
    optimizer = CPUOffloadOptimizer(InAGroup(params), 1000, per_parameter=True)
    train(optimizer, params, range(1))
    optimizer.state[params[failing]]["kept"] = kept = NotCopied()
    before = [p.detach().clone() for p in params]
    kept.fails = True
    with pytest.raises(RuntimeError, match="planted"):
        train(optimizer, params, [1])
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[failing], before[failing])
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("per_parameter", [True, False])
def test_state_of_no_parameter_is_saved_copied_and_loaded(per_parameter):
    params, reference = make_params(), make_params()
    groups, theirs = ([{"params": ps[:3]}, {"params": ps[3:]}] for ps in (params, reference))
    chunk = CHUNK if per_parameter else None
    optimizer = CPUOffloadOptimizer(InStateOfNoParameter(groups), chunk, per_parameter=per_parameter)
    plain = InStateOfNoParameter(theirs)
    train(optimizer, params, range(2))
    train(plain, reference, range(2))
    optimizer.memory_report()
    saved = optimizer.state_dict()
    assert saved["state"]["k"].tolist() == [2]
    twin = copy.deepcopy(optimizer)
    train(optimizer, params, range(2, 3))
    assert saved["state"]["k"].tolist() == twin.state["k"].tolist() == [2]
    twin.load_state_dict(optimizer.state_dict())
    assert twin.state["k"].tolist() == [3]


# ---- state of other classes, the inner optimizer's own methods, duplicates ----


class Quantised(torch.Tensor):
    """State of 8 bits that says it is float32, as 8-bit optimizers have it."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a tensor in 8 bits")


class EightBits(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["momentum"] = Quantised(torch.zeros_like(p, dtype=torch.int8))
                p.sub_(p.grad, alpha=0.1)


def test_state_of_a_class_of_its_own_is_refused_by_name():
    params = make_params()
    named = r"state 'momentum' of parameter 0 of group 0 is a tensor of class Quantised"
    with pytest.raises(ValueError, match=named):
        CPUOffloadOptimizer(EightBits(params), CHUNK, per_parameter=True)
    optimizer = CPUOffloadOptimizer(EightBits(params), per_parameter=False)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=named):  # made by the first step, which is undone
        train(optimizer, params, [0])
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True)) and not optimizer.state
    stepped = EightBits(params)
    train(stepped, params, [0])
    for per_parameter in (True, False):
        with pytest.raises(ValueError, match=named):
            CPUOffloadOptimizer(stepped, per_parameter=per_parameter)


@pytest.mark.parametrize("per_parameter", [True, False])
def test_a_step_whose_state_is_refused_afterwards_has_counted_nothing(per_parameter):
    class LaterInEightBits(InAGroup):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and self.param_groups[0]["step"] == 3:
                    self.state[p]["momentum"] = Quantised(torch.zeros_like(p, dtype=torch.int8))

    params = make_params()
    optimizer = CPUOffloadOptimizer(LaterInEightBits(params), per_parameter=per_parameter)
    train(optimizer, params, range(2))
    before = counted(optimizer, params), [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="Quantised"):
        train(optimizer, params, [2])
    assert counted(optimizer, params) == before[0]
    assert all(torch.equal(a, b) for a, b in zip(params, before[1], strict=True))


@pytest.mark.parametrize("chunk", [1000, CHUNK, None])
def test_adafactor_is_known_and_streams_bit_equal(chunk):
    params, reference = make_params(), make_params()
    optimizer = CPUOffloadOptimizer(torch.optim.Adafactor(params, lr=0.01), chunk)
    plain = torch.optim.Adafactor(reference, lr=0.01)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(3))
        o.load_state_dict(o.state_dict())
        train(o, ps, range(3, 5))
    assert_same_training(params, optimizer, reference, plain)


class ScheduleFree(SignDescent):
    """Weights of two kinds, as schedule-free optimizers have them: those that are trained and their average."""

    def __init__(self, params):
        super().__init__(params)
        self.modes = []

    @torch.no_grad()
    def eval(self, weight=0.5):
        """Changes to the weights that are evaluated."""
        self.modes.append("eval")
        for p in self.param_groups[0]["params"]:
            p.lerp_(self.state[p]["momentum"].to(p.device), weight)
        return self

    def train(self):
        self.modes.append("train")


def test_public_methods_and_attributes_of_the_inner_optimizer_are_reached():
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(ScheduleFree(params), CHUNK, per_parameter=True), ScheduleFree(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        assert isinstance(o.eval(weight=0.25), ScheduleFree)
        o.train()
        train(o, ps, range(2, 3))
    assert_same_training(params, optimizer, reference, plain)
    assert optimizer.modes == ["eval", "train"] and optimizer.eval.__doc__ == ScheduleFree.eval.__doc__


def test_what_neither_has_is_an_attribute_error_and_copies_and_pickles_are_made():
    optimizer = CPUOffloadOptimizer(torch.optim.AdamW(make_params()), CHUNK)
    for name in ("train", "eval", "optimizer", "_private", "__deepcopy__"):
        assert not hasattr(optimizer, name), name
    optimizer.inner._own = 1
    assert not hasattr(optimizer, "_own")  # private names stay the inner optimizer's
    assert isinstance(copy.deepcopy(optimizer), CPUOffloadOptimizer)
    assert isinstance(pickle.loads(pickle.dumps(optimizer)), CPUOffloadOptimizer)
    empty = object.__new__(CPUOffloadOptimizer)
    with pytest.raises(AttributeError, match="inner"):
        empty.inner  # noqa: B018  no endless recursion


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(("chunk", "per_parameter"), [(1000, True), (CHUNK, True), (None, True), (None, False)])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_a_parameter_that_is_listed_twice_is_stepped_twice_as_it_is_plain(name, chunk, per_parameter):
    params, reference = make_params(), make_params()
    options = {"momentum": 0.9} if name == "SGD" else {}
    make = getattr(torch.optim, name)
    optimizer = CPUOffloadOptimizer(make([*params, params[0]], lr=0.1, **options), chunk, per_parameter=per_parameter)
    plain = make([*reference, reference[0]], lr=0.1, **options)
    train(optimizer, params, range(3))
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)
