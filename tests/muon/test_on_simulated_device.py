"""Muon on the simulated device: the optimizer's bits, the bound kept, no race, no host wait, over seeded schedules."""

from __future__ import annotations

import pytest
from simulated_device.device import Hazard, InjectedFault, SimulatedDevice
from statestream.offload import optimizer as optimizer_module
from statestream.offload import units as units_module

from .cases import ADAMW, STEPS, Case, Group, differences, offloaded, train

SHAPES = [(16, 64), (1, 64), (16, 64), (64, 1), (16, 64)]
LAYOUTS = {
    "megabatched": [Group(SHAPES), Group([(2, 16, 8)] * 2), ADAMW],
    "batched": [Group(SHAPES), Group([(32, 16)] * 2, options={"partitions": (16, 8, 8)}), ADAMW],
    "torch": [Group(SHAPES)],
}
BUDGETS = (1, 9_000, 30_000, None)


def case_of(seed: int) -> tuple[Case, int | None]:
    layout = sorted(LAYOUTS)[seed % 3]
    missing = lambda step: {i for i in range(12) if (i + step + seed) % 4 == 0}  # noqa: E731
    return Case(layout, LAYOUTS[layout], missing=missing), BUDGETS[seed // 3 % 4]


def allowed(case: Case, budget: int | None) -> int:
    """Bytes, from the shapes: the momenta, of AdamW two, and room for the parameter, each padded to 256 elements."""
    sizes = []
    for group in case.groups:
        tensors = 3 if group.options.get("algorithm") == "adamw" else 2
        for shape in group.shapes:
            numel = 1
            for size in shape:
                numel *= size
            sizes.append(-(-numel // 256) * 256 * 4 * tensors)
    return sum(sizes) if budget is None else max(budget, *sizes)


def put(device: SimulatedDevice, monkeypatch) -> SimulatedDevice:
    for module in (optimizer_module, units_module):
        monkeypatch.setattr(module, "device_for", lambda _: device)
    return device


def check(seed: int, monkeypatch) -> None:
    case, budget = case_of(seed)
    device = put(SimulatedDevice(seed), monkeypatch)
    mine = offloaded(case.run(), budget)
    for step in range(STEPS):
        waits = device.host_waits
        train(mine, [step])
        if device.host_waits != waits or device.live_bytes:
            raise Hazard(f"seed {seed}: the host waited, or state is left on the device")
        device.settle()
    assert 0 < device.peak_bytes <= allowed(case, budget), f"seed {seed}"
    assert differences(mine, train(case.run())) == [], f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_every_schedule_gives_the_optimizers_bits_within_the_bound(first, monkeypatch):
    for seed in range(first, first + 12):
        check(seed, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_thousand_schedules(monkeypatch):
    for seed in range(1000):
        check(seed, monkeypatch)


def test_a_wait_left_out_is_a_race(monkeypatch):
    """Without the wait of a step for its load the momenta are poison."""

    class Careless(SimulatedDevice):
        def wait(self, queue, event):
            if queue != self.compute:
                super().wait(queue, event)

    case, _ = case_of(0)
    device = put(Careless(1, style="late"), monkeypatch)
    mine = offloaded(case.run(), 1)
    with pytest.raises((Hazard, AssertionError)):
        for step in range(STEPS):
            train(mine, [step])
            device.settle()
        assert differences(mine, train(case.run())) == []


@pytest.mark.parametrize("seed", range(6))
def test_after_an_error_in_a_step_the_rest_of_it_can_be_told(seed, monkeypatch):
    """Gradients are back, nothing is torn, nothing is left on the device."""
    case, _ = case_of(seed)
    device = put(SimulatedDevice(seed), monkeypatch)
    mine = offloaded(case.run(), 9_000)
    train(mine, [0])
    device.settle()
    device.fail_at = device.calls + 11 + seed
    case.set_grads(mine.params, 1)
    grads = [p.grad for p in mine.params]
    with pytest.raises(InjectedFault):
        mine.optimizer.step()
    device.settle()
    assert all(p.grad is g for p, g in zip(mine.params, grads, strict=True))
    assert not mine.optimizer.units.torn and not device.live_bytes
