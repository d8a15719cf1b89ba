"""An optimizer's state, its host memory and its hold on weights end with `del`. The garbage collector is off, as
trainers turn it off, and nothing is collected before a test looks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading

import pytest
import torch
from helpers.devices import Beyond
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline, log_memory
from statestream.offload.adam import host_share
from statestream.offload.gradients import staging
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import lr_scheduler

from .conftest import assert_same_training, assert_same_values, make_params, train

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(40, 50), (64, 30), (7, 7), (3, 3)]
MASTERS = {"master_weights": True, "exp_avg_dtype": "bf16"}
SCALED = {"master_weights": True, "master_weight_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}


class Momentum(torch.optim.Optimizer):
    """Someone's own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])


class NeedsData(Momentum):
    """Its step cannot be tried on tensors without data."""

    def step(self, closure=None):
        if any(p.is_meta for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no kernel")
        super().step()


def offloaded(make, chunk=4_096, **options):
    return lambda params: CPUOffloadOptimizer(make(params), chunk, **options)


def fused(**options):
    return lambda params: FusedAdam(params, **options)


KINDS = {
    "torch's AdamW": (FP32, torch.optim.AdamW),
    "torch's fused AdamW": (FP32, lambda params: torch.optim.AdamW(params, fused=True)),
    "fp32": (FP32, fused()),
    "masters": (BF16, fused(**MASTERS)),
    "remainders": (BF16, fused(master_weights=True, store_param_remainders=True)),
    "scaled": (BF16, fused(**SCALED)),
    "random bits, to the host": (BF16, fused(state_dict_cpu_offload=True, stochastic_rounding=True)),
    "capturable": (FP32, fused(capturable=True)),
    "offloaded fp32": (FP32, offloaded(fused())),
    "offloaded masters, half on the host": (BF16, offloaded(fused(**MASTERS), cpu_fraction=0.5)),
    "offloaded scaled, auto": (BF16, offloaded(fused(**SCALED), cpu_fraction="auto")),
    "offloaded gradients": (BF16, offloaded(fused(**MASTERS), offload_gradients=True)),
    "offloaded gradients, auto": (BF16, offloaded(fused(), None, cpu_fraction="auto", offload_gradients=True)),
    "offloaded AdamW": (FP32, offloaded(torch.optim.AdamW)),
    "offloaded fused AdamW": (FP32, offloaded(lambda params: torch.optim.AdamW(params, fused=True))),
    "offloaded SGD": (FP32, offloaded(lambda params: torch.optim.SGD(params, momentum=0.9))),
    "offloaded Muon": (FP32, offloaded(torch.optim.Muon)),
    "someone's own": (FP32, offloaded(Momentum, per_parameter=True)),
    "learnt from zeros": (FP32, offloaded(NeedsData, per_parameter=True)),
    "one pass": (FP32, offloaded(Momentum, None, per_parameter=False)),
}


@pytest.fixture(autouse=True, scope="module")
def no_collector():
    warm = make_params(shapes=SHAPES)
    train(torch.optim.AdamW(warm), warm, [0])  # torch's first step imports what leaves cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def copied(on_device, monkeypatch):
    """As from a GPU, through slots so small that a parameter takes several."""
    monkeypatch.setattr(host_share, "SLOT_BYTES", 4_000)
    monkeypatch.setattr(staging, "SLOT_BYTES", 4_000)
    on_device(Beyond())


# ---- what a program may do with an optimizer before it deletes it ----


def backward(params) -> None:
    sum((p * torch.ones_like(p)).sum().float() for p in params).backward()


def steps(optimizer, params, number=2) -> None:
    for _ in range(number):
        backward(params)
        optimizer.step()
        optimizer.zero_grad()


def nothing(optimizer, params) -> None:
    pass


def measured_steps(optimizer, params) -> None:
    steps(optimizer, params, 7)  # an "auto" share settles in them


def unfinished_accumulation(optimizer, params) -> None:
    steps(optimizer, params)
    backward(params)
    backward(params)


def saved(optimizer, params) -> None:
    steps(optimizer, params)
    optimizer.state_dict()
    optimizer.state_dict()


def loaded(optimizer, params) -> None:
    steps(optimizer, params)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def refused(optimizer, params) -> None:
    steps(optimizer, params)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for spoil in (_without_a_parameter, _without_a_count, _of_other_shapes):
        spoilt = copy.deepcopy(state_dict)
        spoil(spoilt)
        with contextlib.suppress(Exception):
            optimizer.load_state_dict(spoilt)
    optimizer.load_state_dict(state_dict)
    with contextlib.suppress(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    with contextlib.suppress(TypeError):
        optimizer.step(unknown=1)
    with contextlib.suppress(TypeError):
        optimizer.add_param_group({"params": ["no tensor"]})
    params[0].grad = torch.zeros_like(params[0]).to_sparse()
    with contextlib.suppress(RuntimeError, ValueError):
        optimizer.step()


def _without_a_parameter(state_dict) -> None:
    state_dict["param_groups"][0]["params"].pop()


def _without_a_count(state_dict) -> None:
    for state in state_dict["state"].values():
        state["step"] = "no count"


def _of_other_shapes(state_dict) -> None:
    for state in state_dict["state"].values():
        state.update({name: torch.zeros(3) for name in state})


class Failing(Beyond):
    """Fails at the second copy, at every launch, and for good."""

    copies = 0

    def copy(self, *args) -> None:
        self.copies += 1
        if self.copies > 1:
            raise RuntimeError("copy")
        super().copy(*args)

    def launch(self, *args, **kwargs) -> None:
        raise RuntimeError("launch")

    def computing(self):
        raise RuntimeError("computing")


def failed(optimizer, params) -> None:
    steps(optimizer, params)
    units = getattr(optimizer, "strategy", None)
    backward(params)
    if units is not None:
        device, units.device = units.device, Failing()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        units.device = device


def scheduled(optimizer, params) -> None:
    schedulers = [lr_scheduler.LambdaLR(optimizer, lambda e: 0.5), lr_scheduler.CosineAnnealingLR(optimizer, 3)]
    if hasattr(optimizer, "inner"):
        schedulers.append(lr_scheduler.StepLR(optimizer.inner, 2))
    steps(optimizer, params)
    for scheduler in schedulers:
        scheduler.step()


def hooked(optimizer, params) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.register_state_dict_post_hook(lambda *_: None)
    if hasattr(optimizer, "memory_report"):
        log_memory(optimizer, lambda _: None)
    steps(optimizer, params)
    optimizer.state_dict()


def duplicated(optimizer, params) -> None:
    steps(optimizer, params)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        steps(twin, [p for group in twin.param_groups for p in group["params"]])


def grown(optimizer, params) -> None:
    steps(optimizer, params)
    params.append(torch.nn.Parameter(torch.ones(5, 6, dtype=params[0].dtype)))
    optimizer.add_param_group({"params": params[-1:]})
    steps(optimizer, params)


def clipped_and_reported(optimizer, params) -> None:
    steps(optimizer, params)
    backward(params)
    if hasattr(optimizer, "clip_grad_norm_"):
        optimizer.clip_grad_norm_(1.0)
        repr(optimizer.plan)
    if hasattr(optimizer, "memory_report"):
        optimizer.memory_report()
    with contextlib.suppress(TypeError, AttributeError):
        optimizer.refresh_masters()
    optimizer.step()


def changed(optimizer, params) -> None:
    steps(optimizer, params)
    params[0].requires_grad_(False)
    steps(optimizer, params[1:])
    params[0].requires_grad_(True)
    for param in params:
        param.grad, param.data = None, param.data.to(FP32)
    steps(optimizer, params)


def recorded(optimizer, params):
    if not hasattr(optimizer, "strategy"):
        return None
    with Timeline(optimizer) as timeline:
        steps(optimizer, params)
    return timeline  # which its owner goes on holding


USES = [
    *(nothing, measured_steps, unfinished_accumulation, saved, loaded, refused, failed, scheduled),
    *(hooked, duplicated, grown, clipped_and_reported, changed, recorded),
]


def left_of(kind: str, use) -> str:
    """What is still there once nobody but the test holds the parameters, and then they are let go as well."""
    dtype, make = KINDS[kind]
    params = make_params(dtype, SHAPES)
    optimizer = make(params)
    kept = use(optimizer, params)
    for number in range(len(params)):
        params[number].grad = None
    inner, units = getattr(optimizer, "inner", optimizer), getattr(optimizer, "strategy", None)
    state = [v for s in dict.values(inner.state) for v in s.values() if isinstance(v, torch.Tensor)]
    if units is not None:
        state += [arena.block for bank in units.store.banks for arena in bank.arenas]
    state = [StorageWeakRef(tensor.untyped_storage()) for tensor in state]
    weights = [StorageWeakRef(param.untyped_storage()) for param in params]
    del optimizer, inner, units
    for thread in threading.enumerate():  # those that add gradients up end by themselves
        if thread.name.startswith("statestream"):
            thread.join()
    states, hooks = _alive(state), sum(bool(param._post_accumulate_grad_hooks) for param in params)
    del params
    left = {"of the state": states, "hooks": hooks, "weights": _alive(weights)}
    del kept
    return ", ".join(f"{number} {what}" for what, number in left.items() if number)


def _alive(memories: list[StorageWeakRef]) -> int:
    return sum(not memory.expired() for memory in memories)


@pytest.mark.parametrize("kind", KINDS)
def test_state_weights_and_hooks_go_with_the_optimizer(kind):
    left = {use.__name__: found for use in USES if (found := left_of(kind, use))}
    assert not left


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "host" in kind or "auto" in kind or "gradients" in kind])
def test_they_do_where_the_hosts_share_and_gradients_are_copied(kind, copied):
    left = {use.__name__: found for use in USES if (found := left_of(kind, use))}
    assert not left


def test_control_a_cycle_is_noticed():
    def planted(optimizer, params):
        optimizer.itself = optimizer

    assert left_of("fp32", planted) == "4 weights"
    assert left_of("offloaded fp32", planted) == "15 of the state, 4 weights"


def test_a_scheduler_that_is_held_holds_its_optimizer():
    params = make_params(shapes=SHAPES)
    optimizer = FusedAdam(params)
    train(optimizer, params, [0])
    memory = StorageWeakRef(optimizer.state[params[0]]["exp_avg"].untyped_storage())
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda e: 1.0)
    del optimizer
    assert not memory.expired()
    del scheduler
    assert memory.expired()


@pytest.mark.parametrize(
    "kind", ["fp32", "scaled", "offloaded masters, half on the host", "offloaded AdamW", "one pass"]
)
def test_state_that_is_held_longer_than_its_optimizer_can_be_read(kind):
    dtype, make = KINDS[kind]
    params = make_params(dtype, SHAPES)
    optimizer = make(params)
    train(optimizer, params, [0])
    state = optimizer.state
    before = {param: {name: v.clone() for name, v in state[param].items()} for param in params}
    del optimizer
    for param in params:
        assert list(state[param]) == list(before[param])
        for name, value in state[param].items():
            assert_same_values(value, before[param][name], name)
    stranger = torch.nn.Parameter(torch.ones(3))
    assert stranger not in state and state[stranger] == {}


@pytest.mark.parametrize("kind", ["offloaded fp32", "offloaded scaled, auto", "offloaded AdamW", "offloaded SGD"])
def test_the_optimizer_inside_is_its_own_again_once_the_one_over_it_is_gone(kind):
    dtype, make = KINDS[kind]
    params, reference = make_params(dtype, SHAPES), make_params(dtype, SHAPES)
    optimizer, plain = make(params), copy.deepcopy(make(reference).strategy.detached())
    reference = [p for group in plain.param_groups for p in group["params"]]
    train(optimizer, params, [0])
    train(plain, reference, range(3))
    inner = optimizer.inner
    del optimizer
    train(inner, params, [1])
    inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    train(inner, params, [2])
    assert_same_training(params, inner, reference, plain)


def test_an_optimizer_that_goes_inside_its_timeline_leaves_the_times():
    params = make_params(shapes=SHAPES)
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 4_096)
    timeline = Timeline(optimizer)
    with timeline:
        train(optimizer, params, [0])
        del optimizer
    assert {span.what for span in timeline.spans} == {"load", "update", "store"}
    with pytest.raises(RuntimeError, match="the optimizer of this timeline is gone"):
        timeline.__enter__()
