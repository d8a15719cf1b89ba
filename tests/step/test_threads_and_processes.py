"""Optimizers beside each other: in threads, in forked and spawned processes, with threads of torch's that change."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import BF16, FP8, FP16, FP32, Mode
from helpers.training import build, train
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.utils.data import DataLoader, TensorDataset

MASTERS = Mode(None, BF16, FP32, "fp32", offload=True)
BLOCKS = Mode(BF16, FP8, FP16, "fp16", stochastic=True)
STEPS = 8
LARGE = 3 * 64 * 1024 + 5
"""Elements, so that a step is for more than one thread."""


def large(offloaded: bool) -> Any:
    param = torch.nn.Parameter(torch.linspace(-1, 1, LARGE).bfloat16())
    optimizer = FusedAdam([param], lr=0.01, master_weights=True)
    return CPUOffloadOptimizer(optimizer, 1 << 20) if offloaded else optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "masters": lambda: build(MASTERS),
    "blocks with scales": lambda: build(BLOCKS),
    "offloaded": lambda: CPUOffloadOptimizer(build(MASTERS), 6_000),
    "large": lambda: large(False),
    "large, offloaded": lambda: large(True),
}


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    """Of the package's own, on a machine of any size."""
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", "4")


def trained(kind: str) -> dict[str, Any]:
    optimizer = OPTIMIZERS[kind]()
    train(optimizer, range(STEPS))
    return snapshot(optimizer)


@cache
def undisturbed(kind: str) -> dict[str, Any]:
    return trained(kind)


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """Runs them at once and hands back what they return; an error of one is raised here."""
    start, results, errors = threading.Barrier(len(work)), [None] * len(work), []

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = work[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "the threads wait for each other"
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("other", ["large, offloaded"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_in_two_threads_each_train_as_if_alone(kind, other):
    got = in_threads(lambda: trained(kind), lambda: trained(other))
    for found, name in zip(got, (kind, other), strict=True):
        assert not differences(found, undisturbed(name))


def digest_of(state_dict: dict[str, Any]) -> str:
    tensors = [
        (key, name, value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else float(value))
        for key, state in sorted(state_dict["state"].items())
        for name, value in sorted(state.items())
    ]
    return hashlib.sha256(repr(tensors).encode()).hexdigest()


@pytest.mark.parametrize("kind", ["masters", "offloaded", "large, offloaded"])
def test_exports_in_one_thread_while_another_steps_hold_what_they_hold_alone(kind):
    saved = OPTIMIZERS[kind]()
    train(saved, range(3))
    alone = digest_of(saved.state_dict())
    exported, stepped = in_threads(
        lambda: {digest_of(saved.state_dict()) for _ in range(STEPS)}, lambda: trained("large")
    )
    assert exported == {alone}
    assert not differences(stepped, undisturbed("large"))


def test_the_number_of_torchs_threads_may_change_between_steps(monkeypatch):
    monkeypatch.delenv("STATESTREAM_NUM_THREADS")
    before = torch.get_num_threads()
    for kind in ("large", "large, offloaded", "blocks with scales"):
        want, optimizer = undisturbed(kind), OPTIMIZERS[kind]()
        try:
            for step in range(STEPS):
                torch.set_num_threads(1 + step % 5)
                train(optimizer, [step])
        finally:
            torch.set_num_threads(before)
        assert not differences(snapshot(optimizer), want)


# Processes -------------------------------------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_forked_child_goes_on_where_its_parent_was_and_so_does_the_parent(kind):
    """As a data loader forks: after some steps, whose threads the child does not have. Torch's own OpenMP hangs in a
    child that does not ask for one thread, as loaders do."""
    optimizer = OPTIMIZERS[kind]()
    train(optimizer, range(3))

    def finish() -> dict[str, Any]:
        train(optimizer, range(3, STEPS))
        optimizer.state_dict()
        return snapshot(optimizer)

    want = undisturbed(kind)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def in_child() -> None:
        torch.set_num_threads(1)
        send.send(differences(finish(), want))

    child = context.Process(target=in_child)
    child.start()
    try:
        assert receive.poll(60), "the child hangs"
        assert receive.recv() == []
    finally:
        child.kill()
        child.join()
    assert not differences(finish(), want)


@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_training_beside_forked_loaders_is_training_without():
    """New workers every epoch, forked between and after steps."""

    def losses(workers: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = CPUOffloadOptimizer(FusedAdam(model.parameters(), lr=0.05), 4096)
        inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), 8, num_workers=workers, timeout=60 if workers else 0)
        found = []
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = (model(x)[:, 0] - y).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    assert losses(2) == losses(0)


FRESH = """
import pickle, sys, torch
from helpers.bits import snapshot
from helpers.training import train
optimizer = pickle.load(sys.stdin.buffer)
train(optimizer, range(3, int(sys.argv[1])))
pickle.dump((torch.get_num_threads(), snapshot(optimizer)), sys.stdout.buffer)
"""


@pytest.mark.parametrize("kind", ["large"])
def test_a_fresh_process_with_one_openmp_thread_goes_on_with_the_same_bits(kind):
    """As a spawned worker gets an optimizer: pickled. OMP_NUM_THREADS=1 is what torchrun sets."""
    optimizer = OPTIMIZERS[kind]()
    train(optimizer, range(3))
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STATESTREAM_NUM_THREADS": "", "PYTHONPATH": path}
    command = [sys.executable, "-c", FRESH, str(STEPS)]
    done = subprocess.run(command, input=pickle.dumps(optimizer), capture_output=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    threads, found = pickle.loads(done.stdout)
    assert threads == 1
    assert not differences(found, undisturbed(kind))
