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
# A worker that looks for its work again after the caller has closed it.
FORGETFUL = Edit(POOL, "take_tasks(work, tasks);\n      lock.lock();", "take_tasks(*work_, tasks);\n      lock.lock();")


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
    done = pool_run(tmp_path, race_flags(), 20_000)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_control_a_worker_that_reads_what_its_caller_closes_is_reported(tmp_path):
    pool = tmp_path / "threads.cpp"
    pool.write_text(FORGETFUL.applied((ROOT / POOL).read_text()))
    done = pool_run(tmp_path, race_flags(), 20_000, pool)
    assert done.returncode != 0 and "data race" in done.stderr


@pytest.mark.long  # ten seconds
def test_every_task_is_done_once_at_full_speed(tmp_path):
    done = pool_run(tmp_path, ("-O2",), 1_000_000)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
