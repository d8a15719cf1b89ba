"""Ctrl-C before any line of a step, an export or a load: all of it was done or nothing, and training goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.interrupts import interrupted_at, moments_of, sigint_raises
from helpers.modes import BF16, FP8, FP16, FP32, Mode
from helpers.training import build, gradient, train
from statestream import CPUOffloadOptimizer
from statestream.interrupts import interrupts_held
from torch.optim import SGD, AdamW, Optimizer

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MASTERS = Mode(None, BF16, FP32, "fp32")
BLOCKS = Mode(BF16, FP8, FP16, "fp16", offload=True)
CHUNK = 6_000


def plain(kind: type[Optimizer], **arguments: Any) -> Optimizer:
    """Over the groups of `build`."""
    groups = [{"params": group["params"]} for group in build(MASTERS).param_groups]
    return kind(groups, lr=0.01, **arguments)


def scaled(optimizer: Any) -> Any:
    """As GradScaler leaves it for a step."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    return optimizer


OPTIMIZERS = {
    "masters": lambda: build(MASTERS),
    "blocks with scales": lambda: build(BLOCKS),
    "offloaded masters": lambda: CPUOffloadOptimizer(build(MASTERS), CHUNK),
    "offloaded blocks": lambda: CPUOffloadOptimizer(build(BLOCKS), CHUNK),
    "offloaded AdamW": lambda: CPUOffloadOptimizer(plain(AdamW), CHUNK),
    "offloaded SGD": lambda: CPUOffloadOptimizer(plain(SGD, momentum=0.9), CHUNK),
    "offloaded, scaled gradients": lambda: scaled(CPUOffloadOptimizer(build(MASTERS), CHUNK)),
    "one pass": lambda: CPUOffloadOptimizer(plain(AdamW), None, per_parameter=False),
}


@dataclass
class Run:
    """An optimizer that was trained for some steps, and what is done to it next."""

    optimizer: Any
    saved: dict[str, Any]

    @classmethod
    def of(cls, kind: str, steps: int) -> Run:
        run = cls(OPTIMIZERS[kind](), {})
        train(run.optimizer, range(steps))
        if steps:
            other = OPTIMIZERS[kind]()
            train(other, range(10, 13))
            run.saved = other.state_dict()
        run.set_gradients(steps)
        return run

    def set_gradients(self, step: int) -> None:
        for index, param in enumerate(self.params):
            param.grad = gradient(param, index, step)

    @property
    def params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def step(self) -> None:
        self.optimizer.step()

    def export(self) -> None:
        self.optimizer.state_dict()

    def load(self) -> None:
        self.optimizer.load_state_dict(self.saved)

    @property
    def settings(self) -> dict[str, Any]:
        """Of optimizer and inner one: numbers, dtypes, and which attributes there are."""
        both = (self.optimizer, getattr(self.optimizer, "inner", self.optimizer))
        return {
            f"{i} {name}": value if isinstance(value, bool | int | float | str | torch.dtype) else None
            for i, owner in enumerate(both)
            for name, value in vars(owner).items()
        }


def check(kind: str, steps: int, action: str, sampled: int | None) -> int:
    """Interrupts the action before each line of it, where it runs first and last, or at `sampled` such moments, evenly
    spread; how many."""
    getattr(Run.of(kind, steps), action)()  # what is done but once in a process is done
    whole = Run.of(kind, steps)
    moments = moments_of(getattr(whole, action))
    after, settings_after = snapshot(whole.optimizer), whole.settings
    train(whole.optimizer, [steps + 1])
    following = snapshot(whole.optimizer)
    if sampled is not None:
        moments = sorted({moments[len(moments) * i // sampled] for i in range(sampled)})
    for number in moments:
        run = Run.of(kind, steps)
        before, settings, grads = snapshot(run.optimizer), run.settings, [p.grad for p in run.params]
        assert interrupted_at(number, getattr(run, action)), f"line {number}: the interrupt was lost"
        where = f"interrupted before line {number}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where
        assert all(p.grad is g for p, g in zip(run.params, grads, strict=True)), where
        now = snapshot(run.optimizer)
        # State that is made when it is first read is the same state.
        done = not [name for name in differences(now, after) if name in now]
        undone = not [name for name in differences(now, before) if name in before]
        assert done or undone, f"{where}: neither before nor after, by {differences(now, after)}"
        assert run.settings in (settings, settings_after), where
        if undone and not done:
            getattr(run, action)()
        train(run.optimizer, [steps + 1])
        assert not differences(snapshot(run.optimizer), following), where
    return len(moments)


ACTIONS = [("step", 0), ("step", 2), ("export", 2), ("load", 2)]


@pytest.mark.parametrize("action, steps", ACTIONS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_interrupt_leaves_all_or_nothing_done(kind, action, steps):
    with sigint_raises():
        check(kind, steps, action, sampled=6)


@pytest.mark.long  # 2 minutes
@pytest.mark.parametrize("action, steps", ACTIONS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_interrupt_before_any_line_leaves_all_or_nothing_done(kind, action, steps):
    with sigint_raises():
        assert check(kind, steps, action, sampled=None) > 40


WORKER = Path(__file__).with_name("interrupt_worker.py")


def interrupt_at_random(kind: str, rounds: int, seed: int) -> int:
    """Sends SIGINT to a run of its own process as often as told, each time up to 30 ms after it began; its steps."""
    choose = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(WORKER.parents[1])])}
    command = [sys.executable, str(WORKER), kind, str(rounds)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line == "ready\n":
                time.sleep(choose.uniform(0, 0.03))
                process.send_signal(signal.SIGINT)
            else:
                steps = int(line.removeprefix("done "))
        errors = process.stderr.read()
    assert process.returncode == 0, f"seed {seed}: {errors[-3000:]}"
    return steps


def test_interrupts_at_random_moments_lose_no_step_and_halve_none():
    assert interrupt_at_random("offloaded masters", rounds=15, seed=1) > 0


@pytest.mark.long  # 2 minutes
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_many_interrupts_at_random_moments(kind):
    assert interrupt_at_random(kind, rounds=1_000, seed=2) > 0


def test_after_an_error_ctrl_c_is_pythons_again():
    with pytest.raises(ArithmeticError), interrupts_held():
        raise ArithmeticError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_before_an_error_is_raised_with_the_error_as_its_context():
    with pytest.raises(KeyboardInterrupt) as raised, interrupts_held() as came:
        signal.raise_signal(signal.SIGINT)
        assert came()
        raise ArithmeticError
    assert isinstance(raised.value.__context__, ArithmeticError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
