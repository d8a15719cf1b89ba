"""The kernels as nvcc compiled them give the CPU kernel's bits, and touch nothing they should not."""

from array import array
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from statestream import _cpu
from statestream.kernels import BFLOAT16, FLOAT32, NONE, REMAINDER, Formats

from .build import ARCHS, find_nvcc
from .cases import ADAMW, ALL_FORMATS, Tensors, assert_same, on_cpu, on_device, rows_of, tensors, unit
from .device import Device

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

HOT = [
    Formats(FLOAT32, FLOAT32, FLOAT32, FLOAT32, NONE),
    Formats(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, NONE),
    Formats(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32),
    Formats(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, REMAINDER),
    Formats(FLOAT32, BFLOAT16, BFLOAT16, FLOAT32, NONE),
]

FIRST_ADDRESS = 1 << 45
"""Of tensors that are not there."""

every = pytest.mark.parametrize("formats", ALL_FORMATS, ids=unit)
hot = pytest.mark.parametrize("formats", HOT, ids=unit)


def check(group: list[Tensors], formats: Formats, device: Device, **call) -> None:
    """One update of a group on the CPU and on the device."""
    want = [one.copy() for one in group]
    on_cpu(want, formats, **call)
    on_device(group, formats, device, **call)
    assert_same(group, want)


def small_group(formats: Formats) -> list[Tensors]:
    """Heads, bodies and tails of every size, aligned, aligned after a head, and never aligned together."""
    group = [tensors(formats, n, seed=n, offsets=(n % 8,), specials=0.1) for n in range(21)]
    group += [tensors(formats, n, seed=n, offsets=(3, 3, 4, 3, 3), specials=0.1) for n in (1, 7, 8, 9, 33)]
    group += [tensors(formats, n, seed=n, offsets=(offset,)) for n, offset in ((255, 0), (256, 1), (257, 7))]
    return group


@pytest.mark.parametrize("arch", ARCHS)
@hot
def test_small_tensors(formats, arch):
    check(small_group(formats), formats, Device(arch))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@every
def test_small_tensors_of_every_combination(formats, arch):
    check(small_group(formats), formats, Device(arch, order=reversed_range))


@cache
def chunk_elements() -> int:
    """Elements of a block's piece of a tensor: what a launch with a block for each of them shows."""
    device, n = Device(ARCHS[0], multiprocessors=2**30, interpret=False), 2**34
    addresses = [FIRST_ADDRESS * k for k in range(1, 5)]
    with device.module() as module:
        step = np.zeros(1, np.float32)
        row = array("q", [n, *addresses, 0, step.ctypes.data, 0])
        module.adam(row, tuple(HOT[0]), **vars(ADAMW), grad_scale=1.0, advance=False, device=0, stream=0)
    return n // device.launches[0].grid


def reversed_range(n: int):
    return range(n - 1, -1, -1)


def chunk_edge_group(formats: Formats) -> list[Tensors]:
    chunk = chunk_elements()
    sizes = [(chunk - 1, 0), (chunk, 3), (chunk + 5, 5), (2 * chunk + 9, 0)]
    group = [tensors(formats, n, seed=n, offsets=(offset,), specials=0.02) for n, offset in sizes]
    return [*group, tensors(formats, chunk + 1, seed=1, offsets=(0, 1), specials=0.02)]


@pytest.mark.parametrize("formats", HOT[1:2], ids=unit)
def test_chunk_edges(formats):
    check(chunk_edge_group(formats), formats, Device(ARCHS[-1], multiprocessors=3))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@every
def test_chunk_edges_of_every_combination(formats, arch):
    check(chunk_edge_group(formats), formats, Device(arch, multiprocessors=3, order=reversed_range))


@pytest.mark.parametrize("formats", HOT[:2], ids=unit)
@pytest.mark.parametrize("offset", range(8))
def test_every_alignment(formats, offset):
    """Each tensor of the row off by itself, and all of them together."""
    group = [tensors(formats, 40, seed=offset, offsets=(offset,))]
    for which in range(4):
        offsets = tuple(offset if k == which else 0 for k in range(5))
        group.append(tensors(formats, 40, seed=offset, offsets=offsets))
    check(group, formats, Device(ARCHS[-1]))


@pytest.mark.parametrize(
    "options",
    [
        replace(ADAMW, decoupled=False),
        replace(ADAMW, decoupled=False, maximize=True),
        replace(ADAMW, bias_correction=False, weight_decay=0.0),
        replace(ADAMW, lr=0.1, weight_decay=0.5, eps=0.0, beta1=0.0),
    ],
    ids=["l2", "l2 maximizing", "uncorrected", "large"],
)
def test_options(options):
    group = [tensors(HOT[1], 45, seed=3, step=step, specials=0.05) for step in (0, 1, 1, 1000, 2.0**24)]
    check(group, HOT[1], Device(ARCHS[0]), options=options, grad_scale=3.0)


# ---- more elements than 32 bits count

HUGE = 2**33
CONVERTED = 2048
"""Elements of a block of a conversion: 256 threads, eight each."""


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
    mapped, n = 2 * CONVERTED, HUGE + CONVERTED
    bits = np.random.default_rng(6).integers(0, 0x7F80, mapped).astype(np.uint16)
    out = np.zeros(mapped, np.uint32)
    device = Device(ARCHS[-1], multiprocessors=2**30, order=last_blocks)
    source, result = map_the_end(device, n, [("source", bits), ("result", out)], "source")
    with device.module() as module:
        module.decode(BFLOAT16, source, result, n, device=0, stream=0)
    assert device.launches[0].block * 8 == CONVERTED
    assert (out == bits.astype(np.uint32) << 16).all()


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


def test_counters_stand_still_without_advance():
    group = [tensors(HOT[0], 9, seed=1, step=4)]
    check(group, HOT[0], Device(ARCHS[0]), advance=False)
    assert group[0].step[0] == 4


def test_every_combination_has_a_kernel_of_its_own():
    device = Device(ARCHS[0], interpret=False)
    for formats in ALL_FORMATS:
        on_device([tensors(formats, 4, seed=0)], formats, device)
    names = [launch.kernel.name for launch in device.launches]
    assert len(names) == len(ALL_FORMATS)
    assert set(names) == {name for name in device.kernels if "adam_kernel" in name}


@pytest.mark.parametrize("arch", ARCHS)
def test_eight_bfloat16_elements_take_seven_wide_accesses(arch):
    """A tensor whose pointers can be aligned together: nothing but 128-bit accesses."""
    n = 8 * 1024
    device = Device(arch)
    on_device([tensors(HOT[1], n, seed=1)], HOT[1], device)
    accesses = {o: c for o, c in device.counts.items() if o.startswith(("ld.global", "st.global"))}
    assert accesses == {"ld.global.cs.v4.u32": 4 * n // 8, "st.global.cs.v4.u32": 3 * n // 8}


# ---- capturable


def capturable(group: list[Tensors], formats: Formats, device: Device, options, lr=None, found_inf=None, **call):
    """The call with its counters, lr and found_inf in device memory; the scalars it formed there."""
    scratch = np.zeros(36 * len(group), np.uint8)
    kept: list[np.ndarray] = []  # the module is given addresses alone
    more = {"capturable": True, "scratch_address": device.add(scratch, "scratch")}
    for name, value in (("lr", lr), ("found_inf", found_inf)):
        if value is not None:
            kept.append(np.array([value], np.float32))
            more[f"{name}_address"] = device.add(kept[-1], name, writable=False)
    for k, one in enumerate(group):
        device.add(one.step, f"step of tensor {k}")
    on_device(group, formats, device, options, **more, **call)
    return scratch.reshape(-1, 36)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("formats", HOT[:2], ids=unit)
def test_a_capturable_step_is_the_same_step(formats, arch):
    group = [tensors(formats, n, seed=n, step=step, specials=0.05) for n, step in ((0, 3), (1, 0), (20, 7), (300, 0))]
    want = [one.copy() for one in group]
    options = replace(ADAMW, lr=float(np.float32(3e-4)))
    on_cpu(want, formats, options)
    capturable(group, formats, Device(arch), replace(ADAMW, lr=99.0), lr=3e-4)
    assert_same(group, want)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_scalars_formed_on_the_device_are_the_hosts(arch, decoupled):
    """To the last bit, over step counts of every size, those that float32 cannot count on among them."""
    options = replace(ADAMW, lr=2e-3, decoupled=decoupled, beta2=0.95, maximize=True)
    steps = [*range(60), *(3 ** np.arange(4, 20)).tolist(), 2.0**24, 2.0**40]
    group = [tensors(HOT[0], 1, seed=1, step=step) for step in steps]
    on_host = Device(arch, interpret=False)
    want = []
    for one in group:  # each alone: the first scalars of the launch are its own
        before = one.copy()
        on_device([before], HOT[0], on_host, options, grad_scale=7.0)
        want.append(on_host.launches[-1].params[24:57])
    got = capturable(group, HOT[0], Device(arch), options, lr=2e-3, grad_scale=7.0)
    for k, step in enumerate(steps):
        assert bytes(got[k, :33]) == want[k], f"step {step}"


@pytest.mark.parametrize("found_inf", [1.0, np.inf, np.nan])
def test_found_inf_changes_nothing(found_inf):
    group = [tensors(HOT[1], n, seed=n, step=5) for n in (3, 300)]
    want = [one.copy() for one in group]
    device = Device(ARCHS[-1])
    capturable(group, HOT[1], device, ADAMW, found_inf=found_inf)
    assert_same(group, want)
    assert len(device.launches) == 2


def test_no_found_inf_is_a_step():
    group = [tensors(HOT[1], 20, seed=2, step=5)]
    want = [one.copy() for one in group]
    on_cpu(want, HOT[1])
    capturable(group, HOT[1], Device(ARCHS[-1]), ADAMW, found_inf=0.0)
    assert_same(group, want)


def test_advancing_counters_alone():
    counters = np.arange(600, dtype=np.float32)
    counters[0] = 2.0**24
    for found_inf, added in ((None, 1), (0.0, 1), (2.0, 0)):
        device, steps = Device(ARCHS[0]), counters.copy()
        addresses = steps.ctypes.data + 4 * np.arange(600, dtype=np.int64)
        device.add(steps, "counters")
        flag = np.array([found_inf or 0.0], np.float32)
        address = 0 if found_inf is None else device.add(flag, "found_inf", writable=False)
        with device.module() as module:
            module.advance_steps(addresses, device=0, stream=0, found_inf_address=address)
        assert (steps == counters + np.float32(added)).all()


# ---- conversion

SIZES = [(n, 0) for n in (*range(18), 255, 256, 257)] + [(40, k) for k in range(1, 8)] + [(16 * CONVERTED + 3, 1)]


def convert_pair(name: str, source: np.ndarray, result: np.ndarray, code: int | None, device: Device) -> np.ndarray:
    """The CPU's result in a copy, the device's in place; the former."""
    want = result.copy()
    before, codes = source.copy(), () if code is None else (code,)
    getattr(_cpu, name)(*codes, before.ctypes.data, want.ctypes.data, source.size, threads=1)
    device.add(source, "source", writable=False)
    device.add(result, "result")
    with device.module() as module:
        getattr(module, name)(*codes, source.ctypes.data, result.ctypes.data, source.size, device=0, stream=0)
    return want


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["decode", "encode"])
@pytest.mark.parametrize("code", [FLOAT32, BFLOAT16])
def test_conversion(name, code, arch):
    for n, offset in SIZES:
        formats = Formats(code, FLOAT32, FLOAT32, FLOAT32, NONE)
        values = tensors(formats, n, seed=n, offsets=(offset, offset if n != 257 else 1), specials=0.2)
        source, result = (values.param, values.grad) if name == "decode" else (values.grad, values.param)
        want = convert_pair(name, source, result, code, Device(arch))
        assert result.tobytes() == want.tobytes(), (n, offset)


@pytest.mark.parametrize("arch", ARCHS)
def test_refreshing_masters(arch):
    for n, offset in SIZES:
        formats = Formats(BFLOAT16, FLOAT32, FLOAT32, FLOAT32, FLOAT32)
        values = tensors(formats, n, seed=n, offsets=(offset, 0, 0, 0, offset if n != 257 else 1), specials=0.1)
        values.param[::2] = (values.master[::2] >> 16).astype(np.uint16)  # half of them round to their weight
        want = convert_pair("refresh_master", values.param, values.master, None, Device(arch))
        assert values.master.tobytes() == want.tobytes(), (n, offset)


# ---- the instruments see what they are for


def test_an_element_outside_the_mapped_memory_is_noticed():
    """Guards the tests above: the same call with the last element unmapped."""
    one = tensors(HOT[0], 40, seed=1)
    device = Device(ARCHS[-1])
    for name, values in one.arrays():
        device.add(values[:-1] if name == "exp_avg" else values, name, writable=name != "grad")
    with pytest.raises(Exception, match=r"out of bounds.*exp_avg"), device.module() as module:
        module.adam(rows_of([one]), tuple(HOT[0]), **vars(ADAMW), grad_scale=1.0, advance=True, device=0, stream=0)


def test_two_rows_of_the_same_tensor_are_a_race():
    one = tensors(HOT[0], 40, seed=1)
    device = Device(ARCHS[-1])
    for name, values in one.arrays():
        device.add(values, name, writable=name != "grad")
    with pytest.raises(Exception, match="race"), device.module() as module:
        module.adam(rows_of([one, one]), tuple(HOT[0]), **vars(ADAMW), grad_scale=1.0, advance=True, device=0, stream=0)
