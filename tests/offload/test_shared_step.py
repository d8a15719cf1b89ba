"""A step that the host shares gives the bits of one that it does not: any share, chunk and number of threads."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.devices import Beyond
from helpers.gil import ticks_in_calls
from helpers.modes import FORMS
from helpers.training import build, train
from statestream import CPUOffloadOptimizer, FusedAdam, kernels
from statestream.offload.adam import host_share
from statestream.streaming import host_pipeline

from .conftest import Counting, assert_same_training, make_params, params_of_odd_layouts, set_grads
from .conftest import train as train_params

FRACTIONS = [0, 0.25, 0.5, 1, "auto"]


@pytest.fixture(params=["in place", "copied"])
def where(request, on_device, monkeypatch):
    """Where the host's share is updated. Slots are so small that there are many chunks."""
    monkeypatch.setattr(host_share, "SLOT_BYTES", 4_000)
    if request.param == "copied":
        on_device(Beyond())
    return request.param


@pytest.mark.parametrize("chunk", [1, 5_000, None])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_five_steps_are_bit_equal_with_a_save_and_a_load_in_the_middle(form, fraction, chunk, where):
    plain, shared = build(form), CPUOffloadOptimizer(build(form), chunk, cpu_fraction=fraction)
    train(plain, range(5))
    train(shared, range(3))
    shared.load_state_dict(shared.state_dict())
    train(shared, range(3, 5))
    assert not differences(snapshot(plain), snapshot(shared))


@pytest.mark.parametrize("chunk", [200_000, None])
@pytest.mark.parametrize("fraction", [0, 0.25, 0.5, 1])
def test_any_number_of_threads(fraction, chunk, where, monkeypatch):
    """With pieces so large that a call has work for several threads."""
    monkeypatch.setattr(host_share, "SLOT_BYTES", 1 << 20)
    largest, adam = 0, kernels.adam

    def noting(device, rows, *args, threads=None, **rest):
        nonlocal largest
        if threads is not None:
            largest = max(largest, sum(rows[:: kernels.ROW_WORDS]))
        adam(device, rows, *args, threads=threads, **rest)

    def params():
        return make_params(torch.bfloat16, [(300, 331), (13,), (40_001,)])

    reference = params()
    plain = FusedAdam(reference, lr=0.1, master_weights=True)
    train_params(plain, reference, range(5))
    monkeypatch.setattr(kernels, "adam", noting)
    for threads in (1, 2, 3, 7):
        mine = params()
        inner = FusedAdam(mine, lr=0.1, master_weights=True)
        shared = CPUOffloadOptimizer(inner, chunk, cpu_fraction=fraction, cpu_threads=threads)
        train_params(shared, mine, range(5))
        assert_same_training(mine, shared, reference, plain)
    assert largest > 30_000 or not fraction


def test_torchs_number_of_threads_is_left_alone_and_ours_is_used(monkeypatch, where):
    used, adam = [], kernels.adam

    def noting(*args, threads=None, **rest):
        used.append(threads)
        adam(*args, threads=threads, **rest)

    monkeypatch.setattr(kernels, "adam", noting)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    params = make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 5_000, cpu_fraction=1, cpu_threads=3)
    train_params(optimizer, params, range(2))
    assert set(used) == {3} and torch.get_num_threads() == before


def missing(step):
    return {0: (), 1: (1, 4), 2: (0,), 3: (0, 1, 2, 3, 4, 5)}.get(step, ())


@pytest.mark.parametrize("fraction", [0.5, 1])
def test_gradients_that_are_missing(fraction, where):
    params, reference = make_params("mixed"), make_params("mixed")
    plain = FusedAdam(reference, lr=0.1, master_weights=True)
    shared = CPUOffloadOptimizer(FusedAdam(params, lr=0.1, master_weights=True), 20_000, cpu_fraction=fraction)
    train_params(plain, reference, range(6), missing)
    train_params(shared, params, range(6), missing)
    assert_same_training(params, shared, reference, plain)


def test_weights_that_were_written_since_come_down_once_more(where):
    """With FP32 masters weights only go up, unless somebody else wrote them."""
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    plain = FusedAdam(reference, lr=0.1, master_weights=True)
    shared = CPUOffloadOptimizer(FusedAdam(params, lr=0.1, master_weights=True), 3_000, cpu_fraction=0.6)
    for optimizer, ps in ((plain, reference), (shared, params)):
        train_params(optimizer, ps, range(2))
        with torch.no_grad():
            for p, new in zip(ps, make_params(torch.bfloat16, seed=9), strict=True):
                p.copy_(new)
        train_params(optimizer, ps, range(2, 4))
    assert_same_training(params, shared, reference, plain)


def test_layouts_that_are_not_contiguous(where):
    mine, reference = params_of_odd_layouts(), params_of_odd_layouts()
    plain = FusedAdam(reference, lr=0.1)
    shared = CPUOffloadOptimizer(FusedAdam(mine, lr=0.1), 2_000, cpu_fraction=0.7)
    train_params(plain, reference, range(3))
    train_params(shared, mine, range(3))
    assert_same_training(mine, shared, reference, plain)


def test_groups_that_are_added_and_parameters_that_are_replaced(where):
    params, reference = make_params(), make_params()
    plain = FusedAdam(reference[:3], lr=0.1)
    shared = CPUOffloadOptimizer(FusedAdam(params[:3], lr=0.1), 20_000, cpu_fraction=0.5)
    for optimizer, ps in ((plain, reference), (shared, params)):
        train_params(optimizer, ps[:3], [0])
        optimizer.add_param_group({"params": ps[3:], "lr": 0.3})
        train_params(optimizer, ps, [1])
        ps[0] = optimizer.param_groups[0]["params"][0] = make_params(seed=4)[0]
        train_params(optimizer, ps, [2, 3])
    assert_same_training(params, shared, reference, plain)


def test_a_scaler_and_a_skipped_step(where):
    params, reference = make_params(), make_params()
    plain = FusedAdam(reference, lr=0.1)
    shared = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 20_000, cpu_fraction=0.5)
    for optimizer, ps in ((plain, reference), (shared, params)):
        for step, found in enumerate((0.0, 1.0, 0.0)):
            set_grads(ps, step)
            scaled = [p.grad.clone() for p in ps]
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
            optimizer.step()
            assert all(torch.equal(p.grad, g if found else g / 8) for p, g in zip(ps, scaled, strict=True))
        del optimizer.grad_scale, optimizer.found_inf
    assert_same_training(params, shared, reference, plain)


def test_in_inference_mode(where):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    shared, plain = CPUOffloadOptimizer(FusedAdam(params), 3_000, cpu_fraction=0.5), FusedAdam(reference)
    for optimizer, ps in ((shared, params), (plain, reference)):
        with torch.inference_mode():
            train_params(optimizer, ps, [0])
        train_params(optimizer, ps, [1])
    assert_same_training(params, shared, reference, plain)


# ---- the worker ----


def test_the_gil_is_free_while_the_host_computes(on_device):
    on_device(Beyond())
    params = [torch.nn.Parameter(torch.ones(4_000_000))]
    optimizer = CPUOffloadOptimizer(FusedAdam(params), cpu_fraction=1, cpu_threads=1)
    params[0].grad = torch.ones_like(params[0])
    with ticks_in_calls("adam") as counts:
        for _ in range(60):
            optimizer.step()
            if any(counts):
                break
    assert any(counts)


def test_no_thread_is_left_after_a_step_and_the_optimizer_can_go(where):
    params = make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 5_000, cpu_fraction=0.5)
    train_params(optimizer, params, range(2))
    assert not [t for t in threading.enumerate() if t.name == "statestream host share"]
    memory = optimizer.strategy.device.memory
    del optimizer
    gc.collect()
    assert not list(memory._mappings)


def test_an_error_in_the_worker_surfaces_once_with_state_intact(where, monkeypatch):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    plain = FusedAdam(reference, lr=0.1, master_weights=True)
    shared = CPUOffloadOptimizer(FusedAdam(params, lr=0.1, master_weights=True), 5_000, cpu_fraction=1)
    train_params(plain, reference, range(2))
    train_params(shared, params, [0])
    before = [(p.detach().clone(), {k: v.clone() for k, v in shared.state[p].items()}) for p in params]
    set_grads(params, 1)
    grads = [p.grad for p in params]

    def failing(*args, **kwargs):
        raise ArithmeticError("of the kernel")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "adam", failing)
        with pytest.raises(ArithmeticError, match="of the kernel"):
            shared.step()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    for p, (weight, state) in zip(params, before, strict=True):
        assert torch.equal(p, weight) and all(torch.equal(shared.state[p][k], v) for k, v in state.items())
    shared.step()
    assert_same_training(params, shared, reference, plain)


@pytest.mark.parametrize("fraction", [0.3, 0.6, 1])
def test_an_error_at_any_kernel_call_leaves_each_parameter_before_or_after(fraction, where, monkeypatch):
    """Of either side, and a parameter may be cut between them."""
    shapes = [(40, 33), (13,), (32, 32), (7,), (600,)]

    def built():
        params = make_params(torch.bfloat16, shapes)
        return params, FusedAdam(params, lr=0.1, master_weights=True)

    adam, lock, calls, fail_at = kernels.adam, threading.Lock(), 0, None

    def counted(*args, **kwargs):
        nonlocal calls
        with lock:
            calls += 1
            if calls - 1 == fail_at:
                raise ArithmeticError("of the kernel")
        adam(*args, **kwargs)

    monkeypatch.setattr(kernels, "adam", counted)
    params, inner = built()
    optimizer = CPUOffloadOptimizer(inner, 9_000, cpu_fraction=fraction)
    train_params(optimizer, params, [0])
    outcomes, of_one_step = set(), calls
    for number in range(of_one_step):
        before = [(p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in params]
        others, plain = built()
        for q, (weight, state) in zip(others, before, strict=True):
            q.data.copy_(weight)
            for k, v in state.items():
                plain.state[q][k].copy_(v)
        train_params(plain, others, [1 + number])
        set_grads(params, 1 + number)
        fail_at = calls + number
        with pytest.raises(ArithmeticError, match="of the kernel"):
            optimizer.step()
        fail_at = None
        assert not optimizer.strategy.torn
        for p, q, (weight, state) in zip(params, others, before, strict=True):
            mine = (p, *optimizer.state[p].values())
            is_before = all(map(torch.equal, mine, (weight, *state.values())))
            assert is_before or all(map(torch.equal, mine, (q, *plain.state[q].values())))
            outcomes.add(is_before)
    assert outcomes == {True, False}


# ---- what it takes ----


@pytest.mark.parametrize(
    ("dtype", "options", "first", "later"),
    [
        (torch.bfloat16, {"master_weights": True}, (2 + 2, 2), (2, 2)),
        (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}, (2 + 2, 2), (2 + 2, 2)),
        (torch.float32, {}, (4 + 4, 4), (4 + 4, 4)),
    ],
)
def test_gradients_come_down_and_weights_go_up_and_weights_with_a_right_master_do_not_come_down(
    dtype, options, first, later, on_device
):
    """Bytes an element, down and up."""
    device, params = on_device(Counting()), make_params(dtype, [(64, 64)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params, **options), cpu_fraction=1)
    for step, (down, up) in enumerate((first, later, later)):
        device.count_anew()
        train_params(optimizer, params, [step])
        n = params[0].numel()
        assert device.moved == {"load": 0, "store": 0, "down": down * n, "up": up * n}


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1])
def test_the_devices_part_is_smaller_and_the_bound_holds(fraction, on_device):
    on_device(Beyond())
    params = make_params(shapes=[(100, 256)])
    whole = CPUOffloadOptimizer(FusedAdam(make_params(shapes=[(100, 256)])), None).plan
    plan = CPUOffloadOptimizer(FusedAdam(params), None, cpu_fraction=fraction).plan
    assert plan.device_bytes == (1 - fraction) * whole.device_bytes
    assert plan.host_bytes == whole.host_bytes
    assert CPUOffloadOptimizer(FusedAdam(params), 5_000, cpu_fraction=fraction).plan.device_bytes <= 5_000


def test_slots_are_three_and_no_larger_than_needed(on_device):
    on_device(Beyond())
    small = CPUOffloadOptimizer(FusedAdam(make_params(torch.bfloat16, [(1000,)])), cpu_fraction=1).plan
    assert small.staging_bytes == 3 * 1024 * (4 + 2)
    large = CPUOffloadOptimizer(FusedAdam(make_params(torch.bfloat16, [(4096, 4096)])), cpu_fraction=1).plan
    assert large.staging_bytes == 3 * (16 << 20)
    optimizer = CPUOffloadOptimizer(FusedAdam(make_params(torch.bfloat16, [(1000,)])), cpu_fraction=1)
    assert optimizer.memory_report().host["staging"] == small.staging_bytes
    assert CPUOffloadOptimizer(FusedAdam(make_params(torch.bfloat16, [(4096, 4096)]))).plan.staging_bytes == 0


def test_beside_parameters_on_the_cpu_there_is_no_staging_and_auto_is_all():
    optimizer = CPUOffloadOptimizer(FusedAdam(make_params()), 5_000, cpu_fraction="auto")
    assert optimizer.cpu_fraction == 1.0
    assert optimizer.plan.staging_bytes == optimizer.plan.device_bytes == 0


def test_auto_settles(on_device):
    on_device(Beyond())
    params = make_params(shapes=[(300, 256)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 60_000, cpu_fraction="auto")
    seen = []
    for step in range(12):
        train_params(optimizer, params, [step])
        seen.append(optimizer.cpu_fraction)
    assert seen[0] == 0.5 and len(set(seen)) > 1, "the share never moved"
    assert len(set(seen[7:])) == 1, "it never settled"


@pytest.mark.parametrize("never", [(0,), (5,), (0, 1, 2), (3, 4, 5), (0, 2, 4)])
def test_auto_settles_where_some_parameters_never_have_a_gradient(never, on_device, monkeypatch):
    """At the share of what is stepped that it would settle at without them."""
    device = on_device(Counting())
    monkeypatch.setattr(host_share, "SLOT_BYTES", 4_000)
    # The host takes one second a gigabyte, the device two.
    monkeypatch.setattr(host_pipeline.StepTimes, "seconds", lambda self: tuple(seconds))
    params = make_params(shapes=[(100, 256)] * 6)
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 60_000, cpu_fraction="auto")
    shares = []
    for step in range(10):
        device.count_anew()
        train_params(optimizer, params, [step], missing=lambda step: never)
        stepped = (6 - len(never)) * 100 * 256 * 8
        seconds = [2.0 * device.moved["load"], 1.0 * (stepped - device.moved["load"])]
        shares.append(1 - device.moved["load"] / stepped)
    assert shares[0] == pytest.approx(0.5, abs=0.02)
    assert shares[-3:] == [pytest.approx(2 / 3, abs=0.02)] * 3, shares


def test_auto_settles_where_parameters_take_turns(on_device):
    on_device(Beyond())
    params = make_params(shapes=[(100, 256), (200, 256)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params), 60_000, cpu_fraction="auto")
    train_params(optimizer, params, range(8), missing=lambda step: (step % 2,))
    settled = optimizer.cpu_fraction
    train_params(optimizer, params, range(8, 12))
    assert optimizer.cpu_fraction == settled != 0.5


def test_slots_grow_with_the_parameters_that_are_added(on_device):
    """A BF16 parameter of 13 elements needs 6 bytes for each of 256, an FP32 one 8, which would not fit."""
    on_device(Beyond())
    params, more = make_params(torch.bfloat16, [(13,)]), make_params(shapes=[(100, 33)], seed=1)
    reference, others = make_params(torch.bfloat16, [(13,)]), make_params(shapes=[(100, 33)], seed=1)
    shared, plain = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), cpu_fraction=1), FusedAdam(reference, lr=0.1)
    assert shared.plan.staging_bytes == 3 * 256 * 6
    train_params(shared, params, [0])
    train_params(plain, reference, [0])
    shared.add_param_group({"params": more})
    plain.add_param_group({"params": others})
    assert shared.plan.staging_bytes == 3 * (256 * 6 + 13 * 256 * 8)
    train_params(shared, params + more, [1, 2])
    train_params(plain, reference + others, [1, 2])
    assert_same_training(params + more, shared, reference + others, plain)


# ---- refusals ----


@pytest.mark.parametrize("fraction", [-0.1, 1.1, True, None, "half", float("nan")])
def test_a_share_that_is_none_is_refused(fraction):
    with pytest.raises(ValueError, match=r"cpu_fraction: .* from 0 to 1"):
        CPUOffloadOptimizer(FusedAdam(make_params()), cpu_fraction=fraction)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, 5000])
def test_a_number_of_threads_that_is_none_is_refused(threads):
    with pytest.raises(ValueError, match=r"cpu_threads: .* from 1 to 4096"):
        CPUOffloadOptimizer(FusedAdam(make_params()), cpu_fraction=1, cpu_threads=threads)


def test_other_optimizers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"cpu_fraction: 0.5 is for FusedAdam.*AdamW"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params()), cpu_fraction=0.5)
