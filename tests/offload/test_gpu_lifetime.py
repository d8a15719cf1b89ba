"""On a real GPU: state and exports that are dropped while work goes on, and captures that this does not disturb."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ELEMENTS = 70_001


def param(value: float = 1.0) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.full((ELEMENTS,), value, dtype=torch.float32, device="cuda"))
    made.grad = torch.ones_like(made)
    return made


def offloaded(params: list[torch.nn.Parameter]) -> list[CPUOffloadOptimizer]:
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.5, exp_avg_dtype="bf16"), 200_000)
    assert optimizer.pinned_bytes == optimizer.host_state_bytes
    return [optimizer]


def here(act: Callable[[], object]) -> None:
    act()


def in_another_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("where", [here, in_another_thread])
@pytest.mark.parametrize("own", [offloaded, lambda params: [exported(params)]], ids=["offloaded", "exported"])
def test_a_capture_goes_on_while_pinned_memory_is_dropped(own, where):
    """A finaliser comes when it comes: of a cycle that an earlier run has left, in the middle of anything."""
    owner = own([param()])
    x = torch.ones(100, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        where(owner.clear)
        where(gc.collect)
        z = y * 2
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert z.tolist() == [8.0] * 100


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_an_optimizer_is_dropped_right_after_its_step(fraction):
    """Its stores may be on their way to memory that goes with it."""
    params, reference = [param(), param(2.0)], [param(), param(2.0)]
    owner = [CPUOffloadOptimizer(FusedAdam(params, lr=0.5), 200_000, cpu_fraction=fraction)]
    owner[0].step()
    owner.clear()
    FusedAdam(reference, lr=0.5).step()
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(params, reference, strict=True))


@pytest.mark.parametrize("own", [offloaded, lambda params: [exported(params)]], ids=["offloaded", "exported"])
def test_a_forked_child_that_drops_it_takes_nothing_from_its_parent(own):
    """As a data loader's worker does when it ends. CUDA cannot be called in a child."""
    owner = own([param() for _ in range(16)])
    torch.cuda.synchronize()
    child = os.fork()
    if not child:
        code = 1
        try:
            owner.clear()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (held,) = owner
    states = held["state"].values() if isinstance(held, dict) else held.state.values()
    tensors = [tensor for state in states for tensor in state.values()]
    pinned = [tensor for tensor in tensors if tensor.numel() == ELEMENTS and tensor.is_pinned()]
    assert pinned
    for tensor in pinned:
        on_device = torch.empty_like(tensor, device="cuda").copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(on_device.cpu(), tensor)
    if not isinstance(held, dict):
        held.step()


def exported(params: list[torch.nn.Parameter], grad: float = 1.0) -> dict:
    """In pinned tensors that share blocks."""
    for p in params:
        p.grad = torch.full_like(p, grad)
    optimizer = FusedAdam(params, lr=0.5, exp_avg_dtype="bf16", state_dict_cpu_offload=True)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("then", ["pinned", "exported"])
def test_an_export_is_dropped_while_it_is_uploaded(then):
    """In a stream of the program's own. Nobody may write to the memory before the copies are done."""
    state = exported([param() for _ in range(16)])["state"]
    tensors = [value for values in state.values() for value in values.values() if value.numel() == ELEMENTS]
    # Of a copy of the first, which begins where its block does, torch's allocator is told.
    tensors = [tensor for tensor in tensors[1:] if tensor.is_pinned()]
    assert len(tensors) > 20
    expected = [tensor.clone() for tensor in tensors]
    arrived = [torch.zeros(ELEMENTS, device="cuda") for _ in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # the copies come late
        for to, tensor in zip(arrived, tensors, strict=True):
            to.copy_(tensor, non_blocking=True)
    del state, tensors, tensor
    if then == "pinned":
        # Torch's allocator gives a block out again for a tensor of as many bytes, up to the next power of two.
        sizes = [1 << power for power in range(12, 24)] * 4
        others = [torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=True).fill_(255) for n in sizes]
    else:
        others = exported([param() for _ in range(16)], grad=7.0)
    torch.cuda.synchronize()
    assert all(torch.equal(to.cpu(), value) for to, value in zip(arrived, expected, strict=True))
    del others
