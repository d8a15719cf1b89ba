"""Thousands of hostile schedules of the real pipeline, and faults planted in it that they must catch.

A failure prints its seed: `run_program(Program(seed), fail_at)` replays it.
"""

from __future__ import annotations

import random
import types

import pytest
import torch
from statestream.device.queues import HostDevice
from statestream.streaming import host_pipeline
from statestream.streaming import pipeline as stream

from .device import Hazard, SimulatedDevice
from .programs import Program, run_program


def check_seeds(seeds):
    for shared in (False, True):
        for seed in seeds:
            program = Program(seed, shared=shared)
            calls = run_program(program).calls
            if calls:
                run_program(Program(seed, shared=shared), fail_at=random.Random(seed).randrange(calls))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_every_schedule_gives_the_right_state_within_the_budget(first):
    check_seeds(range(first, first + 50))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_ten_thousand_schedules():
    check_seeds(range(10_000))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("shared", [False, True])
def test_an_error_at_any_call_leaves_each_unit_before_or_after(seed, shared):
    calls = run_program(Program(seed, shared=shared)).calls
    for fail_at in range(calls):
        run_program(Program(seed, shared=shared), fail_at=fail_at)


def test_a_seed_replays_the_same_schedule():
    for shared in (False, True):
        first, second = run_program(Program(5, shared=shared)), run_program(Program(5, shared=shared))
        assert first.log == second.log
        assert first.log != run_program(Program(6, shared=shared)).log


# ---- planted faults ----

FAULTS = {
    "loads do not wait for earlier use of the ring's memory": ("device.wait(device.load, ready)", "pass"),
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
    "an error leaves a unit that was stepped in part": ("if stepper.begun(stages[k]):", "if False:"),
    "a unit that was stepped in part is finished and not stored": (
        "                    stepper.finish(stages[k], self.ring)\n"
        "                    self._copy_out(device.compute, stages[k])\n",
        "                    stepper.finish(stages[k], self.ring)\n",
    ),
    "an error is handled while copies are on their way": (
        "        try:\n            device.drain()\n",
        "        try:\n",
    ),
    "an error is swallowed": ("        flow.settle()\n        raise", "        flow.settle()"),
}


HOST_FAULTS = {
    "what comes down does not wait for the compute queue": ("device.wait(device.down, ready)", "pass"),
    "the host updates before the chunk is there": ("yield here[k]", "yield None"),
    "the host waits for the first chunk": ("yield here[k]", "yield here[0]"),
    "a slot is filled before its last chunk went up": ("device.wait(device.down, self.sent[k])", "pass"),
    "a slot waits for the chunk before the one that matters": (
        "device.wait(device.down, self.sent[k])",
        "device.wait(device.down, self.sent[max(k - 1, 0)])",
    ),
    "the event of what came down is recorded on another queue": (
        "return self.device.record(self.device.down)",
        "return self.device.record(self.device.up)",
    ),
    "the event of what went up is recorded on another queue": (
        "self.sent.append(device.record(device.up))",
        "self.sent.append(device.record(device.down))",
    ),
    "weights go up before they are updated": (
        "            self.stepper.step(chunk, self._slot(k))\n            self._send(device.up, k)\n",
        "            self._send(device.up, k)\n            self.stepper.step(chunk, self._slot(k))\n",
    ),
    "weights go up by the queue of what comes down": ("self._send(device.up, k)", "self._send(device.down, k)"),
    "two chunks use one slot": ("self.slots[k % len(self.slots)]", "self.slots[0]"),
    "the host's last chunk is lost": ("enumerate(self.chunks):", "enumerate(self.chunks[:-1] or self.chunks):"),
}

SHARED_FAULTS = {
    "the compute queue does not wait for the last weights": ("device.wait(device.compute, self.host.sent[-1])", "pass"),
    "the compute queue waits for the first weights": (
        "device.wait(device.compute, self.host.sent[-1])",
        "device.wait(device.compute, self.host.sent[0])",
    ),
}

HOST_RECOVERY_FAULTS = {
    "weights that were updated before an error stay on the host": (
        "                self._send(device.compute, k)\n                if stepper",
        "                if stepper",
    ),
    "the host leaves a unit that was stepped in part": ("if stepper.begun(self.chunks[k]):", "if False:"),
    "the host finishes a unit and does not send it": (
        "                    stepper.finish(self.chunks[k], self._slot(k))\n"
        "                    self._send(device.compute, k)\n",
        "                    stepper.finish(self.chunks[k], self._slot(k))\n",
    ),
    "the host finishes a unit before it is there": (
        "                    device.drain()\n                    stepper.finish",
        "                    stepper.finish",
    ),
}

SHARED_RECOVERY_FAULTS = {
    "the host's share goes on after an error": ("self.worker.stop()", "pass"),
    "the host's share is not settled": ("self.host.settle()", "pass"),
    "the device does not finish what the host began": ("rest = range(k, len(stages))", "rest = range(k, k)"),
}


def mutated(old: str, new: str, module: types.ModuleType = stream) -> types.ModuleType:
    """A module with one fault in it."""
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(old) == 1, f"{old!r} is in {module.__file__} {source.count(old)} times"
    faulty = types.ModuleType("statestream.offload.mutated")
    faulty.__dict__["__name__"] = module.__name__
    exec(compile(source.replace(old, new), module.__file__, "exec"), faulty.__dict__)
    return faulty


def is_caught(seed: int, fail: bool, shared: bool = False, **modules) -> bool:
    try:
        calls = run_program(Program(seed, shared=shared), **modules).calls
        if fail and calls:
            for fail_at in random.Random(seed).sample(range(calls), min(calls, 6)):
                run_program(Program(seed, shared=shared), fail_at=fail_at, **modules)
    except Hazard:
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_within_50_seeds(name):
    module = mutated(*FAULTS[name])
    assert any(is_caught(seed, fail=False, stream=module) for seed in range(50))


@pytest.mark.parametrize("name", RECOVERY_FAULTS)
def test_a_fault_in_what_follows_an_error_is_caught_within_50_seeds(name):
    module = mutated(*RECOVERY_FAULTS[name])
    assert any(is_caught(seed, fail=True, stream=module) for seed in range(50))


@pytest.mark.parametrize("name", [*HOST_FAULTS, *SHARED_FAULTS])
def test_a_fault_in_the_hosts_share_is_caught_within_50_seeds(name):
    in_host = name in HOST_FAULTS
    module = mutated(*HOST_FAULTS[name], host_pipeline) if in_host else mutated(*SHARED_FAULTS[name])
    where = {"host_stream" if in_host else "stream": module}
    assert any(is_caught(seed, fail=False, shared=True, **where) for seed in range(50))


@pytest.mark.parametrize("name", [*HOST_RECOVERY_FAULTS, *SHARED_RECOVERY_FAULTS])
def test_a_fault_in_what_follows_an_error_of_a_shared_step_is_caught_within_50_seeds(name):
    in_host = name in HOST_RECOVERY_FAULTS
    module = mutated(*HOST_RECOVERY_FAULTS[name], host_pipeline) if in_host else mutated(*SHARED_RECOVERY_FAULTS[name])
    where = {"host_stream" if in_host else "stream": module}
    assert any(is_caught(seed, fail=True, shared=True, **where) for seed in range(50))


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


class Refusing(HostDevice):
    """Copies so often and no more."""

    def __init__(self, left: int):
        super().__init__()
        self.left = left

    def copy(self, *args: object) -> None:
        if self.left == 0:
            raise RuntimeError("lost")
        self.left -= 1
        super().copy(*args)


@pytest.mark.parametrize(("copies", "torn"), [(2, []), (3, [0, 1, 2]), (4, [1, 2]), (5, [2])])
def test_what_could_not_be_stored_is_named_from_the_first_stage_on(copies, torn):
    """Three stages of one copy each way: load 0, load 1, load 2, store 0, store 1, store 2."""
    host = torch.zeros(3 * 256, dtype=torch.uint8)
    stages = [stream.Stage([stream.Transfer(host, 256 * k, 256 * k, 256)], -1, k) for k in range(3)]
    told: list[int] = []
    stepper = types.SimpleNamespace(
        step=lambda stage, ring: None,
        keeps=lambda stage: False,
        begun=lambda stage: False,
        torn=lambda stages, error: told.extend(stage.chunk for stage in stages),
    )
    with pytest.raises(RuntimeError, match="lost"):
        stream.run(Refusing(copies), 3 * 256, stages, stepper)
    assert told == torn
