"""A forked child, as data loaders are: it drops what it inherited, and frees no pinned memory, which is not its own.

The driver's part is played by stand-ins, the forks are real.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.checkpoint.pinned import host_tensors
from statestream.device.host_memory import HostMemory
from statestream.device.queues import HostDevice

from .conftest import Pinning, make_params, train

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps memory at given addresses")

PAGE = 4096
PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, MAP_FIXED_NOREPLACE = 3, 0x22, 0x100000


def child_says(run: Callable[[], bool]) -> bool:
    """What `run` returns in a forked child. AssertionError where the child dies of it."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # not pytest's traceback of a crash that is looked for
        code = 2
        try:
            code = int(not run())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), f"the child ended with {status}"
    return status == 0


class InTheHole:
    """Memory that a child maps where a pinned block is for its parent. FileExistsError where something is there."""

    def __init__(self, address: int, nbytes: int):
        self.nbytes = -(-nbytes // PAGE) * PAGE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        flags = MAP_PRIVATE_ANONYMOUS | MAP_FIXED_NOREPLACE
        self.address = libc.mmap(address, self.nbytes, PROT_READ_WRITE, flags, -1, 0)
        if self.address != address:
            raise FileExistsError(ctypes.get_errno(), "the address is taken")
        ctypes.memset(address, 7, self.nbytes)

    def is_there(self) -> bool:
        """Reads all of it; where it was unmapped that ends the process."""
        return ctypes.string_at(self.address, self.nbytes) == b"\7" * self.nbytes


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


class OfTheParent(Pinning):
    """Calls of the driver in a child are errors."""

    def __init__(self):
        super().__init__()
        self.parent = os.getpid()

    def unpin(self, address: int) -> None:
        if os.getpid() != self.parent:
            os._exit(3)
        super().unpin(address)


def a_block(memory):
    return [memory.block(1 << 16)]


def a_view(memory):
    return [memory.block(1 << 16)[256:512].view(torch.float32)]


def a_cycle(memory):
    """Collected by the garbage collector alone: as an earlier run's optimizer may be, in any call of the child."""
    cycle = [memory.block(1 << 16)]
    cycle.append(cycle)
    return [cycle]


def an_optimizer(memory):
    device = HostDevice()
    device.memory = memory
    with pytest.MonkeyPatch.context() as patch:
        for module in ("optimizer", "strategy"):
            patch.setattr(f"statestream.offload.{module}.device_for", lambda _: device)
        params = make_params(torch.bfloat16)
        optimizer = CPUOffloadOptimizer(FusedAdam(params, master_weights=True), 20_000)
    train(optimizer, params, [0])
    return [optimizer]


OWNERS = (a_block, a_view, a_cycle, an_optimizer)


@pytest.mark.parametrize("generations", [1, 2], ids=["child", "grandchild"])
@pytest.mark.parametrize("own", OWNERS)
def test_a_child_that_drops_a_pinned_block_keeps_what_it_has_mapped_there_since(own, generations):
    pinning = OfTheParent()
    owner = own(HostMemory(pinning.pin, pinning.unpin))
    blocks = dict(pinning.pinned)
    assert blocks

    def drop() -> bool:
        holes = [InTheHole(address, nbytes) for address, nbytes in blocks.items()]
        owner.clear()
        gc.collect()
        return all(hole.is_there() for hole in holes)

    assert child_says(drop if generations == 1 else lambda: child_says(drop))
    assert pinning.pinned == blocks, "nothing was unpinned for the parent"
    owner.clear()
    gc.collect()
    assert not pinning.pinned
    assert not any(is_mapped(address) for address in blocks), "the parent frees as ever"


def test_a_child_frees_what_was_not_pinned_and_what_is_its_own():
    """Such memory is the child's own copy. Were it kept, each data loader would grow."""
    pinning = Pinning()
    inherited = [HostMemory().block(1 << 22)]

    def drop() -> bool:
        own = [HostMemory(pinning.pin, pinning.unpin).block(1 << 22)]
        addresses = [blocks[0].data_ptr() for blocks in (inherited, own)]
        inherited.clear()
        own.clear()
        return not any(map(is_mapped, addresses)) and not pinning.pinned

    assert child_says(drop)


def test_a_child_gives_no_block_of_an_export_back():
    """torch's allocator would call CUDA in the child: for each stream that a copy of the block was on, an event."""
    freed: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8)
        weakref.finalize(block.untyped_storage(), freed.append, nbytes)
        return block

    tensors = host_tensors([torch.empty(1024)] * 4, [torch.float32] * 4, allocate)

    def drop() -> bool:
        tensors.clear()
        host_tensors([], [])
        return not freed

    assert child_says(drop)
    tensors.clear()
    gc.collect()
    assert child_says(drop), "what rested in the parent"
    host_tensors([], [])
    assert freed
