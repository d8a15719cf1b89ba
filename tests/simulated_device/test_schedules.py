"""Thousands of hostile schedules of the real stream.py, and faults planted in it that they must catch.

A failure prints its seed: `run_program(Program(seed), fail_at)` replays it.
"""

from __future__ import annotations

import random
import types

import pytest
from statestream.offload import stream

from .device import Hazard, SimulatedDevice
from .programs import Program, run_program


def check_seeds(seeds):
    for seed in seeds:
        calls = run_program(Program(seed)).calls
        if calls:
            run_program(Program(seed), fail_at=random.Random(seed).randrange(calls))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_every_schedule_gives_the_right_state_within_the_budget(first):
    check_seeds(range(first, first + 50))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_ten_thousand_schedules():
    check_seeds(range(10_000))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6])
def test_an_error_at_any_call_leaves_each_unit_before_or_after(seed):
    calls = run_program(Program(seed)).calls
    for fail_at in range(calls):
        run_program(Program(seed), fail_at=fail_at)


def test_a_seed_replays_the_same_schedule():
    first, second = run_program(Program(5)), run_program(Program(5))
    assert first.log == second.log
    assert first.log != run_program(Program(6)).log


# ---- planted faults ----

FAULTS = {
    "loads do not wait for earlier use of the ring's memory": (
        "device.wait(device.load, device.record(device.compute))",
        "device.record(device.compute)",
    ),
    "a slot is loaded before its last chunk was stored": (
        "self.device.wait(self.device.load, self.stored[stage.after])",
        "pass",
    ),
    "a load waits for the store before the one that matters": (
        "self.stored[stage.after])",
        "self.stored[max(stage.after - 1, 0)])",
    ),
    "a step does not wait for its load": ("device.wait(device.compute, self.loaded[k])", "pass"),
    "a step waits for the first load": (
        "device.wait(device.compute, self.loaded[k])",
        "device.wait(device.compute, self.loaded[0])",
    ),
    "a store does not wait for its step": (
        "device.wait(device.store, device.record(device.compute))",
        "device.record(device.compute)",
    ),
    "a store waits for the load queue": (
        "device.wait(device.store, device.record(device.compute))",
        "device.wait(device.store, device.record(device.load))",
    ),
    "the event of a store is recorded on another queue": (
        "self.stored.append(device.record(device.store))",
        "self.stored.append(device.record(device.load))",
    ),
    "the event of a load is recorded on another queue": (
        "self.loaded.append(self.device.record(self.device.load))",
        "self.loaded.append(self.device.record(self.device.store))",
    ),
    "the ring is freed before the last store": ("device.wait(device.compute, self.stored[-1])", "pass"),
    "the ring's end waits for the first store": (
        "device.wait(device.compute, self.stored[-1])",
        "device.wait(device.compute, self.stored[0])",
    ),
    "readers are given the event of the first store": ("return self.stored[-1]", "return self.stored[0]"),
    "the last chunk is lost": ("enumerate(self.stages):", "enumerate(self.stages[:-1] or self.stages):"),
    "a chunk is stored before it is stepped": (
        "            self.begun = k + 1\n",
        "            self._copy_out(device.store, stage)\n            self.begun = k + 1\n",
    ),
    "the last kind of state is not stored": (
        "            self._copy_out(device.store, stage)\n",
        "            self._copy_out(device.store, Stage(stage.transfers[:-1], stage.after))\n",
    ),
    "loads run on the store queue": (
        "self._copy_in(self.device.load, stage)",
        "self._copy_in(self.device.store, stage)",
    ),
    "the host waits inside a step": (
        "            self.stepped = k + 1\n",
        "            self.stepped = k + 1\n            device.synchronize(self.loaded[k])\n",
    ),
    "a second ring is allocated": (
        "    flow = _Flow(",
        "    device.allocate(ring_bytes)\n    flow = _Flow(",
    ),
    "the ring is never freed": ("        device.free(ring)", "        pass"),
}

RECOVERY_FAULTS = {
    "an error loses the store that it interrupted": (
        "for k in range(len(self.stored), self.stepped):",
        "for k in range(0):",
    ),
    "an error loses the launches before it in its chunk": (
        "if self.begun > k and stepper.keeps(stages[k]):",
        "if False:",
    ),
    "an error leaves a unit that was stepped in part": (
        "while k < len(stages) and stepper.begun(stages[k]):",
        "while False:",
    ),
    "a unit that was stepped in part is finished and not stored": (
        "                stepper.finish(stages[k], self.ring)\n"
        "                self._copy_out(device.compute, stages[k])\n"
        "                k += 1\n            device.drain()",
        "                stepper.finish(stages[k], self.ring)\n                k += 1\n            device.drain()",
    ),
    "an error is handled while copies are on their way": (
        "        try:\n            device.drain()\n",
        "        try:\n",
    ),
    "an error is swallowed": ("        flow.settle()\n        raise", "        flow.settle()"),
}


def mutated(old: str, new: str) -> types.ModuleType:
    """stream.py with one fault in it."""
    with open(stream.__file__) as file:
        source = file.read()
    assert source.count(old) == 1, f"{old!r} is in stream.py {source.count(old)} times"
    module = types.ModuleType("statestream.offload.mutated_stream")
    module.__dict__["__name__"] = stream.__name__
    exec(compile(source.replace(old, new), stream.__file__, "exec"), module.__dict__)
    return module


def is_caught(module, seed: int, fail: bool) -> bool:
    try:
        calls = run_program(Program(seed), stream=module).calls
        if fail and calls:
            for fail_at in random.Random(seed).sample(range(calls), min(calls, 6)):
                run_program(Program(seed), fail_at=fail_at, stream=module)
    except Hazard:
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_within_50_seeds(name):
    module = mutated(*FAULTS[name])
    assert any(is_caught(module, seed, fail=False) for seed in range(50))


@pytest.mark.parametrize("name", RECOVERY_FAULTS)
def test_a_fault_in_what_follows_an_error_is_caught_within_50_seeds(name):
    module = mutated(*RECOVERY_FAULTS[name])
    assert any(is_caught(module, seed, fail=True) for seed in range(50))


# ---- the simulation itself ----


def two_queue_program(device: SimulatedDevice, left_out: int | None) -> int:
    """Ping-pong through one slot: fill, work on it, empty it, fill it again. Returns how many waits it has."""
    waits = 0

    def wait(queue, event):
        nonlocal waits
        if waits != left_out:
            device.wait(queue, event)
        waits += 1

    host = device.memory.block(4 * 32)
    host[:] = 1
    slot = device.allocate(32)
    allocated = device.record(device.compute)
    wait(device.load, allocated)
    for turn in range(4):
        device.copy(device.load, slot, 0, host, 32 * turn, 32)
        wait(device.compute, device.record(device.load))

        def double():
            device.check(slot, 0, 32)
            slot.mul_(2)

        device.launch(double)
        wait(device.load, device.record(device.compute))
        device.copy(device.load, host, 32 * turn, slot, 0, 32)
    wait(device.compute, device.record(device.load))
    device.free(slot)
    device.settle()
    if not bool((host == 2).all()):
        raise Hazard("wrong result")
    return waits


def test_a_two_queue_program_is_clean():
    for seed in range(200):
        two_queue_program(SimulatedDevice(seed), None)


@pytest.mark.parametrize("left_out", range(two_queue_program(SimulatedDevice(0), None)))
def test_each_single_removed_wait_is_found_within_50_seeds(left_out):
    def is_found(seed):
        try:
            two_queue_program(SimulatedDevice(seed), left_out)
        except Hazard:
            return True
        return False

    assert any(is_found(seed) for seed in range(50))


def test_memory_is_poisoned_until_data_arrives_and_after_it_is_freed():
    device = SimulatedDevice(0, style="late")
    host = device.memory.block(16)
    block = device.allocate(16)
    with pytest.raises(Hazard, match="before they arrived"):
        device.check(block, 0, 16)
    device.copy(device.compute, block, 0, host, 0, 16)
    with pytest.raises(Hazard):
        device.check(block, 0, 1)
    device.settle()
    device.check(block, 0, 16)
    device.free(block)
    device.settle()
    with pytest.raises(Hazard, match="freed"):
        device.check(block, 15, 1)


def test_live_bytes_over_the_budget_are_an_error():
    device = SimulatedDevice(0, budget=100)
    first = device.allocate(60)
    with pytest.raises(Hazard, match="120 bytes"):
        device.allocate(60)
    device.free(first)
    assert device.peak_bytes == 120


def test_a_wait_that_can_never_end_is_an_error():
    device = SimulatedDevice(0, style="late")
    event = device.record(device.load)
    device.queues["load"].clear()
    device.wait(device.compute, event)
    with pytest.raises(Hazard, match="deadlock"):
        device.settle()
