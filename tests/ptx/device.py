"""A device whose kernels are PTX run by the interpreter, behind the real statestream._cuda.

The module is the one that setup.py builds, launcher and argument checks included; only its CUDA runtime
is fake_cudart, so every parameter byte of a launch is what a GPU would get.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import numpy as np

from .build import Built, build
from .execute import launch
from .memory import Memory
from .parse import Kernel, parse

__all__ = ["Device", "Launch"]

_LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: int
    block: int
    params: bytes
    device: int = 0
    stream: int = 0


@dataclass
class Device:
    """One architecture's kernels. Memory is what was `add`ed to it and nothing else."""

    arch: int
    multiprocessors: int = 2
    blocks_each: int = 1
    order: Callable[[int], Iterable[int]] = range
    """From the number of blocks of a launch to those that run, in order."""
    memory: Memory = field(default_factory=Memory)
    launches: list[Launch] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    """Lanes that ran each opcode, over all launches."""
    interpret: bool = True
    """False: launches are noted and not run."""
    fails: bool = False
    """True: the runtime refuses every launch."""

    def add(self, array: np.ndarray, name: str, *, base: int | None = None, writable: bool = True) -> int:
        """Maps an array as the device's memory, at its own address unless another is given; the address."""
        return self.memory.add(array, name, base=base, writable=writable)

    @contextmanager
    def module(self):
        """statestream._cuda with its launches on this device; what a kernel does wrong is raised."""
        module, library = _load()
        kernels = self.kernels
        failures: list[BaseException] = []

        def on_launch(name: bytes, grid: int, block: int, parameters: int, device: int, stream: int | None) -> int:
            if self.fails:
                return _LAUNCH_FAILURE
            try:
                kernel = kernels[name.decode()]
                params = ctypes.string_at(parameters, kernel.param_bytes)
                self._launch(Launch(kernel, grid, block, params, device, stream or 0))
            except BaseException as error:  # C code below cannot carry it
                failures.append(error)
                return _LAUNCH_FAILURE
            return 0

        callback = _CALLBACK(on_launch)
        library.fake_cudart_use(callback, self.multiprocessors, self.blocks_each)
        try:
            yield module
        except RuntimeError:
            if failures:
                raise failures[0] from None
            raise
        finally:
            library.fake_cudart_use(_CALLBACK(), 1, 1)

    def _launch(self, what: Launch) -> None:
        self.launches.append(what)
        if self.interpret:
            self.counts += launch(
                what.kernel,
                grid=what.grid,
                block=what.block,
                params=what.params,
                memory=self.memory,
                order=self.order(what.grid),
            )

    @staticmethod
    def current() -> int:
        """The number of the device that the runtime has current."""
        return _load()[1].fake_cudart_device()

    @property
    def kernels(self) -> dict[str, Kernel]:
        """Every kernel of this architecture by its mangled name."""
        return _kernels(self.arch)


@cache
def _built() -> Built:
    return build()


@cache
def _load() -> tuple[ModuleType, ctypes.CDLL]:
    """The module under another name than the wheel's, which may be imported as well."""
    built = _built()
    loader = importlib.machinery.ExtensionFileLoader("statestream_on_ptx._cuda", str(built.module))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module, ctypes.CDLL(str(built.module))


@cache
def _kernels(arch: int) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    for path in _built().ptx[arch]:
        kernels |= parse(path.read_text())
    return kernels
