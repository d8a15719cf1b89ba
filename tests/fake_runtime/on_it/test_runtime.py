"""What the runtime shows: late copies, order between streams, and whatever a program leaves behind. Each mistake is
planted here."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam, kernels
from statestream.device.queues import CudaDevice
from torch import Tensor

from tests.fake_runtime.plugin import left_behind
from tests.fake_runtime.runtime import STYLES, lib

LATE = STYLES.index("late")
ONE = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def late():
    lib.settle()
    lib.seed(3, LATE)


def test_a_copy_to_pinned_memory_has_arrived_when_its_event_was_waited_for():
    source, target = torch.ones(1000, device="cuda"), torch.zeros(1000, dtype=torch.float32, pin_memory=True)
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query() and target.sum() == 0
    event.synchronize()
    assert target.sum() == 1000


def test_memory_holds_poison_while_a_copy_is_on_its_way():
    target = torch.zeros(1000, dtype=torch.float32, pin_memory=True)
    source = torch.ones(1000, device="cuda")
    seen = set()
    for seed in range(30):
        torch.cuda.synchronize()
        lib.seed(seed, LATE)
        target.zero_().copy_(source, non_blocking=True)
        while not torch.cuda.current_stream().query():
            seen.add("poison" if target.isnan().any() else "before")
    assert seen == {"poison", "before"}


def test_pageable_memory_is_taken_in_before_the_call_returns():
    source, target = torch.ones(1000), torch.zeros(1000, device="cuda")
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert target.sum().item() == 1000


def test_a_stream_without_a_wait_overtakes_and_with_one_does_not():
    for waits, want in ((False, 0.0), (True, 7.0)):
        x, other = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        x.fill_(7)
        if waits:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = x.clone()
            other.synchronize()
            assert y.max().item() == want
        torch.cuda.synchronize()


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it():
    handle = ctypes.c_void_p()
    torch.cuda.current_device()
    assert lib.cudaStreamCreate(ctypes.byref(handle)) == 0
    blocking, x = torch.cuda.ExternalStream(handle.value), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(blocking):
        x.fill_(7)
    assert x.max().item() == 7  # read on the default stream
    x.fill_(8)
    with torch.cuda.stream(blocking):
        y = x.clone()
        blocking.synchronize()
        assert y.max().item() == 8


def test_memory_that_is_given_out_again_while_a_stream_reads_it_is_noticed():
    wrong = 0
    for seed in range(8):
        lib.seed(seed, seed % len(STYLES))
        x, out, other = torch.ones(4096, device="cuda"), torch.zeros(4096, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            out.copy_(x)
        del x  # no record_stream, no wait
        torch.empty(4096, device="cuda").fill_(2)
        torch.cuda.synchronize()
        wrong += out.sum().item() != 4096
    assert wrong


def test_a_copy_beyond_one_registered_block_is_refused():
    memory = torch.zeros(8192, dtype=torch.uint8)
    runtime, begin = torch.cuda.cudart(), memory.data_ptr()
    target = torch.zeros(8192, dtype=torch.uint8, device="cuda")
    for part in (0, 4096):
        assert int(runtime.cudaHostRegister(begin + part, 4096, 0)) == 0
    with pytest.raises(RuntimeError, match="invalid argument"):
        target.copy_(memory, non_blocking=True)
    for part in (0, 4096):
        assert int(runtime.cudaHostUnregister(begin + part)) == 0


# ---- what is asked at the end of each test ----


def on(device: torch.device, n: int = 3000) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(n).to(device)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def test_control_a_context_without_work_is_noticed():
    lib.forget_contexts()
    torch.cuda.set_device(1)
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")
    assert any("GPU 1 by cudaSetDevice" in line for line in left_behind())


def test_control_a_registered_block_is_noticed():
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 4096, 0)) == 0
    assert any("4096 bytes" in line for line in left_behind())
    assert int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) == 0


def test_control_memory_that_is_unregistered_under_a_copy_is_noticed():
    memory, target = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8, device="cuda")
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 4096, 0)) == 0
    target.copy_(memory, non_blocking=True)
    assert int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) == 0
    assert any("freed or unregistered" in line for line in left_behind())


def test_control_an_error_that_no_one_fetched_is_noticed():
    assert lib.cudaSetDevice(99)
    assert any(line.startswith("error 101") for line in left_behind())


def test_control_a_kernel_without_a_stand_in_is_noticed():
    with pytest.raises(RuntimeError, match="not supported"):
        torch.ops.aten._fused_dropout(torch.ones(8, device="cuda"), 0.5)
    assert any("no stand-in" in line for line in left_behind())


def test_control_a_step_that_waits_is_noticed(monkeypatch):
    optimizer = CPUOffloadOptimizer(FusedAdam(on(torch.device("cuda", 0))), 1 << 14)
    optimizer.step()
    assert left_behind_but_registered() == []
    strategy = type(optimizer.strategy)
    update = strategy.update
    monkeypatch.setattr(strategy, "update", lambda *args: (torch.cuda.synchronize(), update(*args))[1])
    optimizer.step()
    assert any("waited: cudaDeviceSynchronize" in line for line in left_behind_but_registered())


def left_behind_but_registered() -> list[str]:
    return [line for line in left_behind() if "still registered" not in line]


# ---- contexts ----


def in_a_fresh_thread(work) -> None:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, name="fresh")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


FORMS = {
    "plain": lambda p: FusedAdam(p, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", state_dict_cpu_offload=True),
    "streamed": lambda p: CPUOffloadOptimizer(FusedAdam(p), 1 << 14),
    "shared": lambda p: CPUOffloadOptimizer(FusedAdam(p), 1 << 14, cpu_fraction=0.5),
    "host alone": lambda p: CPUOffloadOptimizer(FusedAdam(p), 1 << 14, cpu_fraction=1),
    "torch's": lambda p: CPUOffloadOptimizer(torch.optim.AdamW(p), 1 << 14),
}


@pytest.mark.parametrize("fresh", [False, True], ids=["here", "in a fresh thread"])
@pytest.mark.parametrize("form", FORMS)
def test_no_context_is_opened_on_another_device(form, fresh):
    former = torch.cuda.current_device()
    params = on(ONE)
    lib.forget_contexts()
    run = in_a_fresh_thread if fresh else (lambda work: work())
    torch.zeros(1, device=ONE)
    optimizer = FORMS[form](params)
    run(optimizer.step)
    run(optimizer.state_dict)
    run(lambda: optimizer.load_state_dict(optimizer.state_dict()))
    run(optimizer.step)
    run(lambda: [p.detach().cpu() for p in params])
    assert not lib.has_context(0)
    assert torch.cuda.current_device() == former


# ---- queues ----


def test_copies_are_on_their_queues_and_leave_the_programs_stream_free():
    device = CudaDevice(torch.device("cuda", 0))
    source, target = torch.ones(1000, device="cuda"), torch.zeros(4000, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    for queue in (device.load, device.store, device.down, device.up):
        device.copy(queue, target, 0, source.view(torch.uint8), 0, 4000)
        assert torch.cuda.current_stream().query() and not queue.query()
        queue.synchronize()


# ---- settings ----


@pytest.mark.parametrize("form", ["plain", "streamed", "shared", "host alone"])
def test_what_a_step_reads_on_the_device_is_read_at_once_before_anything_is_launched(form, monkeypatch):
    def on_device(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device="cuda")

    params = on(torch.device("cuda", 0))
    optimizer = FORMS[form]([{"params": [p], "lr": on_device(0.1 * (i + 1))} for i, p in enumerate(params)])
    optimizer.step()  # makes state
    optimizer.grad_scale, optimizer.found_inf = on_device(4.0), on_device(0.0)
    torch.cuda.synchronize()
    before = lib.host_waits()
    on_device(1.0).tolist()
    one = lib.host_waits() - before  # the copy, and the stream
    before, at_launch, adam = lib.host_waits(), [], kernels.adam

    def launch(*args: object, **kwargs: object) -> None:
        at_launch.append(lib.host_waits() - before)
        adam(*args, **kwargs)

    monkeypatch.setattr(kernels, "adam", launch)
    optimizer.step()
    assert at_launch
    if form in ("plain", "streamed"):  # in the others a thread launches, and each thread has a count of its own
        assert set(at_launch) == {one}
    assert lib.host_waits() - before == one


# ---- captures ----


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]


@pytest.mark.parametrize("form", ["plain", "streamed"])
def test_a_step_that_cannot_be_captured_is_refused_and_changes_nothing(form):
    params = on(torch.device("cuda", 0))
    optimizer = FORMS[form](params)
    optimizer.step()
    torch.cuda.synchronize()
    before = states(optimizer) + [p.detach().clone() for p in params]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
        optimizer.step()
    for was, now in zip(before, states(optimizer) + [p.detach() for p in params], strict=True):
        assert torch.equal(was, now)


def test_control_memory_of_the_common_pool_in_a_capture_is_noticed():
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(other):
        held = torch.empty(1 << 12, dtype=torch.uint8, device="cuda")  # the common pool has a segment for it, with room
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
        with torch.cuda.stream(other):
            kept = torch.empty(1 << 12, dtype=torch.uint8, device="cuda")
    del held, kept
    assert any("not of its pool" in line for line in left_behind())


def test_a_wait_for_work_outside_a_capture_fails_it():
    x, other = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    event = torch.cuda.Event()
    with torch.cuda.stream(other):
        event.record()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"capture|dependency"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        event.wait()
    left_behind()


def test_a_host_wait_fails_a_capture():
    x = torch.zeros(8, device="cuda")
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        torch.cuda.synchronize()
    left_behind()


def test_branches_of_a_graph_replay_in_an_order_that_they_permit():
    x, y, other = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y.add_(x)
        torch.cuda.current_stream().wait_stream(other)
        x.mul_(2)
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [14.0] * 8 and y.tolist() == [11.0] * 8
