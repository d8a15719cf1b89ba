"""What the launchers make of a table: launches, their limits, devices, streams and errors."""

from array import array

import numpy as np
import pytest
from statestream.kernels import BFLOAT16

from .build import ARCHS, find_nvcc
from .cases import (
    ADAMW,
    ALL_FORMATS,
    FIRST_ADDRESS,
    HOT,
    assert_same,
    check,
    chunk_elements,
    launches_of,
    on_cpu,
    on_device,
    tensors,
    unit,
)
from .device import Device

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


def test_every_combination_has_a_kernel_of_its_own():
    device = Device(ARCHS[0], interpret=False)
    for formats in ALL_FORMATS:
        on_device([tensors(formats, 4, seed=0)], formats, device)
    names = [launch.kernel.name for launch in device.launches]
    assert len(names) == len(ALL_FORMATS)
    assert set(names) == {name for name in device.kernels if "adam_kernel" in name}


def test_more_tensors_than_a_launch_holds():
    """Empty ones among them cost nothing."""
    group = [tensors(HOT[1], k % 10 and 1, seed=k) for k in range(580)]
    device = Device(ARCHS[-1], multiprocessors=16)
    check(group, HOT[1], device)
    assert len(device.launches) == 2 and device.launches[0].grid == 16


def test_more_step_counts_than_a_launch_holds():
    group = [tensors(HOT[1], 1, seed=k, step=k % 110) for k in range(120)]
    device = Device(ARCHS[0], multiprocessors=16)
    check(group, HOT[1], device)
    assert len(device.launches) == 2


# ---- more elements than 32 bits count

HUGE = 2**33


def last_blocks(n: int):
    return range(n - 2, n)


def map_the_end(device: Device, n: int, arrays: list[tuple[str, np.ndarray]], read_only: str) -> list[int]:
    """Addresses of tensors of n elements of which the arrays are the end, and nothing else is mapped."""
    addresses = []
    for k, (name, end) in enumerate(arrays):
        address = FIRST_ADDRESS * (k + 1)
        base = address + (n - end.size) * end.itemsize
        device.add(end, name, base=base, writable=name != read_only)
        addresses.append(address)
    return addresses


@pytest.mark.parametrize("formats", HOT[:2], ids=unit)
def test_indices_have_64_bits(formats):
    chunk = chunk_elements()
    mapped, n = chunk + 13, HUGE + chunk + 13  # what the last two blocks have
    one = tensors(formats, mapped, seed=5, step=2)
    want = [one.copy()]
    on_cpu(want, formats)
    device = Device(ARCHS[-1], multiprocessors=2**30, order=last_blocks)
    arrays = [(name, values) for name, values in one.arrays() if name != "step"]
    row = array("q", [n, *map_the_end(device, n, arrays, "grad"), 0, one.step.ctypes.data, 0])
    with device.module() as module:
        module.adam(row, tuple(formats), **vars(ADAMW), grad_scale=1.0, advance=True, device=0, stream=0)
    assert device.launches[0].grid == -(-n // chunk)
    assert_same([one], want)


def test_conversion_indices_have_64_bits():
    probe = Device(ARCHS[0], interpret=False)
    with probe.module() as module:
        module.decode(BFLOAT16, FIRST_ADDRESS, 2 * FIRST_ADDRESS, HUGE, device=0, stream=0)
    of_a_block = 8 * probe.launches[0].block
    n = HUGE + of_a_block
    bits = np.random.default_rng(6).integers(0, 0x7F80, 2 * of_a_block).astype(np.uint16)
    out = np.zeros(2 * of_a_block, np.uint32)
    device = Device(ARCHS[-1], multiprocessors=2**30, order=last_blocks)
    source, result = map_the_end(device, n, [("source", bits), ("result", out)], "source")
    with device.module() as module:
        module.decode(BFLOAT16, source, result, n, device=0, stream=0)
    assert device.launches[0].grid == n // of_a_block
    assert (out == bits.astype(np.uint32) << 16).all()


_ONE_STEP = np.zeros(1, np.float32)


def rows_at(sizes: list[int], steps: np.ndarray | None = None) -> array:
    """Rows of tensors that are not there; one counter for all, or each its own."""
    steps = _ONE_STEP if steps is None else steps
    rows = array("q")
    for k, n in enumerate(sizes):
        rows.extend([n, *(FIRST_ADDRESS * i for i in range(1, 5)), 0, steps.ctypes.data + 4 * (k % steps.size), 0])
    return rows


@pytest.mark.parametrize(("beyond", "chunks"), [(-1, 1), (0, 1), (1, 1), (2, 2)])
def test_a_head_takes_no_chunk_of_its_own(beyond, chunks):
    """One element before the pointers are aligned: a chunk and one more are still one block's work."""
    row = rows_at([chunk_elements() + beyond])
    row[1:5] = array("q", [address + 12 for address in row[1:5]])
    assert [one.grid for one in launches_of(row, HOT[0], multiprocessors=1000)] == [chunks]


def test_the_chunks_of_a_launch_are_counted_in_31_bits():
    steps, quarter = np.zeros(1, np.float32), 2**29 * chunk_elements()
    assert len(launches_of(rows_at([quarter] * 3, steps), HOT[0])) == 1
    assert len(launches_of(rows_at([quarter] * 4, steps), HOT[0])) == 2
    with pytest.raises(ValueError, match="more elements"):
        launches_of(rows_at([4 * quarter], steps), HOT[0])


# ---- capturable


def capturable_launches(sizes: list[int]) -> list[str]:
    """Kernels that a capturable call of tensors with these sizes launches, by name; nothing runs."""
    steps = np.zeros(len(sizes), np.float32)
    call = {"capturable": True, "scratch_address": FIRST_ADDRESS * 9}
    return [one.kernel.name for one in launches_of(rows_at(sizes, steps), HOT[1], **call)]


def test_a_capturable_launch_reaches_65536_scalars():
    near, far = ([8] + [0] * k + [8] for k in (65534, 65535))
    for sizes, expected in ((near, 1), (far, 2)):
        assert sum("adam_kernel" in name for name in capturable_launches(sizes)) == expected


def test_counters_take_launches_of_4000():
    for n, expected in ((0, 0), (1, 1), (4000, 1), (4001, 2), (8000, 2)):
        assert sum("step_kernel" in name for name in capturable_launches([0] * n)) == expected


@pytest.mark.parametrize("n", [0, 1, 4000, 4001])
def test_every_counter_advances_once(n):
    device, steps = Device(ARCHS[0]), np.arange(n, dtype=np.float32)
    device.add(steps, "counters")
    with device.module() as module:
        module.advance_steps(steps.ctypes.data + 4 * np.arange(n, dtype=np.int64), device=0, stream=0)
    assert (steps == np.arange(1, n + 1)).all()


def test_no_rows_are_no_launch():
    assert launches_of(array("q"), HOT[0]) == []
    assert launches_of(rows_at([0, 0]), HOT[0]) == []


# ---- where a call runs, and how it fails


@pytest.mark.parametrize("number", [0, 1])
def test_a_call_runs_on_its_device_and_stream(number):
    device = Device(ARCHS[0], interpret=False)
    one, values = rows_at([8]), np.zeros(8, np.float32).ctypes.data
    options = {**vars(ADAMW), "grad_scale": 1.0, "advance": False}
    with device.module() as module:
        module.adam(one, tuple(HOT[0]), **options, device=number, stream=77)
        module.adam(one, tuple(HOT[0]), **options, device=number, stream=77, capturable=True, scratch_address=64)
        module.advance_steps(array("q", [64]), device=number, stream=77)
        module.decode(BFLOAT16, values, values, 8, device=number, stream=77)
        module.encode(BFLOAT16, values, values, 8, device=number, stream=77)
        module.refresh_master(values, values, 8, device=number, stream=77)
    assert [(one.device, one.stream) for one in device.launches] == [(number, 77)] * 7
    assert device.current() == number  # kernels.py sets the former one back, where it has a context


def test_a_device_that_is_not_there_is_an_error_with_cudas_name():
    for call in ("adam", "decode"):
        device = Device(ARCHS[0], interpret=False)
        with pytest.raises(RuntimeError, match="cudaErrorInvalidDevice"), device.module() as module:
            if call == "adam":
                one = rows_at([8])
                module.adam(one, tuple(HOT[0]), **vars(ADAMW), grad_scale=1.0, advance=False, device=2, stream=0)
            else:
                module.decode(BFLOAT16, FIRST_ADDRESS, FIRST_ADDRESS, 8, device=2, stream=0)
        assert device.launches == []


def test_a_refused_launch_is_an_error_with_cudas_name():
    device = Device(ARCHS[0], fails=True)
    with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure in cudaLaunchKernel"), device.module() as module:
        module.decode(BFLOAT16, FIRST_ADDRESS, FIRST_ADDRESS, 8, device=1, stream=0)
