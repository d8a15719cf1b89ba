"""Bandwidth of a step, as a fraction of a device-to-device copy's in the same run."""

import statistics

import pytest
import torch
from gpu_cases import ALL_BF16, ALL_FORMATS, GPU, SCALED_BF16, Tensors, name_of, step

ELEMENTS = 1 << 27
LEAST = 0.6
"""Far below what a quiet GPU gives; a kernel that lost its 128-bit accesses or its occupancy is below it."""
LEAST_GENERIC = 0.15
"""The generic kernel takes two to three times as many instructions an element, for fewer bytes."""


def milliseconds(run, rounds=15):
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def bytes_moved(dtypes) -> int:
    param, grad, exp_avg, exp_avg_sq, master = (0 if d is None else d.itemsize for d in dtypes)
    weight = 2 * param if not master else param + 2 * master
    if dtypes[4] is torch.int16:
        weight += param  # read as well
    return weight + grad + 2 * (exp_avg + exp_avg_sq)


@pytest.mark.parametrize("dtypes", [ALL_FORMATS[0], ALL_BF16, ALL_FORMATS[23], SCALED_BF16], ids=name_of)
def test_a_step_runs_near_the_memorys_speed(dtypes):
    if torch.cuda.mem_get_info()[0] < 24 * ELEMENTS:
        pytest.skip("needs 3 GiB of free GPU memory")
    tensors = Tensors.random(dtypes, [ELEMENTS], seed=1).to(GPU)
    source, target = (torch.empty(ELEMENTS, device=GPU) for _ in range(2))
    copy = 8 * ELEMENTS / milliseconds(lambda: target.copy_(source))
    ours = bytes_moved(dtypes) * ELEMENTS / milliseconds(lambda: step(tensors))
    least = LEAST_GENERIC if tensors.scales else LEAST
    assert ours >= least * copy, f"{ours / copy:.2f} of a copy's {copy / 1e6:.0f} GB/s"


def test_untouched_rows_are_not_slower():
    """Zero moments and gradients, as of embedding rows that no token reached."""
    tensors = Tensors.random(ALL_BF16, [ELEMENTS // 4], seed=1).to(GPU)
    ordinary = milliseconds(lambda: step(tensors))
    for role in tensors.roles[1:]:
        role[0].zero_()
    assert milliseconds(lambda: step(tensors)) <= 1.1 * ordinary


def test_a_thousand_small_tensors_take_two_launches():
    tensors = Tensors.random(ALL_BF16, [1000] * 1000, seed=1).to(GPU)
    step(tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(tensors)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if "adam_kernel" in event.name]
    assert len(launches) == 2
