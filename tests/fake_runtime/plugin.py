"""pytest on the fake runtime: every test has its own seed and schedule, and ends with nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Generator
from zlib import crc32

import pytest

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    seed, style = schedule_of(item.nodeid)
    lib.seed(seed, STYLES.index(style))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        seed, style = schedule_of(item.nodeid)
        report.sections.append(("fake runtime", f"again with {SEED}={seed} {STYLE}={style}"))
    return report
