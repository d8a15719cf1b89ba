"""Optimizers of third parties, and what torch's own keep beside moments: nothing is lost or counted twice."""

from __future__ import annotations

import pytest
import torch
from simulated_device.device import SimulatedDevice
from statestream import CPUOffloadOptimizer

from .conftest import assert_same_training, make_params, train
from .makers import SignDescent

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

CHUNK = 60_000


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
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK, elementwise=True), make(reference)
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


def test_a_one_pass_step_that_fails_leaves_state_on_the_host_as_it_was():
    params = make_params(shapes=[(40,), (7,)])
    optimizer = CPUOffloadOptimizer(SignDescent(params), None, elementwise=False)
    train(optimizer, params, range(2))
    before = [(param.detach().clone(), optimizer.state[param]["momentum"].clone()) for param in params]
    optimizer.inner.fail_at = 7
    with pytest.raises(ArithmeticError):
        train(optimizer, params, range(2, 3))
    for param, (weight, momentum) in zip(params, before, strict=True):
        assert torch.equal(param, weight) and torch.equal(optimizer.state[param]["momentum"], momentum)
