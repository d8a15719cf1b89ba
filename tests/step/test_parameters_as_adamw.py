"""FusedAdam takes every parameter that AdamW takes: frozen ones of any kind, lazy ones, several devices in one group,
and classes that wrap a dense tensor. What it cannot train is refused by name once it has a gradient."""

import copy
import io
import pickle

import pytest
import torch
from helpers.bits import same_bits
from helpers.modes import BF16, FORMS, Mode
from helpers.quantized import quantized_parameter
from helpers.training import gradient, make_params
from helpers.wrapped import Wrapped, wrapped_parameter
from statestream import CPUOffloadOptimizer, FusedAdam, kernels, plan
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor


def frozen(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


FROZEN = {
    "uint8": lambda: frozen(torch.arange(6, dtype=torch.uint8)),
    "int8": lambda: frozen(torch.arange(6, dtype=torch.int8)),
    "int64": lambda: frozen(torch.arange(6)),
    "bool": lambda: frozen(torch.ones(6, dtype=torch.bool)),
    "FP8": lambda: frozen(torch.ones(6).to(torch.float8_e4m3fn)),
    "float64": lambda: frozen(torch.ones(6, dtype=torch.float64)),
    "complex": lambda: frozen(torch.ones(6, dtype=torch.complex64)),
    "sparse": lambda: frozen(torch.eye(3).to_sparse()),
    "with gaps": lambda: frozen(torch.ones(3, 4)[:, ::2]),
    "on another device": lambda: frozen(torch.ones(6, device="meta")),
    "quantised": lambda: quantized_parameter(torch.ones(6)).requires_grad_(False),
    "of a class of two tensors": lambda: frozen(TwoTensor(torch.ones(3), torch.ones(3))),
    "lazy": lambda: UninitializedParameter(requires_grad=False),
    "lazy, to be trained": UninitializedParameter,
}
HELD = {"lazy": 0, "lazy, to be trained": 0, "sparse": 3 * 2 * 8 + 3 * 4, "with gaps": 24}
"""Bytes of those of which that is not the count of elements times their size."""
WAYS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1, state_dict_cpu_offload=True),
    "capturable": lambda params: FusedAdam(params, lr=0.1, capturable=True),
    "offloaded": lambda params: CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 2_000),
    "with offloaded gradients": lambda params: CPUOffloadOptimizer(FusedAdam(params, lr=0.1), offload_gradients=True),
}


class Adapted(nn.Module):
    """A base that is not trained, first in the group, and what is trained beside it."""

    def __init__(self, kind: str | None):
        super().__init__()
        if kind is not None:
            self.base = FROZEN[kind]()
        self.adapter = nn.Parameter(torch.linspace(-1, 1, 300))

    def backward(self, step: int) -> None:
        (self.adapter * gradient(self.adapter, 0, step)).sum().backward()


def trained(kind: str | None, way: str, steps: range) -> tuple[Adapted, torch.optim.Optimizer]:
    model = Adapted(kind)
    optimizer = WAYS[way](model.parameters())
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: Adapted, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model.backward(step)
        optimizer.step()


def same_training(
    model: Adapted, optimizer: torch.optim.Optimizer, other: Adapted, judge: torch.optim.Optimizer
) -> bool:
    states = optimizer.state[model.adapter], judge.state[other.adapter]
    return same_bits(model.adapter, other.adapter) and all(
        same_bits(states[0][name], states[1][name]) for name in ("exp_avg", "exp_avg_sq", "step")
    )


each_way = pytest.mark.parametrize("way", WAYS)
each_frozen = pytest.mark.parametrize("kind", FROZEN)


@each_way
@each_frozen
def test_a_frozen_parameter_of_any_kind_changes_nothing_and_has_no_state(kind, way):
    (model, optimizer), (other, judge) = trained(kind, way, range(3)), trained(None, way, range(3))
    assert same_training(model, optimizer, other, judge)
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [1] and saved["param_groups"][0]["params"] == [0, 1]
    assert model.base not in optimizer.state and optimizer.state.get(model.base) is None
    assert float(optimizer.param_groups[0]["step"]) == 3


@each_way
@each_frozen
def test_a_saved_run_beside_one_goes_on_with_the_same_bits(kind, way):
    (model, optimizer), (other, judge) = trained(kind, way, range(2)), trained(None, way, range(4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = Adapted(kind)
    with torch.no_grad():
        again.adapter.copy_(model.adapter)
    resumed = WAYS[way](again.parameters())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    go_on(again, resumed, range(2, 4))
    assert same_training(again, resumed, other, judge)


@each_way
@each_frozen
def test_distributed_checkpoints_hold_what_is_trained(kind, way):
    (model, optimizer), (other, judge) = trained(kind, way, range(2)), trained(None, way, range(3))
    for flat in (False, True):
        strict = kind != "lazy, to be trained"  # torch wants state of all that may be trained, as of AdamW
        options = StateDictOptions(flatten_optimizer_state_dict=flat, strict=strict)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        assert [key for key in saved if key.endswith(".exp_avg")] == (["state.adapter.exp_avg"] if flat else [])
        with torch.no_grad():
            optimizer.state[model.adapter]["exp_avg"].zero_()
        set_optimizer_state_dict(model, optimizer, saved, options=options)
    go_on(model, optimizer, range(2, 3))
    assert same_training(model, optimizer, other, judge)


@each_way
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["uint8", "float64", "quantised", "lazy", "lazy, to be trained"])
def test_a_copy_goes_on_alone(kind, how, way):
    (_, optimizer), (other, judge) = trained(kind, way, range(2)), trained(None, way, range(2))
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    model = Adapted(None)
    model.adapter = copied.param_groups[0]["params"][1]
    go_on(model, copied, range(2, 4))
    go_on(other, judge, range(2, 4))
    assert same_training(model, copied, other, judge)


@pytest.mark.parametrize("way", ["FusedAdam", "offloaded"])
@each_frozen
def test_memory_is_counted_where_there_is_some(kind, way):
    model, optimizer = trained(kind, way, range(1))
    if kind in HELD:
        nbytes = HELD[kind]
    else:
        nbytes = 24 if kind == "of a class of two tensors" else model.base.numel() * model.base.element_size()
    report = optimizer.memory_report()
    assert report.device.get("weights", 0) + report.host["weights"] == nbytes + 300 * 4
    planned = plan(model, optimizer)
    if kind.startswith("lazy"):
        assert planned.remarks == ("Not counted, since they are not initialized: base.",)
    elif kind not in ("sparse", "of a class of two tensors", "quantised"):
        room = 512 * -(-nbytes // 512)  # CUDA gives no less
        assert planned.estimate.device["weights"] == 512 * -(-300 * 4 // 512) + room
    assert planned.elements == 300 + (0 if kind.startswith("lazy") else model.base.numel())


# ---- lazy ----


@each_way
@pytest.mark.parametrize("saved_before", [False, True])
def test_a_lazy_parameter_trains_from_the_moment_that_it_is_initialized(way, saved_before):
    def first_batch(seed: int) -> torch.Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))

    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    optimizer = WAYS[way](lazy.parameters())
    if saved_before:
        optimizer.load_state_dict(optimizer.state_dict())
    lazy(first_batch(0))
    model = copy.deepcopy(lazy)
    judge = WAYS[way](model.parameters())
    for step in range(3):
        for each, of in ((lazy, optimizer), (model, judge)):
            of.zero_grad()
            each(first_batch(step)).square().sum().backward()
            of.step()
    assert all(map(same_bits, lazy.parameters(), model.parameters()))
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * 4
    assert len(optimizer.state_dict()["state"]) == 4
    if way == "with offloaded gradients":
        lazy(first_batch(0)).sum().backward()
        assert all(param.grad is None for param in lazy.parameters()), "taken in backward"


def test_state_of_one_that_is_still_lazy_is_refused_by_name():
    layer, lazy = nn.Linear(5, 3), nn.LazyLinear(3)
    saved = FusedAdam(layer.named_parameters()).state_dict()
    optimizer = FusedAdam(lazy.named_parameters())
    with pytest.raises(ValueError, match=r"'weight': it is not initialized.*run the model once.*nothing was loaded"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'weight': it is not initialized"):
        optimizer.get_unscaled_state(lazy.weight, "exp_avg")
    assert optimizer.state[lazy.weight] == {} and not list(optimizer.state)


# ---- several devices in one group ----


def test_one_group_holds_parameters_of_several_devices():
    there, here, other = (
        nn.Parameter(torch.ones(4, device="meta")),
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(4)),
    )
    optimizer, judge = FusedAdam([there, here], lr=0.1), FusedAdam([other], lr=0.1)
    for step in range(2):
        there.grad = torch.ones(4, device="meta")
        for param in (here, other):
            param.grad = gradient(param, 0, step)
        optimizer.step()
        judge.step()
    assert same_bits(here, other) and optimizer.state[there]["exp_avg"].device.type == "meta"


def test_each_device_has_its_call_and_a_capturable_lr_and_scale_are_copied_there(monkeypatch):
    """As torch's AdamW does: lr stays where it is, beside the first trained parameter."""
    calls = []
    monkeypatch.setattr(kernels, "adam", lambda device, *_, scalars=None, **__: calls.append((device, scalars)))
    monkeypatch.setattr(kernels, "advance_steps", lambda *_: None)
    with FakeTensorMode():
        params = [nn.Parameter(torch.ones(4, device=f"cuda:{i}")) for i in (1, 0, 1)]
        params.insert(0, frozen(torch.zeros(4, dtype=torch.uint8, device="cpu")))
        optimizer = FusedAdam(params, lr=0.1, capturable=True)
        for param in params[1:]:
            param.grad = torch.ones_like(param)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.grad_scale, optimizer.found_inf = (torch.ones((), device="cuda:0") for _ in range(2))
        optimizer.step()
        optimizer.step()
    assert [str(device) for device, _ in calls] == ["cuda:1", "cuda:0"] * 2
    for device, scalars in calls:
        assert {scalars.lr.device, scalars.grad_scale.device, scalars.found_inf.device} == {device}
    group = optimizer.param_groups[0]
    assert group["lr"] is lr and str(lr.device) == str(group["step"].device) == "cuda:1"
    assert {str(optimizer.state[p]["step"].device) for p in params[1:]} == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize(("on", "then"), [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:2", "cuda:1")])
def test_a_capturable_lr_stays_beside_any_trained_parameter_and_comes_from_elsewhere(on, then, monkeypatch):
    monkeypatch.setattr(kernels, "adam", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "advance_steps", lambda *_: None)
    with FakeTensorMode():
        params = [nn.Parameter(torch.ones(4, device=f"cuda:{i}")) for i in (1, 0)]
        optimizer = FusedAdam(params, lr=0.1, capturable=True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.param_groups[0]["lr"] = torch.full((), 0.1, device=on)
        optimizer.step()
        assert str(optimizer.param_groups[0]["lr"].device) == then


def test_offload_wants_one_device_of_what_is_trained_alone():
    here, there = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, device="meta"))
    optimizer = CPUOffloadOptimizer(FusedAdam([there, here], lr=0.1))
    here.grad = torch.ones(4)
    optimizer.step()
    there.grad = torch.ones(4, device="meta")
    before = here.detach().clone()
    with pytest.raises(ValueError, match="parameters are on cpu, meta; those of one CPUOffloadOptimizer are on one"):
        optimizer.step()
    assert same_bits(here, before) and optimizer.state[here]["step"].item() == 1
    with FakeTensorMode():
        base = frozen(torch.ones(4, device="cuda:0"))
    CPUOffloadOptimizer(FusedAdam([base, here]))
    CPUOffloadOptimizer(torch.optim.AdamW([base, here]))


# ---- a class around one dense tensor ----


@pytest.mark.parametrize("form", [form for form in FORMS if form.param is not None][::3], ids=str)
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: CPUOffloadOptimizer(o, 2_000)], ids=["FusedAdam", "offloaded"])
def test_the_tensor_inside_is_stepped_with_the_bits_of_a_plain_one(form, wrap):
    plain = make_params(form)
    wrapped = [wrapped_parameter(p.detach()) for p in plain]
    ours, judge = (wrap(FusedAdam(params, lr=0.1, weight_decay=0.1, **form.arguments)) for params in (wrapped, plain))
    for step in range(3):
        for params, optimizer in ((wrapped, ours), (plain, judge)):
            for index, (param, like) in enumerate(zip(params, plain, strict=True)):
                param.grad = gradient(like, index, step)
            optimizer.step()
    for a, b in zip(wrapped, plain, strict=True):
        assert same_bits(a.inside, b)
        state, wanted = ours.state[a], judge.state[b]
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert all(same_bits(state[name], wanted[name]) for name in wanted)
    saved, wanted = ours.state_dict()["state"], judge.state_dict()["state"]
    assert all(same_bits(saved[i][name], wanted[i][name]) for i in wanted for name in wanted[i])


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: CPUOffloadOptimizer(o, 2_000)], ids=["FusedAdam", "offloaded"])
def test_one_that_is_sharded_is_stepped_as_a_plain_one_and_its_state_is_sharded(wrap, one_rank):
    """As fully_shard leaves torchao's weights."""
    values = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).to(BF16)
    inside, plain = values.clone(), nn.Parameter(values.clone())
    sharded = nn.Parameter(DTensor.from_local(Wrapped(inside), one_rank, [Shard(0)], run_check=False))
    assert type(sharded._local_tensor) is Wrapped
    ours, judge = (wrap(FusedAdam([param], lr=0.1, master_weights=True)) for param in (sharded, plain))
    for step in range(2):
        plain.grad = gradient(plain, 0, step)
        sharded.grad = DTensor.from_local(plain.grad.clone(), one_rank, [Shard(0)], run_check=False)
        ours.step()
        judge.step()
    assert same_bits(inside, plain)
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        state = ours.state[sharded][name]
        assert state.placements == (Shard(0),) and type(state.to_local()) is torch.Tensor
        assert same_bits(state.to_local(), judge.state[plain][name])


@pytest.mark.parametrize("write", ["through the class", "inside"])
def test_values_written_into_one_win_over_its_master(write):
    param = wrapped_parameter(torch.ones(300).to(BF16))
    optimizer = FusedAdam([param], lr=0.1, master_weights=True)
    param.grad = torch.ones(300, dtype=BF16)
    optimizer.step()
    with torch.no_grad():
        (param if write == "through the class" else param.inside).fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[param]["master_param"], torch.full((300,), 3.0))
    assert torch.all(param.inside == 3)


def test_gradients_of_the_class_are_read_and_unscaled_inside():
    param, plain = wrapped_parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    param.grad, plain.grad = Wrapped(torch.full((4,), 8.0)), torch.ones(4)
    optimizer, judge = FusedAdam([param], lr=0.1), FusedAdam([plain], lr=0.1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    judge.step()
    assert same_bits(param.inside, plain) and torch.equal(param.grad.inside, torch.ones(4))


def test_the_class_is_asked_once_since_its_answer_may_wait_for_the_device():
    params = [wrapped_parameter(torch.ones(4)) for _ in range(3)]
    optimizer = FusedAdam(params, lr=0.1)
    for param in params:
        param._precomputed_scale = torch.tensor(2.0)
        param.grad = torch.ones(4)
    optimizer.step()
    asked = Wrapped.flattened
    for _ in range(3):
        optimizer.step()
        optimizer.state_dict()
    assert Wrapped.flattened == asked
    assert all(float(optimizer.state[param]["step"]) == 4 for param in params)


def test_a_scale_that_is_there_when_the_class_is_first_asked_is_no_value_of_its_own():
    class Scaled(Wrapped):
        """A class that nobody has asked yet."""

    param = nn.Parameter(Scaled(torch.ones(4)))
    param._precomputed_scale = torch.tensor(2.0)
    param.grad = torch.ones(4)
    FusedAdam([param], lr=0.25).step()
    assert torch.all(param.inside < 1)


# ---- what cannot be trained ----


UNTRAINABLE = {
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), ValueError, "complex64"),
    "float64": (lambda: torch.zeros(3, dtype=torch.float64), ValueError, "float64"),
    "FP8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), ValueError, "float8_e4m3fn"),
    "sparse": (lambda: torch.eye(3).to_sparse(), ValueError, "sparse"),
    "lazily negated": (lambda: torch.tensor([1 + 2j]).conj().imag, ValueError, "negated"),
    "of integers": (lambda: torch.zeros(3, dtype=torch.int64), ValueError, "int64"),
    "of a class of two tensors": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), ValueError, "TwoTensor"),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("wrap", [lambda o: o, CPUOffloadOptimizer], ids=["FusedAdam", "CPUOffloadOptimizer"])
@pytest.mark.parametrize("kind", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused_by_name_once_it_has_a_gradient(kind, wrap, named):
    make, error, found = UNTRAINABLE[kind]
    first, bad = nn.Parameter(torch.ones(4)), make()
    bad = nn.Parameter(bad) if bad.is_floating_point() or bad.is_complex() else bad
    pairs = [("first", first), ("last", bad)]
    optimizer = wrap(FusedAdam(pairs if named else [first, bad], lr=0.1, use_decoupled_grad=True))
    first.decoupled_grad = torch.ones(4)
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == (2 if kind == "of a class of two tensors" else 1)
    before = first.detach().clone()
    bad.decoupled_grad = torch.ones(bad.shape)
    where = "'last'" if named else "parameter 1 of group 0"
    with pytest.raises(error, match=f"{where}: .*{found}"):
        optimizer.step()
    assert same_bits(first, before) and optimizer.state[first]["step"].item() == 1
    bad.decoupled_grad = None
    optimizer.step()
    assert optimizer.state[first]["step"].item() == 2


@pytest.mark.parametrize("kind", [kind for kind in UNTRAINABLE if kind != "of a class of two tensors"])
def test_it_has_no_state_and_a_state_for_it_is_refused_by_name(kind):
    make, error, found = UNTRAINABLE[kind]
    bad = make()
    optimizer = FusedAdam([("first", nn.Parameter(torch.ones(4))), ("last", bad)])
    assert optimizer.state[bad] == {} and bad not in optimizer.state and not list(optimizer.state)
    saved = optimizer.state_dict()
    saved["state"][1] = {"exp_avg": torch.zeros(bad.shape), "exp_avg_sq": torch.zeros(bad.shape), "step": 1}
    for ask in (
        lambda: optimizer.get_unscaled_state(bad, "exp_avg"),
        lambda: optimizer.set_scaled_state(bad, "exp_avg", torch.zeros(bad.shape)),
        lambda: optimizer.load_state_dict(saved),
    ):
        with pytest.raises(error, match=f"'last': .*{found}"):
            ask()
    assert len(list(optimizer.state)) == 1


class Quantized(Wrapped):
    """Says that it is bfloat16, and keeps eight bits an element."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, inside.size(), dtype=BF16, device=inside.device)


@pytest.mark.parametrize("wrap", [lambda o: o, CPUOffloadOptimizer], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_a_class_around_values_of_another_dtype_is_refused_by_name(wrap):
    first, bad = nn.Parameter(torch.ones(4)), nn.Parameter(Quantized(torch.ones(3, dtype=torch.uint8)))
    optimizer = wrap(FusedAdam([("first", first), ("last", bad)], lr=0.1))
    first.grad, bad.grad = torch.ones(4), torch.ones(3, dtype=BF16)
    with pytest.raises(ValueError, match="'last': parameters of class Quantized are not supported"):
        optimizer.step()
    assert torch.all(first == 1) and torch.all(bad.inside == 1)


# ---- arguments ----


@pytest.mark.parametrize("arguments", [{"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}], ids=str)
@pytest.mark.parametrize("per_group", [False, True])
def test_foreach_and_fused_are_accepted_and_have_no_effect(arguments, per_group):
    mode = Mode(BF16, master="fp32")
    params, others = make_params(mode), make_params(mode)
    if per_group:
        optimizer = FusedAdam([{"params": params, **arguments}], lr=0.1, **mode.arguments)
    else:
        optimizer = FusedAdam(params, lr=0.1, differentiable=False, **arguments, **mode.arguments)
    judge = FusedAdam(others, lr=0.1, **mode.arguments)
    for step in range(2):
        for index, pair in enumerate(zip(params, others, strict=True)):
            for param in pair:
                param.grad = gradient(param, index, step)
        optimizer.step()
        judge.step()
    assert all(map(same_bits, params, others))
    for key, value in arguments.items():
        assert optimizer.param_groups[0][key] is optimizer.state_dict()["param_groups"][0][key] is value
    judge.load_state_dict(optimizer.state_dict())
    assert judge.param_groups[0]["foreach"] is judge.param_groups[0]["fused"] is None, "how this one runs"


@pytest.mark.parametrize("per_group", [False, True])
def test_differentiable_is_refused_by_name(per_group):
    params = [nn.Parameter(torch.ones(4))]
    with pytest.raises(RuntimeError, match=r"differentiable.*torch\.optim\.AdamW"):
        FusedAdam([{"params": params, "differentiable": True}]) if per_group else FusedAdam(params, differentiable=True)
