"""Host memory: exact blocks, pinned while the system allows it, freed with its tensors. And how state lies in it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.device import queues as device_module
from statestream.device.host_memory import HostMemory
from statestream.device.queues import CudaDevice, HostDevice, device_for
from statestream.offload.host import store as store_module
from statestream.offload.host.arena import Arena
from statestream.offload.host.store import Entry
from statestream.streaming.plan import GRAIN_ELEMENTS, Unit

from .conftest import Counting, Pinning, assert_same_training, make_params, set_grads, train

MiB = 1 << 20


def host_device_with(pinning: Pinning) -> HostDevice:
    device = HostDevice()
    device.memory = HostMemory(pinning.pin, pinning.unpin)
    return device


def test_blocks_are_exact_and_page_aligned():
    pinning = Pinning()
    memory = HostMemory(pinning.pin, pinning.unpin)
    for nbytes in (1, 4097, 3 * MiB + 256):
        block = memory.block(nbytes)
        assert block.numel() == nbytes and block.untyped_storage().nbytes() == nbytes
        assert block.data_ptr() % 4096 == 0 and not block.any()
        assert pinning.pinned == {block.data_ptr(): nbytes}
        del block
        gc.collect()
        assert not pinning.pinned
    assert memory.block(0).numel() == 0


def test_a_block_stays_pinned_as_long_as_any_view_of_it_lives():
    pinning = Pinning()
    block = HostMemory(pinning.pin, pinning.unpin).block(4096)
    view = block[256:512].view(torch.float32)
    del block
    gc.collect()
    assert len(pinning.pinned) == 1
    view.fill_(1.0)
    del view
    gc.collect()
    assert not pinning.pinned


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_a_forked_child_has_no_pinned_block():
    """A data loader forks: each child would get a copy of all pinned state, or the parent's pages would move while
    the GPU still writes to the old ones. What is not pinned is there, copied when written, as any memory."""
    pinning = Pinning()
    pinned, pageable = HostMemory(pinning.pin, pinning.unpin).block(1 << 16), HostMemory().block(1 << 16)

    def is_mapped(block):
        with open("/proc/self/maps") as file:
            ranges = [line.split()[0].split("-") for line in file]
        return any(int(begin, 16) <= block.data_ptr() < int(end, 16) for begin, end in ranges)

    child = os.fork()
    if not child:
        os._exit(is_mapped(pinned) + 2 * is_mapped(pageable))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert is_mapped(pinned) and is_mapped(pageable)


def test_pinned_bytes_are_those_of_living_blocks():
    pinning = Pinning(refuse_from=2)
    memory = HostMemory(pinning.pin, pinning.unpin)
    first, second = memory.block(4096), memory.block(8192)
    with pytest.warns(RuntimeWarning, match="4 bytes of host memory could not be pinned"):
        third = memory.block(4)
    assert memory.pinned_bytes == 4096 + 8192 == sum(pinning.pinned.values())
    del second, third
    gc.collect()
    assert memory.pinned_bytes == first.numel()


@pytest.mark.parametrize("above", [1, 1000])
@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_pinned_bytes_are_within_5_percent_of_the_states(name, above, on_device):
    """For sizes just above powers of two, where torch's own allocator takes twice the bytes."""
    params = make_params(shapes=[(MiB + above,), (2 * MiB + above,), (13,)])
    pinning = Pinning()
    on_device(host_device_with(pinning))
    inner = FusedAdam(params) if name == "fused_adam" else torch.optim.AdamW(params)
    optimizer = CPUOffloadOptimizer(inner, MiB if name == "fused_adam" else None)
    needed = sum(p.numel() for p in params) * 2 * 4
    assert needed <= sum(pinning.pinned.values()) <= 1.05 * needed
    assert optimizer.pinned_bytes == optimizer.host_state_bytes == sum(pinning.pinned.values())
    assert pinning.requests == 2, "one block a kind of state"
    train(optimizer, params, [0])
    assert pinning.requests == 2
    del optimizer, inner
    gc.collect()
    assert not pinning.pinned


@pytest.mark.parametrize("refuse_from", [0, 1, 2])
def test_pinning_refused_at_the_nth_request(refuse_from, on_device):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    pinning = Pinning(refuse_from)
    on_device(host_device_with(pinning))
    with pytest.warns(RuntimeWarning, match="could not be pinned") as caught:
        optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1, master_weights=True), 20_000)
    assert len(caught) == 1 and pinning.requests == refuse_from + 1
    assert len(pinning.pinned) == refuse_from
    plain = FusedAdam(reference, lr=0.1, master_weights=True)
    train(optimizer, params, range(3))
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": make_params(torch.bfloat16, seed=5)})


# ---- arenas of bounded size: each is pinned at once ----


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.booleans()), min_size=1, max_size=30))
def test_banks_are_as_long_as_their_largest_arena_allows(drawn):
    """Units that are joined stay together, and a unit that is larger than an arena has one to itself."""
    entries, most = [], store_module.ARENA_BYTES // 16
    for number, (a, b, joined) in enumerate(drawn):
        unit = Unit((a * most, b * most), joined=joined and number > 0)
        entries.append(Entry(torch.empty(0), unit, (0, 0)))
    runs = store_module._runs(("exp_avg", "exp_avg_sq"), entries)
    assert [entry for run in runs for entry in run] == entries

    def largest(run):
        return max(sum(entry.unit.sizes[kind] for entry in run) for kind in range(2))

    for run, following in zip(runs, [*runs[1:], None], strict=True):
        assert not run[0].unit.joined or run[0] is entries[0]
        single = len(run) == 1 or all(entry.unit.joined for entry in run[1:])
        assert largest(run) <= store_module.ARENA_BYTES or single or run[-1].unit.joined
        if following is not None:
            assert largest([*run, following[0]]) > store_module.ARENA_BYTES


@pytest.mark.parametrize("refuse_from", [0, 1, 4, None])
@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_a_refusal_costs_an_arena_and_those_after_it(name, refuse_from, on_device, monkeypatch):
    monkeypatch.setattr(store_module, "ARENA_BYTES", 16384)
    params, reference = make_params(), make_params()
    pinning = Pinning(refuse_from)
    on_device(host_device_with(pinning))
    make = {"fused_adam": FusedAdam, "adamw": torch.optim.AdamW}[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = CPUOffloadOptimizer(make(params, lr=0.1), 20_000)
    said = [warning for warning in caught if "could not be pinned" in str(warning.message)]
    assert len(said) == (refuse_from is not None)
    assert len(pinning.pinned) == (refuse_from if said else pinning.requests)
    assert pinning.requests > (4 if refuse_from is None else refuse_from)
    assert max(pinning.pinned.values(), default=0) <= 16384
    assert optimizer.pinned_bytes == sum(pinning.pinned.values())
    assert said or optimizer.pinned_bytes == optimizer.host_state_bytes
    train(optimizer, params, range(3))
    plain = make(reference, lr=0.1)
    train(plain, reference, range(3))
    assert_same_training(params, optimizer, reference, plain)
    del optimizer, plain
    gc.collect()
    assert not pinning.pinned


def test_no_copy_and_no_state_is_in_two_blocks(on_device, monkeypatch):
    """CUDA refuses to copy what lies in two that are pinned: ours, and a program's copies of state that it is given."""
    monkeypatch.setattr(store_module, "ARENA_BYTES", 16384)
    pinning = Pinning()
    device = Counting()
    device.memory, copy, copies = HostMemory(pinning.pin, pinning.unpin), device.copy, []

    def noted(queue, to, to_offset, source, offset, nbytes):
        copies.append((to.data_ptr() + to_offset, nbytes))
        copies.append((source.data_ptr() + offset, nbytes))
        copy(queue, to, to_offset, source, offset, nbytes)

    device.copy = noted
    on_device(device)
    params = make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 60_000, cpu_fraction=0.5)
    train(optimizer, params, range(2))
    spans = [(address, address + nbytes) for address, nbytes in pinning.pinned.items()]
    views = [(t.data_ptr(), t.nbytes) for p in params for t in optimizer.state[p].values() if t.numel() > 1]
    seen = 0
    for address, nbytes in copies + views:
        inside = [span for span in spans if span[0] < address + nbytes and address < span[1]]
        seen += bool(inside)
        assert len(inside) < 2 and all(begin <= address and address + nbytes <= end for begin, end in inside)
    assert seen > len(views) > 8


def test_memory_refused_for_a_second_bank_leaves_no_first_one(on_device, monkeypatch):
    monkeypatch.setattr(store_module, "ARENA_BYTES", 16384)
    block, asked = HostMemory.block, []

    def refused(memory, nbytes):
        asked.append(nbytes)
        if len(asked) > 3:
            raise OSError(12, "Cannot allocate memory")
        return block(memory, nbytes)

    pinning = Pinning()
    device = on_device(host_device_with(pinning))
    monkeypatch.setattr(HostMemory, "block", refused)
    with pytest.raises(OSError, match="Cannot allocate"):
        CPUOffloadOptimizer(FusedAdam(make_params()), 20_000)
    gc.collect()
    assert len(asked) == 4 and not pinning.pinned and device.memory.pinned_bytes == 0


def test_each_parameter_begins_on_a_boundary_of_256_elements():
    """After a bias of 13 elements the next matrix still takes the vector path: 128-bit accesses."""
    params = make_params(torch.bfloat16, shapes=[(13,), (64, 64), (7,), (300,)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params, master_weights=True, exp_avg_dtype="bf16"), 5_000)
    for bank in optimizer.strategy.store.banks:
        for arena in bank.arenas:
            base = arena.block.data_ptr()
            for index in range(len(params)):
                itemsize = arena.grains[index] // GRAIN_ELEMENTS
                assert arena.offsets[index] % (GRAIN_ELEMENTS * itemsize) == 0
                assert (base + arena.offsets[index]) % 256 == 0
    rows = []
    device = optimizer.strategy.device
    launch = device.launch

    def launch_and_note(function, call, *rest):
        rows.extend(call.rows[i : i + 8] for i in range(0, len(call.rows), 8))
        launch(function, call, *rest)

    device.launch = launch_and_note
    train(optimizer, params, [0])
    assert len(rows) > len(params)
    for row in rows:
        for address in row[3:6]:  # exp_avg, exp_avg_sq, master_param
            assert address % 16 == 0
        if row[0] == 13:
            continue
        assert row[1] % 16 == params[1].data_ptr() % 16 == 0


def test_a_view_has_the_shape_and_strides_of_its_parameter():
    memory = HostMemory()
    arena = Arena("exp_avg", [1024, 0, 2048], [1024, 0, 1024], memory)
    like = torch.empty(8, 4, 3, 2).to(memory_format=torch.channels_last)
    view = arena.view(0, torch.float32, like)
    assert view.shape == like.shape and view.stride() == like.stride()
    view.fill_(1.0)
    assert int((arena.block.view(torch.float32) == 1).sum()) == like.numel()
    assert [arena.start(2, g) for g in range(4)] == [1024, 2048, 3072, 3072]


# ---- what it costs, by formula ----


@pytest.fixture(scope="module")
def lives():
    worker = Path(__file__).with_name("memory_worker.py")
    path = os.pathsep.join(filter(None, [str(worker.parents[1]), os.environ.get("PYTHONPATH")]))
    # What is freed goes back to the system at once: by itself the C library may keep blocks of up to 32 MiB.
    environment = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=280, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("name", "stored", "exported", "converted"),
    [("fused_adam_bf16", 4, 8, 8), ("fused_adam", 8, 8, 0), ("adamw", 8, 8, 0)],
)
def test_host_memory_follows_the_formula(name, stored, exported, converted, lives):
    """S; S + E while a snapshot is held; a load adds nothing; S + 2E while an async save is written; with live views S
    and what is not stored as it is exported; and all of it goes with the optimizer. Bytes an element are given."""
    n = lives["elements"]
    s, e, c = stored * n, exported * n, converted * n

    def near(expected):
        return pytest.approx(expected, abs=0.05 * s)

    for way, held in (("snapshot", e), ("live", c)):
        found = lives[name][way]
        assert found["host_state_bytes"] == pytest.approx(s, rel=0.01)
        assert found["steady"] == near(s), way
        assert found["saving"] == near(s + held), way
        assert found["loading"] == near(s + held), way
        assert found["after"] == near(s), way
        assert found["gone"] == near(0), way
    assert lives[name]["snapshot"]["async_saving"] == near(s + 2 * e)
    assert lives[name]["snapshot"]["async_saved"] == near(s + e)


@pytest.mark.parametrize(("name", "stored"), [("shared_bf16", 8), ("shared_fp32", 4)])
def test_host_memory_of_a_step_on_the_host_follows_the_formula(name, stored, lives):
    """The state as it is stored (BF16 moments 4 bytes an element, a BF16 weight's FP32 master 4), and three slots."""
    found = lives[name]
    assert found["staging"] == found["slots"] == 48 * MiB
    expected = stored * lives["stepped_elements"] + found["staging"]
    assert found["steady"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("name", "stored"), [("offloaded_bf16", 8), ("offloaded_fp32", 4)])
def test_host_memory_of_offloaded_gradients_follows_the_formula(name, stored, lives):
    """S, four bytes an element for FP32 sums, three slots for gradients and three for weights; in backward, where
    micro-batches are added up, and after the step."""
    found = lives[name]
    assert found["staging"] == 96 * MiB
    expected = (stored + 4) * lives["stepped_elements"] + found["staging"]
    for when in ("after_backward", "after_step"):
        assert found[when] == pytest.approx(expected, rel=0.05), when


# ---- the seam ----


def test_a_device_without_a_seam_is_refused():
    assert isinstance(device_for(torch.device("cpu")), HostDevice)
    with pytest.raises(ValueError, match="xpu"):
        device_for(torch.device("xpu"))


class FakeCudart:
    def __init__(self, code=0):
        self.code, self.registered = code, {}

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 0
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.registered[address]


class NoContext:
    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class FakeStream(NoContext):
    """`busy`: copies that are on their way."""

    def __init__(self, *_):
        self.busy = False

    def query(self) -> bool:
        return not self.busy

    def synchronize(self) -> None:
        self.busy = False


@pytest.fixture
def cudart(monkeypatch):
    """A stand-in for the CUDA runtime; the real one runs in tests/cuda. What waits for the whole device is an error."""
    cudart = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "device", NoContext)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    return cudart


def test_cuda_pins_by_registering_exact_ranges(cudart):
    device = CudaDevice(torch.device("cuda", 3))
    block = device.memory.block(5000)
    assert cudart.registered == {block.data_ptr(): 5000} and device.memory.pinned_bytes == 5000
    del block
    assert not cudart.registered


def test_an_error_of_pinning_is_not_left_for_the_next_kernel_launch(cudart, monkeypatch):
    cudart.code, cleared, real_empty = 2, [], torch.empty

    def empty(*shape, **where):
        cleared.extend(where.values())
        return real_empty(*shape)

    device = CudaDevice(torch.device("cuda", 3))
    monkeypatch.setattr(device_module.torch, "empty", empty)
    with pytest.warns(RuntimeWarning, match="error 2"):
        block = device.memory.block(5000)
    assert cleared
    assert block.numel() == 5000 and device.memory.pinned_bytes == 0


@pytest.mark.parametrize("queue", ["load", "store", "down", "up"])
def test_memory_is_unpinned_once_its_own_copies_are_done(cudart, queue, monkeypatch):
    """Those of every device that it was used for: a model may have moved from one GPU to another. No other stream is
    waited for, nor the device: that would break a capture that is going on."""
    first, second = (CudaDevice(torch.device("cuda", index)) for index in range(2))
    block = first.memory.block(5000)
    second.memory.take_over(first.memory)
    streams = [getattr(device, queue) for device in (first, second)]
    busy_at_the_end = []

    def unregister(address):
        busy_at_the_end.extend(stream.busy for stream in streams)
        del cudart.registered[address]

    monkeypatch.setattr(cudart, "cudaHostUnregister", unregister)
    for stream in streams:
        stream.busy = True
    del block
    assert not cudart.registered and busy_at_the_end == [False, False]


def test_freed_memory_of_a_gpu_is_gone_whoever_holds_the_tensor():
    block = torch.empty(1000, dtype=torch.uint8)
    view = block[100:200]
    CudaDevice.free(None, block)
    assert view.untyped_storage().nbytes() == 0


def test_gradients_may_be_dropped_right_after_the_step():
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 5_000), FusedAdam(reference, lr=0.1)
    for o, ps in ((optimizer, params), (plain, reference)):
        for step in range(2):
            set_grads(ps, step)
            o.step()
            o.zero_grad()
    assert_same_training(params, optimizer, reference, plain)
