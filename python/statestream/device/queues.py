"""The few device calls that the offload engine needs: CUDA, and plain host.

The seam: queues (`compute`, `load` and `store` of state, `down` of gradients and `up` of weights), each in order by
itself; `record` and `wait` join them; `copy` and `launch` queue work and return at once; `allocate` and `free` take
their place in the order of the compute queue, as torch's allocator does. `start` drives a flow of the host's beside all
that (streaming/host_pipeline.py). `synchronize`, `drain` and a started flow's `result` alone make the host wait.
Memory, host and device, is a flat uint8 tensor. tests/simulated_device holds a hostile third implementation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from statestream.device.clocks import CudaClock, WallClock
from statestream.device.guards import beside_captures, on_device, on_stream, wait_for
from statestream.device.host_memory import HostMemory
from statestream.device.worker import Worker

__all__ = ["CudaDevice", "HostDevice", "device_for"]


def device_for(device: torch.device) -> HostDevice | CudaDevice:
    """The seam for parameters on `device`. ValueError for a kind of device that has none."""
    if device.type in ("cpu", "meta"):
        return HostDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ValueError(f"state cannot be streamed to parameters on {device}; they must be on a CUDA device or the CPU")


class HostDevice:
    """Everything on the host, at once. For parameters on the CPU; there is nothing to overlap."""

    compute = load = store = down = up = None
    host_reaches_parameters = True
    """Whether the host's share needs no copies."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.memory = HostMemory()
        self.clock = WallClock()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def free(self, block: Tensor) -> None:
        """Nothing at once: a traceback's frames may hold the block, and who prints them would read freed memory."""

    def record(self, queue: Any) -> None:
        pass

    def wait(self, queue: Any, event: Any) -> None:
        pass

    def copy(self, queue: Any, to: Tensor, to_offset: int, source: Tensor, offset: int, nbytes: int) -> None:
        to[to_offset : to_offset + nbytes].copy_(source[offset : offset + nbytes])

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self, flow: Generator[Any, None, None]) -> Worker:
        return Worker(flow, self.synchronize)

    def synchronize(self, event: Any) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaDevice:
    """CUDA: the caller's current stream computes, streams of its own copy, each kind of copy in one."""

    host_reaches_parameters = False

    def __init__(self, device: torch.device):
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self.clock = CudaClock()
        self.load = torch.cuda.Stream(self.torch_device)
        self.store = torch.cuda.Stream(self.torch_device)
        self.down = torch.cuda.Stream(self.torch_device)
        self.up = torch.cuda.Stream(self.torch_device)
        here, queues = self.torch_device, (self.load, self.store, self.down, self.up)
        # Not by this object: its memory would keep it, and be kept by it.
        self.memory = HostMemory(partial(_pin, here), partial(_unpin, here), partial(_finish, queues))

    @property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory of the compute stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self, block: Tensor) -> None:
        """Returns the memory to the compute stream, which has been made to wait for every other stream that
        used it. At once, whoever still holds the tensor: the traceback of an error would."""
        block.untyped_storage().resize_(0)

    def record(self, queue: torch.cuda.Stream) -> torch.cuda.Event:
        # Whoever waits for it sleeps: spinning would take a core from the host's share.
        return queue.record_event(torch.cuda.Event(blocking=True))

    def wait(self, queue: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        queue.wait_event(event)

    def copy(
        self, queue: torch.cuda.Stream, to: Tensor, to_offset: int, source: Tensor, offset: int, nbytes: int
    ) -> None:
        with on_stream(queue):
            to[to_offset : to_offset + nbytes].copy_(source[offset : offset + nbytes], non_blocking=True)

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Calls a function that launches kernels on the current stream."""
        function(*args, **kwargs)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Around torch operations that belong to the compute queue. Optimizers of torch ask the current device for its
        stream, which opens a context there."""
        return on_device(self.torch_device)

    def start(self, flow: Generator[Any, None, None]) -> Worker:
        return Worker(flow, self.synchronize)

    def synchronize(self, event: torch.cuda.Event) -> None:
        wait_for(event)

    def drain(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def _pin(device: torch.device, address: int, nbytes: int) -> None:
    # Registering is per context: it must be this device's, not whatever is current.
    with on_device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        # CUDA remembers the error and would report it at the next kernel launch, whosever that is.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, dtype=torch.uint8, device=device).fill_(0)
        raise RuntimeError(f"cudaHostRegister failed with error {code}")


# Finalisers call these two: at any moment, on any thread, while a graph is captured. They wait for the device's own
# copies and for nothing else: to wait for the device would break a capture, and hold the program up for work that has
# nothing to do with the memory.


def _finish(queues: Sequence[torch.cuda.Stream]) -> None:
    with _in_a_finaliser():
        for queue in queues:
            if not queue.query():
                queue.synchronize()


def _unpin(device: torch.device, address: int) -> None:
    with _in_a_finaliser(), on_device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def _in_a_finaliser() -> Iterator[None]:
    # Where the interpreter or the driver is going away, the registration goes with it.
    with contextlib.suppress(AttributeError, RuntimeError, TypeError), beside_captures():
        yield
