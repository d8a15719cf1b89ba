"""cpu_fraction="auto": both rates are measured in a few steps, and the share that they give is near the best."""

from __future__ import annotations

import pytest
from statestream.streaming.balance import Balance

from benchmarks.simulated.bandwidth import adam_units, time_shared_step

GB = 10**9
UNITS = adam_units([GB // 16, *[GB // 128 - 13, 13] * 20])
BUDGET = 300_000_000


def settled(**rates):
    """The fraction that is settled on, and how the steps went."""
    balance, timings = Balance(), []
    while not balance.settled:
        timing = time_shared_step(UNITS, BUDGET, balance.fraction, **rates)
        slow = 10.0 if not timings else 1.0  # as a first step is
        balance.learn(timing.device_bytes, timing.device * slow, timing.host_bytes, timing.host * slow)
        timings.append(timing)
    assert len(timings) == 6  # as docs/offload.md says
    return balance.fraction, timings


@pytest.mark.parametrize("link", [8e9, 55e9])
@pytest.mark.parametrize("host_memory", [1e9, 20e9, 100e9, 1000e9])
def test_it_settles_near_the_best_share(link, host_memory):
    rates = {"link": link, "host_memory": host_memory}
    fraction, _ = settled(**rates)
    best = min(time_shared_step(UNITS, BUDGET, f / 50, **rates).total for f in range(51))
    assert time_shared_step(UNITS, BUDGET, fraction, **rates).total <= 1.05 * best


def test_both_sides_then_end_together():
    fraction, _ = settled(link=20e9, host_memory=100e9)
    timing = time_shared_step(UNITS, BUDGET, fraction, link=20e9, host_memory=100e9)
    assert timing.device == pytest.approx(timing.host, rel=0.05) and 0.1 < fraction < 0.9


def test_a_side_that_is_of_no_use_gets_nothing():
    assert settled(link=55e9, host_memory=0.1e9)[0] == 0.0
    assert settled(memory=0.1e9, host_memory=1000e9)[0] == 1.0


@pytest.mark.parametrize("odd", [(1e-9, 50.0), (50.0, 1e-9), (1e-9, 1e-9)])
def test_a_first_step_teaches_nothing_however_odd_it_is(odd):
    """Memory is touched for the first time, kernels are loaded: on one side perhaps."""
    balance = Balance()
    balance.learn(100, odd[0], 100, odd[1])
    assert balance.fraction == 0.5
    balance.learn(100, 1.0, 300, 1.0)
    assert balance.fraction == 0.75


def test_steps_in_which_a_side_had_nothing_to_do_teach_nothing_and_nothing_is_learnt_once_it_is_settled():
    balance = Balance()
    balance.learn(1, 1.0, 1, 1.0)
    balance.learn(100, 1.0, 0, 0.0)
    assert balance.fraction == 0.5
    balance.learn(100, 1.0, 300, 1.0)
    assert balance.fraction == 0.75
    while not balance.settled:
        balance.learn(100, 1.0, 300, 1.0)
    fraction = balance.fraction
    balance.learn(100, 1.0, 1, 1.0)
    assert balance.fraction == fraction
