"""csrc's scalar functions of scaled formats and random bits, compiled by themselves: what kernels must agree with."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "scalar_formats.so"
        flags = [
            "-std=c++17",
            "-O2",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
        ]
        subprocess.run(
            [compiler, *flags, f"-I{CSRC}", str(HERE / "scalar_formats.cpp"), "-o", str(library)], check=True
        )
        return ctypes.CDLL(str(library))  # stays mapped when its file is gone


def _call(name: str, result: np.dtype, n: int, *arguments) -> np.ndarray:
    """A C function over arrays; the output array and the count come last."""
    out = np.empty(n, result)
    kept = [a if isinstance(a, int | float) else None if a is None else np.ascontiguousarray(a) for a in arguments]
    passed = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in kept]
    getattr(_library(), name)(*passed, out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(n))
    return out


def _each(x, n: int, dtype) -> np.ndarray:
    return np.broadcast_to(np.asarray(x, dtype), (n,))


def load(bits: int, payloads: np.ndarray, scale, *, root: bool) -> np.ndarray:
    """FP32 values of payloads (FP16 or FP8: `bits` 16 or 8), `scale` one or one each."""
    n = payloads.size
    return _call("scaled_load_all", np.float32, n, bits, int(root), payloads.astype(np.uint32), _each(scale, n, "f4"))


def store(bits: int, x: np.ndarray, scale, *, root: bool, random=None) -> np.ndarray:
    """Payloads of FP32 values; to nearest, or by `random` (16 bits, one or one each)."""
    n = x.size
    drawn = None if random is None else _each(random, n, np.uint32)
    return _call("scaled_store_all", np.uint32, n, bits, int(root), x.astype("f4"), _each(scale, n, "f4"), drawn)


def scale(bits: int, largest: np.ndarray, *, root: bool) -> np.ndarray:
    """Scales of blocks whose largest value is each of `largest`."""
    return _call("scale_all", np.float32, largest.size, bits, int(root), largest.astype("f4"))


def float16_store(x: np.ndarray) -> np.ndarray:
    return _call("float16_store_all", np.uint32, x.size, x.astype("f4"))


def bfloat16_stochastic(x: np.ndarray, random) -> np.ndarray:
    return _call("bfloat16_stochastic_all", np.uint32, x.size, x.astype("f4"), _each(random, x.size, np.uint32))


def philox(counter: list[int], key: list[int]) -> list[int]:
    out = np.empty(4, np.uint32)
    arrays = (np.array(counter, np.uint32), np.array(key, np.uint32), out)
    _library().philox(*(a.ctypes.data_as(ctypes.c_void_p) for a in arrays))
    return out.tolist()


def random_bits(seed: int, ordinal: int, tensor: int, step: int, global_indices: np.ndarray) -> np.ndarray:
    """16 bits for each global index."""
    out = np.empty(global_indices.size, np.uint32)
    indices = np.ascontiguousarray(global_indices, np.uint64)
    _library().random_all(
        ctypes.c_uint64(seed),
        ctypes.c_uint32(ordinal),
        tensor,
        ctypes.c_float(step),
        indices.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(out.size),
    )
    return out


def global_indices(words: list[int], n: int) -> np.ndarray:
    """Global indices of a row's first n elements, by the twelve words of its extras."""
    return _call("global_all", np.int64, n, np.array(words, np.int64))
