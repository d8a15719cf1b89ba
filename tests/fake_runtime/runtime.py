"""The runtime that this process was started on: what it is asked to do, and what it has seen."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

__all__ = ["STYLES", "environment", "install", "is_here", "lib"]

STYLES = ("eager", "late", "random", "bursts")
"""How work is picked: all that may run, at once; nothing before it must; some, now and then; many at a time."""

_MODULE = "STATESTREAM_FAKE_CUDA"


def environment(runtime: Path, module: Path) -> dict[str, str]:
    """For a process that is to run on it."""
    return {**os.environ, "LD_PRELOAD": str(runtime), _MODULE: str(module)}


def is_here() -> bool:
    return _MODULE in os.environ


def install() -> None:
    """Before statestream is used: its CUDA module, and stand-ins for torch's kernels."""
    spec = importlib.util.spec_from_file_location(
        "statestream._cuda", loader=importlib.machinery.ExtensionFileLoader("statestream._cuda", os.environ[_MODULE])
    )
    import torch  # noqa: F401  the module's calls of CUDA are found where torch's are

    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["statestream._cuda"] = module

    from tests.fake_runtime import torch_kernels

    torch_kernels.install()


class _Library:
    """The functions of the runtime that are no call of CUDA, by their C names."""

    _TEXT = ("fake_hazards", "fake_unused_contexts", "fake_registered", "fake_last_host_wait")

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in self._TEXT:
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.fake_host_waits.restype = ctypes.c_uint64
        self._library.fake_seed.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self._library.fake_launch_python.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64]
        self._library.fake_poison.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._library.fake_synchronize.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def __getattr__(self, name: str):
        return getattr(self._library, f"fake_{name}" if not name.startswith("cuda") else name)

    def lines(self, name: str) -> list[str]:
        """What one of the functions that give text says."""
        return getattr(self, name)().decode().splitlines()


lib = _Library() if is_here() else None
