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
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload import device as device_module
from statestream.offload.arena import Arena
from statestream.offload.device import CudaDevice, HostDevice, device_for
from statestream.offload.host_memory import HostMemory
from statestream.offload.plan import GRAIN_ELEMENTS

from .conftest import Pinning, assert_same_training, make_params, set_grads, train

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


def test_each_parameter_begins_on_a_boundary_of_256_elements():
    """After a bias of 13 elements the next matrix still takes the vector path: 128-bit accesses."""
    params = make_params(torch.bfloat16, shapes=[(13,), (64, 64), (7,), (300,)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params, master_weights=True, exp_avg_dtype="bf16"), 5_000)
    for bank in optimizer.units.store.banks:
        for arena in bank.arenas:
            base = arena.block.data_ptr()
            for index in range(len(params)):
                itemsize = arena.grains[index] // GRAIN_ELEMENTS
                assert arena.offsets[index] % (GRAIN_ELEMENTS * itemsize) == 0
                assert (base + arena.offsets[index]) % 256 == 0
    rows = []
    device = optimizer.units.device
    launch = device.launch

    def launch_and_note(function, torch_device, table, *rest):
        rows.extend(table.rows[i : i + 8] for i in range(0, len(table.rows), 8))
        launch(function, torch_device, table, *rest)

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


@pytest.mark.parametrize("code", [0, 2])
def test_cuda_pins_by_registering_exact_ranges(code, monkeypatch):
    """Against a stand-in for the CUDA runtime; the real one runs in tests/cuda."""
    cudart, cleared, synchronized = FakeCudart(code), [], []
    monkeypatch.setattr(torch.cuda, "Stream", NoContext)
    monkeypatch.setattr(torch.cuda, "device", NoContext)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: synchronized.append(device))
    device = CudaDevice(torch.device("cuda", 3))
    if code:
        real_empty = torch.empty

        def empty(*shape, **where):
            cleared.extend(where.values())
            return real_empty(*shape)

        monkeypatch.setattr(device_module.torch, "empty", empty)
        with pytest.warns(RuntimeWarning, match="error 2"):
            block = device.memory.block(5000)
        assert cleared, "CUDA's error was left for the next kernel launch"
        assert block.numel() == 5000 and device.memory.pinned_bytes == 0
        return
    block = device.memory.block(5000)
    assert cudart.registered == {block.data_ptr(): 5000} and device.memory.pinned_bytes == 5000
    del block
    gc.collect()
    assert not cudart.registered
    assert synchronized == [torch.device("cuda", 3)], "unpinned while copies may be on their way"


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
