"""The threads of the CPU module, compiled by themselves, do each task once and race with no caller."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.faults.judge import ROOT
from tests.faults.source import Edit

from .runner import SANITIZERS, missing

HERE = Path(__file__).parent
POOL = "csrc/cpu/threads.cpp"
TAKEN = "take_tasks(work, tasks);\n      lock.lock();"
# A worker that looks for its work at each task, which the caller closes when the last is taken.
FORGETFUL = Edit(
    POOL,
    TAKEN,
    "for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) (*work_)(i);\n      lock.lock();",
)


def pool_run(
    folder: Path, flags: tuple[str, ...], rounds: int, pool: Path = ROOT / POOL
) -> subprocess.CompletedProcess:
    """What the compiled callers said after so many rounds each."""
    program = folder / "pool"
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", *flags, "-pthread", f"-I{ROOT / 'csrc'}"]
    sources = [str(HERE / "thread_pool.cpp"), str(pool), f"-I{ROOT / 'csrc' / 'cpu'}"]
    subprocess.run([*compiler, *sources, "-o", str(program)], check=True)
    options = {SANITIZERS["thread"].variable: "halt_on_error=1"}
    return subprocess.run(
        [str(program), str(rounds)], env={**os.environ, **options}, capture_output=True, text=True, timeout=600
    )


def race_flags() -> tuple[str, ...]:
    if lacks := missing("thread"):
        pytest.skip(lacks)
    return ("-O1", *SANITIZERS["thread"].flags, "-fPIE")


def test_every_task_is_done_once_and_nothing_races(tmp_path):
    done = pool_run(tmp_path, race_flags(), 10_000)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_control_a_worker_that_reads_what_its_caller_closes_is_reported(tmp_path):
    pool = tmp_path / "threads.cpp"
    pool.write_text(FORGETFUL.applied((ROOT / POOL).read_text()))
    # On a busy machine a worker may come late to every task.
    assert any("data race" in pool_run(tmp_path, race_flags(), 10_000, pool).stderr for _ in range(5))


@pytest.mark.long  # half a minute
def test_every_task_is_done_once_at_full_speed(tmp_path):
    done = pool_run(tmp_path, ("-O2",), 200_000)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
