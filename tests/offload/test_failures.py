"""Errors of others: hooks, closures, the optimizer's own code, memory that is refused. Nothing is left half done."""

from __future__ import annotations

import contextlib
import copy
import pickle
import signal

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.device.host_memory import HostMemory
from statestream.device.queues import HostDevice

from .conftest import assert_same_training, make_params, set_grads, train
from .makers import SignDescent

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, master_weights=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
CHUNK = 3_000


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


class Refusing:
    """Host memory that is refused at the n-th request (from 0), once."""

    def __init__(self, monkeypatch, n):
        self.asked, block = 0, HostMemory.block

        def counted(memory, nbytes):
            self.asked += 1
            if self.asked == n + 1:
                raise OSError(12, "Cannot allocate memory")
            return block(memory, nbytes)

        monkeypatch.setattr(HostMemory, "block", counted)


# ---- user code that raises ----


@pytest.mark.parametrize("where", ["pre", "post", "inner pre", "inner post"])
def test_a_hook_that_raises(make, where):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    train(optimizer, params, [0])
    train(plain, reference, [0])

    def hook(*_):
        raise ArithmeticError("of the hook")

    owner = optimizer.inner if "inner" in where else optimizer
    before = "pre" in where
    handle = owner.register_step_pre_hook(hook) if before else owner.register_step_post_hook(hook)
    set_grads(params, 1)
    grads, weights = [p.grad for p in params], [p.detach().clone() for p in params]
    with pytest.raises(ArithmeticError, match="of the hook"):
        optimizer.step()
    handle.remove()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    if before:
        assert all(torch.equal(p, old) for p, old in zip(params, weights, strict=True))
        optimizer.step()
    train(plain, reference, [1])
    assert_same_training(params, optimizer, reference, plain)


def test_a_closure_that_raises_changes_nothing(make):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    train(optimizer, params, [0])
    train(plain, reference, [0])
    set_grads(params, 1)

    def closure():
        raise ArithmeticError("of the closure")

    with pytest.raises(ArithmeticError, match="of the closure"):
        optimizer.step(closure)
    assert_same_training(params, optimizer, reference, plain)
    optimizer.step()
    train(plain, reference, [1])
    assert_same_training(params, optimizer, reference, plain)


@pytest.fixture
def keyboard():
    """SIGINT as an interactive process has it: one that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(device, name, then=lambda: None):
    """Raises SIGINT at every call of this method of the seam, and calls `then`."""
    method = getattr(device, name)

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        then()
        return method(*args)

    setattr(device, name, interrupted)


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("step", [0, 1])
def test_an_interrupt_from_the_keyboard_waits_for_the_end_of_the_step(make, step):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    train(optimizer, params, range(step))
    train(plain, reference, range(step + 1))
    set_grads(params, step)
    grads = [p.grad for p in params]
    interrupt_at(optimizer.strategy.device, "copy")
    interrupt_at(optimizer.strategy.device, "computing")
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert_same_training(params, optimizer, reference, plain)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("keyboard")
def test_an_interrupt_carries_the_error_of_the_step():
    params = make_params()
    optimizer = CPUOffloadOptimizer(SignDescent(params), 60_000, per_parameter=True)
    optimizer.inner.fail_at = params[3].numel()
    interrupt_at(optimizer.strategy.device, "computing")
    with pytest.raises(KeyboardInterrupt) as caught:
        train(optimizer, params, [0])
    assert isinstance(caught.value.__context__, ArithmeticError)


def test_a_programs_own_handler_is_called_at_once():
    params, calls, seen = make_params(), [], []
    optimizer = CPUOffloadOptimizer(MAKERS["adamw"](params), CHUNK)
    interrupt_at(optimizer.strategy.device, "computing", lambda: seen.append(len(calls)))
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        train(optimizer, params, [0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen and seen == list(range(1, len(seen) + 1))


@pytest.mark.parametrize("per_parameter", [True, False])
@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_fails_in_the_middle_of_a_chunk_is_undone(step, per_parameter):
    """The chunk's other parameters were updated already, the failing one and its state were spoilt."""
    params = make_params()
    optimizer = CPUOffloadOptimizer(
        SignDescent(params), None if not per_parameter else 60_000, per_parameter=per_parameter
    )
    train(optimizer, params, range(step))
    before = [p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params]
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
            assert torch.equal(optimizer.state[p][name], value)
    optimizer.step()
    assert all(torch.isfinite(p).all() and p.abs().max() < 100 for p in params)


def test_a_gradient_older_than_the_parameters_dtype_is_an_error_and_stays():
    """It could be hidden while other chunks step, and torch would not take it back."""
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(MAKERS["sgd_momentum"](params), CHUNK)
    train(optimizer, params, [0])
    params[4].data = params[4].data.float()
    grads, weights = [p.grad for p in params], [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"torch.bfloat16 belongs to a parameter that is torch.float32"):
        optimizer.step()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(torch.equal(p, old) for p, old in zip(params, weights, strict=True))
    train(optimizer, params, [1])


# ---- host memory that is refused ----


@pytest.mark.parametrize("n", range(3))
def test_memory_refused_in_the_constructor_leaves_the_optimizer_as_it_was(make, n, monkeypatch):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    inner, plain = make(params), make(reference)
    train(inner, params, [0])
    train(plain, reference, [0])
    refusing, before = Refusing(monkeypatch, n), dict(vars(inner))
    try:
        CPUOffloadOptimizer(inner, CHUNK)
    except OSError as error:
        assert error.errno == 12
    else:
        assert refusing.asked <= n  # of states that it has, all were granted
        return
    assert all(vars(inner)[name] is value for name, value in before.items())
    train(inner, params, [1])
    train(plain, reference, [1])
    assert_same_training(params, inner, reference, plain)
    optimizer = CPUOffloadOptimizer(inner, CHUNK)
    train(optimizer, params, [2])
    train(plain, reference, [2])
    assert_same_training(params, optimizer, reference, plain)


def test_memory_refused_for_a_group_that_is_added(make, monkeypatch):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer, plain = CPUOffloadOptimizer(make(params[:3]), CHUNK), make(reference[:3])
    train(optimizer, params[:3], [0])
    train(plain, reference[:3], [0])
    Refusing(monkeypatch, 0)
    with pytest.raises(OSError, match="Cannot allocate"):
        optimizer.add_param_group({"params": params[3:]})
    assert len(optimizer.param_groups) == 1
    train(optimizer, params[:3], [1])
    train(plain, reference[:3], [1])
    assert_same_training(params[:3], optimizer, reference[:3], plain)
    for o, ps in ((optimizer, params), (plain, reference)):
        o.add_param_group({"params": ps[3:]})
        train(o, ps, [2])
    assert_same_training(params, optimizer, reference, plain)


def test_memory_refused_in_a_step_changes_nothing(make, monkeypatch):
    """Parameters that were frozen get their memory when they first have a gradient."""
    params, reference = make_params(), make_params()
    for p in (*params[3:], *reference[3:]):
        p.requires_grad_(False)
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0], lambda _: (3, 4, 5))
        for p in ps:
            p.requires_grad_(True)
    set_grads(params, 1)
    grads, weights = [p.grad for p in params], [p.detach().clone() for p in params]
    Refusing(monkeypatch, 0)
    with pytest.raises(OSError, match="Cannot allocate"):
        optimizer.step()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(torch.equal(p, old) for p, old in zip(params, weights, strict=True))
    optimizer.step()
    train(plain, reference, [1])
    assert_same_training(params, optimizer, reference, plain)


# ---- a device that refuses every further call ----


class Lost(HostDevice):
    """Launches so many kernels and no more."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def launch(self, *args, **kwargs):
        if self.left == 0:
            raise RuntimeError("lost")
        self.left -= 1
        super().launch(*args, **kwargs)


class Unplugged(HostDevice):
    """Copies so often and no more."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def copy(self, *args):
        if self.left == 0:
            raise RuntimeError("lost")
        self.left -= 1
        super().copy(*args)


def torn_adamw(on_device):
    """As `torn`, of an optimizer that is stepped by whole parameters: one is updated and its state cannot be stored."""
    device = on_device(Unplugged(10**6))
    params = make_params(shapes=[(6000,), (600,)])
    optimizer = CPUOffloadOptimizer(torch.optim.AdamW(params, lr=0.1), 80_000)
    train(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    set_grads(params, 1)
    device.left = 2  # loads of the first chunk
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    assert optimizer.strategy.torn == ["parameter 0 of group 0"]
    return device, optimizer, params, saved


def torn(on_device):
    """A parameter of several chunks of which one was updated, and one that was not begun."""
    device = on_device(Lost(1))
    params = make_params(shapes=[(6000,), (600,)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 20_000)
    set_grads(params, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="lost") as raised:
        optimizer.step()
    assert optimizer.strategy.torn == ["parameter 0 of group 0"]
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == ["updated in part: parameter 0 of group 0"]
    return device, optimizer, params, saved


def test_a_parameter_that_is_written_in_part_is_not_counted(on_device):
    _, optimizer, params, _ = torn(on_device)
    assert [float(optimizer.state[p]["step"]) for p in params] == [0.0, 0.0]


def test_a_kernel_that_did_not_start_is_no_update(on_device):
    device = on_device(Lost(0))
    (param,) = make_params(shapes=[(6000,)])
    optimizer = CPUOffloadOptimizer(FusedAdam([param], lr=0.1), 20_000)
    set_grads([param], 0)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    device.left = 10**6
    assert optimizer.strategy.torn == [] and float(optimizer.state[param]["step"]) == 0.0
    optimizer.step()


def refused_by(optimizer, params):
    """What a torn optimizer refuses, by name, because it would step from or hand on state that is updated in part."""
    inner = optimizer.inner
    calls = {
        "step": optimizer.step,
        "save": optimizer.state_dict,
        "deepcopy": lambda: copy.deepcopy(optimizer),
        "pickle": lambda: pickle.dumps(optimizer),
    }
    if isinstance(inner, FusedAdam):
        calls |= {
            "save of the inner one": inner.state_dict,
            "state in FP32": lambda: inner.get_unscaled_state(params[0], "exp_avg"),
        }
    return calls


@pytest.mark.parametrize("make", [torn, torn_adamw])
def test_a_torn_optimizer_neither_steps_nor_hands_its_state_on_until_a_load_succeeds(make, on_device):
    """A trainer that saves when an error comes must not write it over a good checkpoint."""
    device, optimizer, params, saved = make(on_device)
    device.left = 10**6
    for broken in (None, {**saved, "param_groups": []}):
        if broken is not None:
            with pytest.raises(ValueError):
                optimizer.load_state_dict(broken)
        for name, call in refused_by(optimizer, params).items():
            with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 written in part.*load a checkpoint"):
                call()
                pytest.fail(f"{name} is not refused")
    optimizer.load_state_dict(saved)
    steps = float(optimizer.state[params[0]]["step"])
    for call in refused_by(optimizer, params).values():
        call()
    assert [float(optimizer.state[p]["step"]) for p in params] == [steps + 1.0] * 2


def test_the_optimizer_inside_stays_torn_when_the_one_over_it_is_gone(on_device):
    device = on_device(Lost(1))
    params = make_params(shapes=[(6000,), (600,)])
    optimizer = CPUOffloadOptimizer(inner := FusedAdam(params, lr=0.1), 20_000)
    set_grads(params, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    with contextlib.suppress(RuntimeError):  # pytest.raises would keep the frames, and the optimizer with them
        optimizer.step()
    device.left = 10**6
    del optimizer
    for call in (inner.step, inner.state_dict):
        with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 written in part.*load a checkpoint"):
            call()
    inner.load_state_dict(saved)
    set_grads(params, 5)
    before = float(inner.state[params[0]]["step"])
    inner.step()
    assert float(inner.state[params[0]]["step"]) == before + 1.0


def test_a_load_that_ends_in_the_optimizers_own_code_leaves_all_as_it_was():
    """torch puts the new groups, and a state without values, in place before it calls that."""

    class Strict(torch.optim.AdamW):
        def __setstate__(self, state):
            super().__setstate__(state)
            if "param_groups" in state and refuse:
                raise KeyError("an option is missing")

    params, reference, refuse = make_params(), make_params(), False
    optimizer = CPUOffloadOptimizer(Strict(params, lr=0.1), 20_000, per_parameter=True)
    plain = torch.optim.AdamW(reference, lr=0.1)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    refuse = True
    with pytest.raises(KeyError, match="an option"):
        optimizer.load_state_dict(saved)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [1])
    assert_same_training(params, optimizer, reference, plain)
    assert optimizer.param_groups[0]["lr"] == 0.1
