"""pytest on the fake runtime: every test has its own seed and schedule, and ends with nothing left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any
from zlib import crc32

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam

from tests.fake_runtime.runtime import STYLES, lib

SEED, STYLE = "STATESTREAM_FAKE_CUDA_SEED", "STATESTREAM_FAKE_CUDA_STYLE"

ONE_IN = {
    "test_step_has_the_cpus_bits": 24,
    "test_generic_step_has_the_cpus_bits": 48,
    "test_capturable_step_has_the_cpus_bits": 6,
    "test_bits_are_those_of_the_resident_optimizer": 2,
    "test_bits_of_a_step_that_the_host_shares": 2,
}
"""Of the cases of these, which all run on a GPU, one in so many runs here by default: kernels take a thousand times as
long. Their bits are tests/emulation's matter, and tests/ptx's."""


def schedule_of(name: str) -> tuple[int, str]:
    """A test's seed and style: those of the environment, or else of its name, which no other test moves."""
    seed = int(os.environ.get(SEED, crc32(name.encode())))
    return seed, os.environ.get(STYLE) or STYLES[seed % len(STYLES)]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_gpu_speed.py":
            item.add_marker(pytest.mark.skip(reason="the runtime has no speed"))
        elif crc32(item.name.encode()) % ONE_IN.get(getattr(item, "originalname", item.name), 1):
            item.add_marker(pytest.mark.long)


def pytest_configure() -> None:
    CPUOffloadOptimizer.step = _watched_step(CPUOffloadOptimizer.step)
    torch.cuda.CUDAGraph.capture_begin = _noting_pools(torch.cuda.CUDAGraph.capture_begin)
    torch.cuda.CUDAGraph.capture_end = _comparing_pools(torch.cuda.CUDAGraph.capture_end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    seed, style = schedule_of(item.nodeid)
    lib.seed(seed, STYLES.index(style))
    lib.forget_contexts()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    item.funcargs.clear()  # what the test had is held here until pytest goes on
    if left := left_behind():
        raise AssertionError("\n".join(left))
    return result


def left_behind() -> list[str]:
    """What a program should not have left in the runtime, or done on the way; from here on it is forgotten."""
    if lib.lines("registered"):
        gc.collect()
    lib.settle()
    error = lib.cudaGetLastError()
    left = [f"memory that is still registered: {line}" for line in lib.lines("registered")]
    left += [f"a context on a device that had no work: {line}" for line in lib.lines("unused_contexts")]
    lib.forget_contexts()
    return left + lib.lines("hazards") + ([f"error {error} is left in the runtime"] if error else [])


def _watched_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step waits for no device, but for its own share on the host and to read what is set on the device."""

    @wraps(step)
    def watched(self: CPUOffloadOptimizer, *args: Any, **kwargs: Any) -> Any:
        before = lib.host_waits()
        result = step(self, *args, **kwargs)
        free = self.cpu_fraction == 0 and isinstance(self.inner, FusedAdam) and not _set_on_a_device(self.inner)
        if free and lib.host_waits() != before:
            lib.report(b"an offloaded step waited: " + lib.last_host_wait())
        return result

    return watched


def _set_on_a_device(optimizer: FusedAdam) -> bool:
    settings = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    settings += [getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)]
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in settings)


# What a capture allocates is in the graph's own pool: memory of the common one is given to others before a replay.


def _bytes_of_the_common_pool() -> int:
    segments = torch.cuda.memory_snapshot()
    return sum(s["active_size"] for s in segments if tuple(s["segment_pool_id"]) == (0, 0))


def _noting_pools(begin: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        self.common_bytes = _bytes_of_the_common_pool()
        return result

    return noting


def _comparing_pools(end: Callable[..., Any]) -> Callable[..., Any]:
    def comparing(self: torch.cuda.CUDAGraph) -> Any:
        more = _bytes_of_the_common_pool() - self.common_bytes
        if more > 0:
            lib.report(f"a capture took {more} bytes that are not of its pool".encode())
        return end(self)

    return comparing


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        seed, style = schedule_of(item.nodeid)
        report.sections.append(("fake runtime", f"again with {SEED}={seed} {STYLE}={style}"))
    return report
