"""Gradients that backward offloads: micro-batches summed in FP32 and clipped give the bits of the plain optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from helpers.devices import Beyond
from helpers.training import with_gradients
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline
from statestream.offload.adam import host_share
from statestream.offload.gradients import staging
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from .conftest import SHAPES, Counting, assert_same_training, assert_same_values, bits, make_params

FORMS = {
    "fp32": (torch.float32, {}),
    "bf16 masters": (torch.bfloat16, {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "bf16 remainders": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "mixed fp8": ("mixed", {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
}


@pytest.fixture(params=["in place", "copied"])
def where(request, on_device, monkeypatch):
    """Where gradients are added up. Slots are so small that a parameter takes several."""
    monkeypatch.setattr(host_share, "SLOT_BYTES", 4_000)
    monkeypatch.setattr(staging, "SLOT_BYTES", 4_000)
    if request.param == "copied":
        on_device(Beyond())
    return request.param


def backward(params, number: int, missing=()) -> list[torch.Tensor | None]:
    """A backward whose gradients are random; returns them, as they are made."""
    generator = torch.Generator().manual_seed(number)
    grads = [(torch.randn(p.shape, generator=generator) * 10.0 ** (i % 3)).to(p.dtype) for i, p in enumerate(params)]
    used = [i for i in range(len(params)) if i not in missing]
    sum((params[i] * grads[i]).sum().float() for i in used).backward()
    return [grads[i] if i in used else None for i in range(len(params))]


class Reference:
    """The plain optimizer, which is handed FP32 sums that are made here."""

    def __init__(self, params, **arguments):
        self.params, self.sums = params, [None] * len(params)
        self.optimizer = FusedAdam(params, lr=0.1, use_decoupled_grad=True, **arguments)

    def add(self, grads) -> None:
        for i, grad in enumerate(grads):
            if grad is not None:
                self.sums[i] = grad.float() if self.sums[i] is None else self.sums[i] + grad.float()

    def clip(self, max_norm, norm_type=2.0) -> torch.Tensor:
        stand_ins = [Parameter(torch.zeros_like(s)) for s in self.sums if s is not None]
        for stand_in, total in zip(stand_ins, [s for s in self.sums if s is not None], strict=True):
            stand_in.grad = total
        return torch.nn.utils.clip_grad_norm_(stand_ins, max_norm, norm_type)

    def step(self) -> None:
        for p, total in zip(self.params, self.sums, strict=True):
            p.decoupled_grad = total
        self.optimizer.step()
        self.sums = [None] * len(self.params)


def pair(dtype=torch.float32, chunk=5_000, fraction=0.0, shapes=SHAPES, **arguments):
    params = make_params(dtype, shapes)
    inner = FusedAdam(params, lr=0.1, **arguments)
    optimizer = CPUOffloadOptimizer(inner, chunk, cpu_fraction=fraction, offload_gradients=True)
    return params, optimizer, Reference(make_params(dtype, shapes), **arguments)


def assert_same(params, optimizer, reference) -> None:
    assert_same_training(params, optimizer, reference.params, reference.optimizer)


# ---- what it gives ----


@pytest.mark.parametrize("chunk", [1, 5_000, None])
@pytest.mark.parametrize("fraction", [0, 0.3, 1])
@pytest.mark.parametrize("form", FORMS)
def test_four_micro_batches_clipped_are_the_plain_optimizer_fed_their_fp32_sum(form, fraction, chunk, where):
    dtype, arguments = FORMS[form]
    params, optimizer, reference = pair(dtype, chunk, fraction, **arguments)
    for step in range(3):
        for micro_batch in range(4):
            reference.add(backward(params, 4 * step + micro_batch))
            assert all(p.grad is None for p in params)
        norm = reference.clip(50.0)
        assert norm > 100.0, "nothing is clipped"
        assert_same_values(optimizer.clip_grad_norm_(50.0), norm, "norm")
        optimizer.step()
        reference.step()
    assert_same(params, optimizer, reference)


def test_control_sums_in_bf16_are_not_the_same():
    """What the parameters' own dtype would lose shows."""
    params, optimizer, reference = pair(torch.bfloat16, master_weights=True)
    for micro_batch in range(4):
        grads = backward(params, micro_batch)
        rounded = [g if s is None else (s + g).bfloat16() - s for g, s in zip(grads, reference.sums, strict=True)]
        reference.add(rounded)
    optimizer.step()
    reference.step()
    with pytest.raises(AssertionError, match="bits differ"):
        assert_same(params, optimizer, reference)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_any_number_of_threads_adds_up_the_same_sums(threads, where, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as launchers have it
    params, reference = make_params(torch.bfloat16), Reference(make_params(torch.bfloat16), master_weights=True)
    inner = FusedAdam(params, lr=0.1, master_weights=True)
    optimizer = CPUOffloadOptimizer(inner, 5_000, cpu_threads=threads, offload_gradients=True)
    before = set(threading.enumerate())
    for micro_batch in range(3):
        reference.add(backward(params, micro_batch))
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)
    assert set(threading.enumerate()) <= before | {threading.main_thread()}, "a thread is left after the step"


def test_a_gradient_is_gone_before_the_next_is_made(where):
    params, optimizer, _ = pair()
    left = []
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: left.append([q.grad is not None for q in params]))
    backward(params, 0)
    assert len(left) == len(params) and not any(map(any, left))
    assert optimizer.strategy.gradients.has(params[0])


def test_gradients_in_flight_are_let_go_once_they_have_arrived(where):
    """Of many parameters no more gradients are alive than the slots hold, and after the step none."""
    params, optimizer, _ = pair(shapes=[(1000,)] * 30)
    alive, most = weakref.WeakSet(), 0

    def watch(p):
        nonlocal most
        alive.add(p.grad)
        most = max(most, len(alive))

    optimizer_hooks = [dict(p._post_accumulate_grad_hooks) for p in params]
    for p, ours in zip(params, optimizer_hooks, strict=True):
        p._post_accumulate_grad_hooks.clear()
        p.register_post_accumulate_grad_hook(watch)
        p._post_accumulate_grad_hooks.update(ours)
    backward(params, 0)
    assert most <= 5  # three slots of a gradient each, the one that is taken, and one that straddles
    optimizer.step()
    gc.collect()
    assert not alive


def test_small_views_of_a_large_buffer_do_not_keep_it(on_device, monkeypatch):
    """FSDP2's gradients are views of one buffer for all that it reduces together: eight bytes would hold 80,000."""
    monkeypatch.setattr(staging, "HELD_BYTES", 100_000)
    on_device(Beyond())
    buffers, alive = [], []

    def views_of_one_buffer():
        # Those of earlier layers: what is taken here next may be there besides.
        alive.append(sum(size for storage, size in buffers if not storage.expired()))
        buffer = torch.ones(20_000)
        buffers.append((StorageWeakRef(buffer.untyped_storage()), buffer.nbytes))
        return buffer[:2], buffer[1000:1002]

    params = [Parameter(torch.zeros(2)) for _ in range(20)]
    unused = Parameter(torch.zeros(100_000))  # makes the slots so large that none is ever full
    optimizer = CPUOffloadOptimizer(FusedAdam([*params, unused]), offload_gradients=True)
    for _ in range(2):  # two micro-batches
        sum(with_gradients(views_of_one_buffer, *params[i : i + 2]) for i in range(0, 20, 2)).backward()
        assert len(buffers) % 10 == 0 and all(p.grad is None for p in params)
        at_the_end = sum(size for storage, size in buffers if not storage.expired())
        assert max(*alive, at_the_end) <= 100_000 + 80_000 and at_the_end <= 100_000
    reference = [Parameter(torch.zeros(2)) for _ in range(20)]
    for p in reference:
        p.grad = torch.full((2,), 2.0)
    FusedAdam(reference).step()
    optimizer.step()
    for p, q in zip(params, reference, strict=True):
        assert_same_values(p, q)


@pytest.mark.parametrize("norm_type", [1.0, 2, 3.5, float("inf")])
def test_the_norm_is_torchs_and_below_the_limit_nothing_is_scaled(norm_type, where):
    params, optimizer, reference = pair()
    reference.add(backward(params, 0))
    for limit in (1e9, 1.0):
        assert_same_values(optimizer.clip_grad_norm_(limit, norm_type), reference.clip(limit, norm_type), "norm")
    optimizer.step()
    reference.step()
    small = [torch.full_like(p, 1e-8) for p in params]  # so that torch's 1e-6 beside the norm counts
    for p, g in zip(params, small, strict=True):
        p.grad = g
    reference.add(small)
    assert_same_values(optimizer.clip_grad_norm_(1e-9, norm_type), reference.clip(1e-9, norm_type), "norm")
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_gradients_that_are_missing(where):
    params, optimizer, reference = pair("mixed", master_weights=True)
    for step, missing in enumerate([(), (1, 4), (0,), range(6), (2, 3)]):
        for micro_batch in range(2):
            gone = missing if micro_batch else range(6)  # the first micro-batch has none at all
            if len(tuple(gone)) < len(params):
                reference.add(backward(params, 10 * step + micro_batch, gone))
        optimizer.step()
        reference.step()
    assert_same(params, optimizer, reference)


# ---- parameters ----


def test_a_shared_parameter_has_one_sum(where):
    """Twice in the model, and listed twice."""
    params, reference = make_params(shapes=[(8, 8)]), Reference(make_params(shapes=[(8, 8)]))
    with pytest.warns(UserWarning, match="duplicate"):
        inner = FusedAdam([params[0], params[0]], lr=0.1)
    optimizer = CPUOffloadOptimizer(inner, 5_000, offload_gradients=True)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    ((params[0] * a).sum() + (params[0] * b).sum()).backward()
    reference.add([a + b])
    optimizer.step()
    reference.step()
    assert_same_values(params[0], reference.params[0])


def test_frozen_parameters_are_left_alone_and_train_when_they_are_unfrozen(where):
    params, reference = make_params(), Reference(make_params())
    for p in params[:2]:
        p.requires_grad_(False)
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 5_000, offload_gradients=True)
    reference.add(backward(params, 0, missing=(0, 1)))
    optimizer.step()
    reference.step()
    for p in params[:2]:  # their hooks come with the next step: these gradients it takes itself
        p.requires_grad_(True)
    reference.add(backward(params, 1))
    assert params[0].grad is not None
    optimizer.step()
    reference.step()
    params[2].requires_grad_(False)
    reference.add(backward(params, 2, missing=(2,)))
    assert params[0].grad is None
    optimizer.step()
    reference.step()
    assert_same(params[:2] + params[3:], optimizer, _without(reference, 2))
    assert_same_values(params[2], reference.params[2])


def _without(reference, index):
    other = copy.copy(reference)
    other.params = [p for i, p in enumerate(reference.params) if i != index]
    return other


def test_a_gradient_set_by_hand_is_taken_by_the_step_and_by_clipping(where):
    params, optimizer, reference = pair()
    for clipped in (False, True):
        grads = [torch.full_like(p, 3.0) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        reference.add(grads)
        if clipped:
            optimizer.clip_grad_norm_(1.0)
            reference.clip(1.0)
        optimizer.step()
        reference.step()
        assert all(p.grad is None for p in params)
    assert_same(params, optimizer, reference)


def test_a_gradient_that_was_there_before_backward_counts(where):
    params, optimizer, reference = pair()
    params[0].grad = torch.ones_like(params[0])
    grads = backward(params, 0)
    reference.add([grads[0] + 1.0, *grads[1:]])
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_groups_that_are_added_and_parameters_that_are_replaced(where):
    params, optimizer, reference = pair(shapes=SHAPES[:3])
    backward(params, 0)
    reference.add(backward(make_params(shapes=SHAPES[:3]), 0))
    more, others = make_params(shapes=SHAPES[3:], seed=1), make_params(shapes=SHAPES[3:], seed=1)
    optimizer.add_param_group({"params": more, "lr": 0.3})
    reference.optimizer.add_param_group({"params": others, "lr": 0.3})
    params, reference.params, reference.sums = params + more, reference.params + others, reference.sums + [None] * 3
    reference.add(backward(params, 1))
    assert all(p.grad is None for p in params)
    optimizer.step()
    reference.step()
    old = params[0]
    params[0] = optimizer.param_groups[0]["params"][0] = make_params(seed=4)[0]
    reference.params[0] = reference.optimizer.param_groups[0]["params"][0] = make_params(seed=4)[0]
    reference.add(backward(params, 2))
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)
    (old * 2).sum().backward()
    assert old.grad is not None, "a parameter that is gone still has its hook"


def test_layouts_and_dtypes_that_change_between_micro_batches(where):
    def made():
        torch.manual_seed(3)
        return [Parameter(torch.randn(8, 3, 5, 5)), Parameter(torch.randn(40, 30).t()), Parameter(torch.randn(601)[1:])]

    params, reference = made(), Reference(made(), master_weights=True)
    inner = FusedAdam(params, lr=0.1, master_weights=True)
    optimizer = CPUOffloadOptimizer(inner, 5_000, cpu_fraction=0.5, offload_gradients=True)

    def step(number):
        optimizer.step()
        reference.step()

    for number, change in enumerate(
        [lambda p: p, lambda p: p.to(memory_format=torch.channels_last) if p.dim() == 4 else p, lambda p: p.bfloat16()]
    ):
        reference.add(backward(params, 2 * number))
        for ps in (params, reference.params):
            for p in ps:
                p.data = change(p.data)
        step(number) if number == 2 else None
        reference.add(backward(params, 2 * number + 1))
        step(number)
    assert_same(params, optimizer, reference)


def test_a_model_that_moves_to_another_device_between_micro_batches(on_device):
    first = on_device(Beyond())
    params, optimizer, reference = pair()
    reference.add(backward(params, 0))
    second, started, start = on_device(Beyond()), [], first.start
    first.start = lambda flow: started.append(flow) or start(flow)
    first.torch_device = torch.device("cuda", 7)  # from now on the parameters are elsewhere

    def gone(*_):
        raise AssertionError("a copy on the device that the model has left")

    first.copy = gone
    reference.add(backward(params, 1))
    assert optimizer.strategy.device is second
    assert started, "copies of a device that was left were not waited for there"
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_a_shape_that_changes_is_refused_until_zero_grad(where):
    params, optimizer, _ = pair(shapes=[(40, 33), (13,)])
    backward(params, 0)
    params[0].data = torch.randn(20, 33)
    before = params[1].detach().clone()
    for call in (optimizer.step, lambda: backward(params, 1)):
        with pytest.raises(ValueError, match=r"parameter 0 of group 0: its local shape is \(20, 33\).*\(40, 33\)"):
            call()
    assert torch.equal(params[1], before)
    optimizer.zero_grad()
    backward(params, 2)
    optimizer.step()
    assert not torch.equal(params[1], before)


# ---- the protocol ----


def test_zero_grad_drops_the_sums_or_makes_them_zero(where):
    params, optimizer, reference = pair()
    backward(params, 0)
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    assert_same_values(params[0], reference.params[0])
    backward(params, 0)
    optimizer.zero_grad(set_to_none=False)
    reference.add([torch.zeros_like(p) for p in params])
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_a_step_uses_the_sums_up_even_where_only_the_model_is_told_to_zero_its_gradients(where):
    params, optimizer, reference = pair()
    for step in range(2):
        reference.add(backward(params, step))
        optimizer.step()
        reference.step()
        for p in params:
            p.grad = None
    weights = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    assert optimizer.state[params[0]]["step"] == 2
    assert_same_values(params[0], reference.params[0])


def test_a_closure(where):
    params, optimizer, reference = pair()
    grads = []

    def closure():
        optimizer.zero_grad()
        grads.extend(backward(params, 0))
        return 1.5

    backward(params, 9)  # dropped by the closure
    assert optimizer.step(closure) == 1.5
    reference.add(grads)
    reference.step()
    assert_same(params, optimizer, reference)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_in_the_middle_of_an_accumulation_goes_on_alone(way, where):
    params, optimizer, reference = pair(torch.bfloat16, master_weights=True)
    for step in range(2):
        reference.add(backward(params, 2 * step))
        if step:
            copied = copy.deepcopy if way == "deepcopy" else lambda value: pickle.loads(pickle.dumps(value))
            twin_params, twin = copied((params, optimizer))
            backward(twin_params, 3)
            twin.clip_grad_norm_(1.0)
            twin.step()
        reference.add(backward(params, 2 * step + 1))
        optimizer.clip_grad_norm_(1.0)
        reference.clip(1.0)
        optimizer.step()
        reference.step()
    assert_same(params, optimizer, reference)
    assert_same_training(twin_params, twin, reference.params, reference.optimizer)


def test_checkpoints_hold_no_gradients_and_loading_leaves_the_sums(where):
    params, optimizer, reference = pair()
    for step in range(2):
        reference.add(backward(params, step))
        saved = optimizer.state_dict()
        assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        optimizer.load_state_dict(saved)
        optimizer.step()
        reference.step()
    assert_same(params, optimizer, reference)


def test_hooks_and_memory_go_with_the_optimizer(where):
    params, optimizer, _ = pair()
    backward(params, 0)
    optimizer.step()
    memory = optimizer.strategy.device.memory
    del optimizer
    assert not any(p._post_accumulate_grad_hooks for p in params)
    assert not list(memory._mappings)
    backward(params, 1)
    assert all(p.grad is not None for p in params)


def test_the_optimizer_that_took_over_gets_the_gradients(where):
    params, first, reference = pair()
    second = CPUOffloadOptimizer(first.inner, 5_000, offload_gradients=True)
    reference.add(backward(params, 0))
    second.step()
    reference.step()
    assert_same(params, second, reference)
    with pytest.raises(RuntimeError, match="another CPUOffloadOptimizer has taken over"):
        first.step()


def test_without_the_option_clipping_is_torchs():
    params, others = make_params(), make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 5_000)
    backward(params, 0), backward(others, 0)
    assert_same_values(optimizer.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(others, 1.0))
    for p, q in zip(params, others, strict=True):
        assert_same_values(p.grad, q.grad)


# ---- memory ----


def test_its_host_memory_is_four_bytes_an_element_and_the_bound_holds_gradients_too(on_device):
    on_device(Beyond())
    shapes = [(100, 256), (300,)]
    elements = 100 * 256 + 512  # padded
    options = {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    plain = CPUOffloadOptimizer(FusedAdam(make_params(torch.bfloat16, shapes), **options)).plan
    optimizer = CPUOffloadOptimizer(FusedAdam(make_params(torch.bfloat16, shapes), **options), offload_gradients=True)
    plan = optimizer.plan
    assert plan.gradient_bytes == 4 * elements and plain.gradient_bytes == 0
    assert plan.host_bytes == plain.host_bytes == optimizer.host_state_bytes == 8 * elements
    assert plan.device_bytes == plain.device_bytes + 4 * elements
    assert plan.staging_bytes == 3 * -(-(100 * 256 + 300) * 4 // 64) * 64
    assert optimizer.memory_report().host["grads"] == 4 * elements
    small = CPUOffloadOptimizer(FusedAdam(make_params(shapes=shapes)), 20_000, offload_gradients=True)
    assert small.plan.device_bytes <= 20_000


def test_of_the_hosts_share_only_weights_have_room_in_its_slots(on_device):
    """BF16 weights: 2 bytes an element, where gradients that are not offloaded take 4 more."""
    on_device(Beyond())
    params = make_params(torch.bfloat16, [(1000,)])
    plan = CPUOffloadOptimizer(FusedAdam(params), cpu_fraction=1, offload_gradients=True).plan
    assert plan.staging_bytes == 3 * 1024 * 2 + 3 * -(-1000 * 4 // 64) * 64


@pytest.mark.parametrize("fraction", [0, 1])
def test_a_step_moves_gradients_up_once_and_never_back(fraction, on_device):
    device = on_device(Counting())
    params = make_params(torch.bfloat16, [(64, 64)])
    inner = FusedAdam(params, master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    optimizer = CPUOffloadOptimizer(inner, cpu_fraction=fraction, offload_gradients=True)
    n = 64 * 64
    for _ in range(2):  # in the first step weights come down, to be compared with their masters
        device.count_anew()
        backward(params, 0)
        optimizer.strategy.gradients.flush()
        assert tuple(device.moved.values()) == (0, 0, 2 * n, 0)
        device.count_anew()
        optimizer.step()
    expected = (0, 0, 0, 2 * n) if fraction else ((8 + 4) * n, 8 * n, 0, 0)
    assert tuple(device.moved.values()) == expected


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_a_timeline_is_of_the_step_alone(fraction, where):
    """Though gradients are taken while it records, its chunks are those of the plan, with their gradients loaded."""
    params, optimizer, _ = pair(torch.bfloat16, 20_000, fraction, master_weights=True)
    seen = []
    backward(params, 0)
    optimizer.step()  # in which weights come down, to be compared with their masters
    for backward_too in (False, True):
        backward(params, 0)
        with Timeline(optimizer) as timeline:
            if backward_too:
                backward(params, 1)
            optimizer.step()
        seen.append(sorted((span.what, span.chunk, span.nbytes) for span in timeline.spans))
    assert seen[0] == seen[1]
    moved = {what: sum(s[2] for s in seen[1] if s[0] == what) for what in ("load", "store")}
    assert moved["load"] > moved["store"] > 0
    if not fraction:
        assert moved["load"] - moved["store"] == optimizer.plan.gradient_bytes


# ---- errors ----


def test_an_error_in_backward_is_raised_there_and_zero_grad_begins_anew(where):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("of a layer")

    params, optimizer, reference = pair()
    with pytest.raises(ArithmeticError, match="of a layer"):
        (sum(p.sum() for p in params[1:]) + Failing.apply(params[0]).sum()).backward()
    optimizer.zero_grad()
    reference.add(backward(params, 1))
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_a_gradient_that_is_refused_stays_and_nothing_is_stepped(where):
    params, optimizer, reference = pair(shapes=[(10, 4), (13,)])
    embedded = torch.nn.functional.embedding(torch.tensor([1, 2]), params[0], sparse=True)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0: FusedAdam does not support sparse"):
        embedded.sum().backward()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0: FusedAdam does not support sparse"):
        optimizer.step()
    assert_same_values(params[0], reference.params[0])
    params[0].grad = None
    reference.add(backward(params, 0))
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


@pytest.mark.parametrize("call", ["step", "clip_grad_norm_", "state"])
def test_an_error_on_the_way_surfaces_once_and_incomplete_sums_are_refused(call, on_device, monkeypatch):
    on_device(Beyond())
    params, optimizer, reference = pair()
    backward(params, 0)  # its slot is not full: it is added up when it is needed
    with monkeypatch.context() as patch:
        patch.setattr(staging, "add_up", lambda *_: (_ for _ in ()).throw(MemoryError("of the host")))
        with pytest.raises(MemoryError, match="of the host"):
            {"step": optimizer.step, "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0)}.get(
                call, lambda: copy.deepcopy(optimizer)
            )()
    for again in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"incomplete.*zero_grad"):
            again()
    assert_same_values(params[0], reference.params[0])
    optimizer.zero_grad()
    reference.add(backward(params, 1))
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_an_error_of_a_step_leaves_the_sums_for_the_next(where, monkeypatch):
    from statestream import kernels

    params, optimizer, reference = pair(fraction=0.5)
    reference.add(backward(params, 0))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "adam", lambda *_, **__: (_ for _ in ()).throw(ArithmeticError("of the kernel")))
        with pytest.raises(ArithmeticError, match="of the kernel"):
            optimizer.step()
    assert_same_values(params[0], reference.params[0])
    optimizer.step()
    reference.step()
    assert_same(params, optimizer, reference)


def test_a_gradient_set_again_after_backward_is_refused_as_ddp_would_do_it(where):
    params, optimizer, reference = pair()
    backward(params, 0)
    params[2].grad = torch.zeros_like(params[2])
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"parameter 2 of group 0: .*DistributedDataParallel.*fully_shard"):
            call()
    assert_same_values(params[0], reference.params[0])


def test_a_norm_that_is_not_finite(where):
    params, optimizer, reference = pair()
    grads = backward(params, 0)
    bad = [g.clone() for g in grads]
    bad[0][0, 0] = float("inf")
    sum((p * g).sum() for p, g in zip(params, bad, strict=True)).backward()
    reference.add(grads)
    reference.add(bad)
    with pytest.raises(RuntimeError, match=r"order 2.0 .* is inf; nothing was clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert_same_values(optimizer.clip_grad_norm_(1.0), reference.clip(1.0))
    optimizer.step()
    reference.step()
    assert torch.equal(bits(params[1]), bits(reference.params[1]))


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_is_refused_by_name_before_anything_changes(unscale, where):
    params, optimizer, reference = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"GradScaler .*offload_gradients"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"GradScaler .*offload_gradients"):
        optimizer.step(grad_scaler=scaler)
    assert_same_values(params[0], reference.params[0])


def test_gradscaler_and_trainers_are_told_that_the_step_would_have_to_unscale_so_that_it_can_refuse():
    _, optimizer, _ = pair()
    assert optimizer._step_supports_amp_scaling and not optimizer.inner._step_supports_amp_scaling


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_what_is_neither_true_nor_false_is_refused(value):
    with pytest.raises(ValueError, match=r"offload_gradients: .* True or False"):
        CPUOffloadOptimizer(FusedAdam(make_params()), offload_gradients=value)


def test_other_optimizers_and_decoupled_gradients_are_refused_by_name():
    with pytest.raises(ValueError, match=r"offload_gradients: .*FusedAdam.*AdamW"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params()), offload_gradients=True)
    params = make_params()
    with pytest.raises(ValueError, match=r"offload_gradients: .*use_decoupled_grad"):
        CPUOffloadOptimizer(FusedAdam(params, use_decoupled_grad=True), offload_gradients=True)
    assert not any(p._post_accumulate_grad_hooks for p in params)


@pytest.mark.parametrize("norm_type", [0, -1, float("nan"), float("-inf")])
def test_an_order_that_is_no_norm_is_refused(norm_type):
    params, optimizer, _ = pair()
    backward(params, 0)
    with pytest.raises(ValueError, match=r"norm_type: .* above 0, or inf"):
        optimizer.clip_grad_norm_(1.0, norm_type)
