"""Muon on the simulated device: the optimizer's bits, the bound kept, no race, no host wait, over seeded schedules."""

from __future__ import annotations

import math

import pytest
from simulated_device.device import Hazard, InjectedFault, SimulatedDevice
from statestream import FusedAdam

from .cases import ADAMW, STEPS, Case, Group, Run, check_same, differences, offloaded, train

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
    """Bytes, from the shapes: the momenta, of AdamW two and where it has one a count, and room for the parameter, each
    padded to 256 elements."""
    sizes = []
    for group in case.groups:
        of_adamw = group.options.get("algorithm") == "adamw"
        tensors, counts = (3, case.layout == "megabatched") if of_adamw else (2, 0)
        sizes += [1024 * (-(-math.prod(shape) // 256) * tensors + counts) for shape in group.shapes]
    return sum(sizes) if budget is None else max(budget, *sizes)


def check(seed: int, on_device) -> None:
    case, budget = case_of(seed)
    device = on_device(SimulatedDevice(seed))
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
def test_every_schedule_gives_the_optimizers_bits_within_the_bound(first, on_device):
    for seed in range(first, first + 12):
        check(seed, on_device)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_thousand_schedules(on_device):
    for seed in range(1000):
        check(seed, on_device)


def test_a_muon_and_a_fused_adam_that_step_in_turn_take_the_bound_of_one(on_device):
    """The recipe of docs/muon.md: no host wait between them, and nothing of one is there while the other steps."""
    budget = 30_000
    matrices = Case("torch", [Group([(16, 64)] * 4)])
    rest = Case("FusedAdam", [Group([(1000,), (5, 300), (7,)])])

    def build():
        params = rest.params()
        return [matrices.run(), Run(rest, params, FusedAdam(params, lr=0.01))]

    plain = build()
    for seed in range(8):
        device = on_device(SimulatedDevice(seed, budget=budget))
        mine = [offloaded(run, budget) for run in build()]
        device.settle()
        for step in range(STEPS):
            waits = device.host_waits
            for run in mine:
                train(run, [step])
            assert device.host_waits == waits
        device.settle()
        if seed == 0:
            for run in plain:
                train(run)
        for run, other in zip(mine, plain, strict=True):
            check_same(run, other)


def test_a_wait_left_out_is_a_race(on_device):
    """Without the wait of a step for its load the momenta are poison."""

    class Careless(SimulatedDevice):
        def wait(self, queue, event):
            if queue != self.compute:
                super().wait(queue, event)

    case, _ = case_of(0)
    device = on_device(Careless(1, style="late"))
    mine = offloaded(case.run(), 1)
    with pytest.raises((Hazard, AssertionError)):
        for step in range(STEPS):
            train(mine, [step])
            device.settle()
        assert differences(mine, train(case.run())) == []


@pytest.mark.parametrize("seed", range(6))
def test_after_an_error_in_a_step_the_rest_of_it_can_be_told(seed, on_device):
    """Gradients are back, nothing is torn, nothing is left on the device."""
    case, _ = case_of(seed)
    device = on_device(SimulatedDevice(seed))
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
    assert not mine.optimizer.strategy.torn and not device.live_bytes
