"""Long training with many saves: memory stays flat, and streamed state never drifts from state on the device."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.memory import own_resident_bytes, settle
from helpers.modes import BF16, FP8, FP16, FP32, Mode
from helpers.training import build, gradient
from statestream import CPUOffloadOptimizer
from torch import Tensor

from .conftest import Pinning
from .test_memory import host_device_with

MODES = {
    "masters": Mode(None, BF16, FP32, "fp32"),
    "blocks with scales, by random bits": Mode(BF16, FP8, FP16, "fp16", stochastic=True),
}
CHUNK = 6_000
RESIDENT_LIMIT = 3 << 20
"""Bytes that a process may have grown by: allocators keep some of what they freed."""
OBJECT_LIMIT = 200


def held(pinning: Pinning) -> dict[str, int]:
    """What this process holds, by kind, once all that is garbage is gone."""
    settle()
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(o), Tensor) for o in objects),
        "objects": len(objects),
        "resident bytes": own_resident_bytes(),
        "pinned blocks": len(pinning.pinned),
        "pinned bytes": sum(pinning.pinned.values()),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
    }


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What grew by more than it may."""
    limits = {"resident bytes": RESIDENT_LIMIT, "objects": OBJECT_LIMIT}
    return {k: after[k] - before[k] for k in before if after[k] - before[k] > limits.get(k, 0)}


class LongRun:
    """A plain optimizer, and an offloaded one that is saved to a file and loaded from it every few steps."""

    def __init__(self, mode: Mode, file: Path, pinning: Pinning):
        self.plain, self.offloaded = build(mode), CPUOffloadOptimizer(build(mode), CHUNK)
        self.file, self.pinning, self.step = file, pinning, 0

    def train(self, steps: int, save_every: int, then: Callable[[dict[str, Any]], None] = lambda saved: None) -> None:
        for _ in range(steps):
            for optimizer in (self.plain, self.offloaded):
                params = [param for group in optimizer.param_groups for param in group["params"]]
                for index, param in enumerate(params):
                    param.grad = gradient(param, index, self.step % 40)
                optimizer.step()
            self.step += 1
            if self.step % save_every == 0:
                saved = self.offloaded.state_dict()
                torch.save(saved, self.file)
                self.offloaded.load_state_dict(torch.load(self.file, weights_only=True))
                then(saved)


def run(mode: Mode, steps: int, saves: int, tmp_path: Path, on_device: Any, **how: Any) -> dict[str, int]:
    """What grew from the first quarter of a run to its end."""
    pinning = Pinning()
    on_device(host_device_with(pinning))
    long = LongRun(mode, tmp_path / "saved.pt", pinning)
    long.train(steps // 4, steps // saves, **how)
    before = held(pinning)
    assert before["pinned blocks"] > 0
    long.train(steps - steps // 4, steps // saves, **how)
    found = growth(before, held(pinning))
    # After a load a block may have another scale for the same values; after a step it has the same again.
    long.train(1, save_every=2 * steps)
    assert not differences(snapshot(long.plain), snapshot(long.offloaded))
    counts = {state["step"].item() for state in long.offloaded.state.values() if state["step"].numel()}
    assert counts == {steps + 1} == {group["step"] for group in long.plain.param_groups}
    return found


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@linux
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_three_hundred_steps_with_twelve_saves(mode, tmp_path, on_device):
    assert run(mode, 300, 12, tmp_path, on_device) == {}


@linux
def test_control_a_save_that_is_kept_is_seen(tmp_path, on_device):
    kept: list[dict[str, Any]] = []
    found = run(MODES["masters"], 60, 12, tmp_path, on_device, then=kept.append)
    assert found["tensors"] >= 9 * 7, "nine saves of seven parameters"


@linux
@pytest.mark.long  # 3 minutes each
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_twenty_thousand_steps_with_two_hundred_saves(mode, tmp_path, on_device):
    assert run(mode, 20_000, 200, tmp_path, on_device) == {}
