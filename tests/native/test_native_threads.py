"""Native code beside Python's threads, other threads of its own, torch's threads, and fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from helpers.gil import ticks_in_calls
from statestream import kernels

from native.kernel_runner import (
    ALL_BF16,
    ALL_F32,
    CHUNK,
    State,
    assert_same_bits,
    difference,
    random_values,
    update,
    updated,
)


def long_call(threads: int, seconds: float = 0.4) -> list[State]:
    """Rows of one tensor, over and over, that keep a call busy for about this long."""
    state = State.of(random_values(8 * CHUNK, seed=1), ALL_F32)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        update([state] * 4, ALL_F32, threads=threads)
        times.append(time.perf_counter() - began)
    return [state] * round(4 * seconds / min(times))


def on_a_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("threads", [1, 2])
def test_other_python_threads_run_during_a_call(threads):
    state = State.of(random_values(8 * CHUNK, seed=1), ALL_F32)
    with ticks_in_calls("adam") as counts:
        while not any(counts) and len(counts) < 1000:
            update([state] * 4, ALL_F32, threads=threads)
    assert any(counts)


@pytest.mark.parametrize("threads", [1, 3])
def test_two_threads_calling_at_once_each_get_their_own_bits(threads):
    cases = [
        (dtypes, State.of(random_values(3 * CHUNK + 5, seed=seed), dtypes))
        for seed, dtypes in enumerate([ALL_F32, ALL_BF16, ALL_F32, ALL_BF16])
    ]
    expected = []
    for dtypes, before in cases:
        alone = before.clone()
        for _ in range(10):
            update(alone, dtypes)
        expected.append(alone)
    together = [before.clone() for _, before in cases]
    start = threading.Barrier(len(cases))

    def work(state, dtypes):
        start.wait()
        for _ in range(10):
            update(state, dtypes, threads=threads)

    workers = [on_a_thread(work, s, dtypes) for s, (dtypes, _) in zip(together, cases, strict=True)]
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    for state, want in zip(together, expected, strict=True):
        assert_same_bits(state, want)


def true_in_a_child(check: Callable[[], bool]) -> bool:
    """Forks; whether the child found `check` true, and in half a minute."""
    child = os.fork()
    if child == 0:
        right = False
        try:
            right = check()
        finally:
            os._exit(0 if right else 1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def forks(test):
    """The interpreter warns of any fork of a process with threads; that these work is the claim."""
    quiet = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    return quiet(pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")(test))


@forks
def test_a_forked_child_can_step_and_so_can_its_parent_afterwards():
    before = State.of(random_values(3 * CHUNK, seed=2), ALL_F32)
    want = updated(before, ALL_F32, threads=3)
    for _ in range(3):
        assert true_in_a_child(lambda: difference(updated(before, ALL_F32, threads=3), want) is None)
        assert_same_bits(updated(before, ALL_F32, threads=3), want)


@forks
def test_a_child_forked_during_another_threads_call_can_step():
    before = State.of(random_values(3 * CHUNK, seed=3), ALL_F32)
    want = updated(before, ALL_F32)
    caller = on_a_thread(lambda rows: update(rows, ALL_F32, threads=2), long_call(2, seconds=1.0))
    time.sleep(0.1)
    assert caller.is_alive(), "the call ended before the fork"
    assert true_in_a_child(lambda: difference(updated(before, ALL_F32, threads=3), want) is None)
    caller.join(timeout=60)
    assert not caller.is_alive()


@forks
def test_threads_born_while_denormals_are_flushed_keep_them(monkeypatch):
    """A child's threads are its own, and a thread is born with its maker's floating-point environment."""
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", "3")
    values = random_values(16 * CHUNK, seed=5)
    values.grad.mul_(1e-20)
    values.exp_avg_sq.mul_(1e-35)
    before = State.of(values, ALL_F32)
    want = updated(before, ALL_F32)

    def all_bits_right() -> bool:
        if not torch.set_flush_denormal(True):
            return True
        kernels.encode(values.weight, torch.empty_like(values.weight, dtype=torch.bfloat16))
        return all(difference(updated(before, ALL_F32, threads=3), want) is None for _ in range(5))

    assert true_in_a_child(all_bits_right)


COUNT_THREADS = """
import os
import psutil, torch
from array import array
from statestream import kernels
tensors = [torch.zeros(10 * 65536) for _ in range(4)]
step = torch.zeros(())
rows = array("q", kernels.row(*tensors, None, step))
formats = kernels.Formats(1, 1, 1, 1, 0)
options = kernels.AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.0, True, True, False)
calls = [(4, "", 1), (1, "", 3), (1, "", None), (1, "5", None), (8, "2", None), (7, "", None)]
for torch_threads, environment, asked in calls:
    torch.set_num_threads(torch_threads)
    os.environ["STATESTREAM_NUM_THREADS"] = environment
    before = psutil.Process().num_threads()
    kernels.adam(torch.device("cpu"), rows, formats, options, threads=asked)
    print(psutil.Process().num_threads() - before)
"""


def test_the_threads_are_its_own_and_as_many_as_asked():
    """What each of a fresh process's calls starts: none for one thread, then what is missing to the
    number that the call asks for, or else the environment, or else torch."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [0, 2, 0, 2, 0, 2]


@pytest.fixture
def torchs_own_count():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_default_number_is_torchs_until_the_environment_says_otherwise(monkeypatch, torchs_own_count):
    monkeypatch.delenv("STATESTREAM_NUM_THREADS", raising=False)
    for count in (1, 3):
        torch.set_num_threads(count)
        assert kernels.num_threads() == count
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", "7")
    assert kernels.num_threads() == 7


@pytest.mark.parametrize("torch_threads", [1, 4])
def test_torchs_thread_count_changes_no_bit(torch_threads, torchs_own_count):
    before = State.of(random_values(3 * CHUNK, seed=4, specials=0.01), ALL_BF16)
    want = updated(before, ALL_BF16)
    torch.set_num_threads(torch_threads)
    assert_same_bits(updated(before, ALL_BF16, threads=kernels.num_threads()), want)
