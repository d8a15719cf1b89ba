"""The kernels as nvcc compiled them give the CPU kernel's bits, and touch nothing they should not."""

from dataclasses import replace

import numpy as np
import pytest
from statestream import _cpu
from statestream.kernels import BFLOAT16, FLOAT32, NONE, Formats

from .build import ARCHS, find_nvcc
from .cases import (
    ADAMW,
    ALL_FORMATS,
    HOT,
    Tensors,
    assert_same,
    check,
    chunk_elements,
    on_cpu,
    on_device,
    rows_of,
    tensors,
    unit,
)
from .device import Device

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

every = pytest.mark.parametrize("formats", ALL_FORMATS, ids=unit)
hot = pytest.mark.parametrize("formats", HOT, ids=unit)


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
        replace(ADAMW, beta1=0.5, beta2=0.0),
        replace(ADAMW, beta2=0.4999, maximize=True),
    ],
    ids=["l2", "l2 maximizing", "uncorrected", "large", "beta2 of zero", "short beta2 maximizing"],
)
def test_options(options):
    group = [tensors(HOT[1], 45, seed=3, step=step, specials=0.05) for step in (0, 1, 1, 1000, 2.0**24)]
    check(group, HOT[1], Device(ARCHS[0]), options=options, grad_scale=3.0)


def test_counters_stand_still_without_advance():
    group = [tensors(HOT[0], 9, seed=1, step=4)]
    check(group, HOT[0], Device(ARCHS[0]), advance=False)
    assert group[0].step[0] == 4


@pytest.mark.parametrize("arch", ARCHS)
def test_eight_bfloat16_elements_take_seven_wide_accesses(arch):
    """A tensor whose pointers can be aligned together: nothing but 128-bit accesses."""
    n = 8 * 1024
    device = Device(arch)
    on_device([tensors(HOT[1], n, seed=1)], HOT[1], device)
    accesses = {o: c for o, c in device.counts.items() if o.startswith(("ld.global", "st.global"))}
    assert accesses == {"ld.global.cs.v4.u32": 4 * n // 8, "st.global.cs.v4.u32": 3 * n // 8}


def test_vectors_without_nan_are_spared_its_rule():
    """One NaN in every eight elements, or none: fewer instructions for none."""
    instructions = []
    for nan in (True, False):
        one = tensors(HOT[1], 2048, seed=1)
        if nan:
            one.grad[::8] = 0x7FC0
        device = Device(ARCHS[0])
        on_device([one], HOT[1], device)
        instructions.append(sum(device.counts.values()))
    with_nan, without = instructions
    assert without < with_nan - 2048


def test_a_block_finds_its_row_in_steps_that_grow_with_the_logarithm_of_the_rows():
    """Nine halvings for 512 rows and three for 8, for the first block and the last."""
    instructions = []
    for rows in (8, 512):
        device = Device(ARCHS[0], multiprocessors=1000, order=lambda n: (0, n - 1))
        on_device([tensors(HOT[0], 1, seed=k) for k in range(rows)], HOT[0], device)
        assert [launch.grid for launch in device.launches] == [rows]
        instructions.append(sum(device.counts.values()))
    few, many = instructions
    assert few < many < 2 * few


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

SIZES = [(n, 0) for n in (*range(18), 255, 256, 257)] + [(40, k) for k in range(1, 8)] + [(16 * 2048 + 3, 1)]


def convert_pair(
    name: str, source: np.ndarray, result: np.ndarray, code: int | None, device: Device, theirs=None, **more
) -> np.ndarray:
    """The CPU's result in a copy, the device's in place; the former. `theirs` are the CPU's further arguments,
    `more` the device's."""
    want = result.copy()
    before, codes = source.copy(), () if code is None else (code,)
    getattr(_cpu, name)(*codes, before.ctypes.data, want.ctypes.data, source.size, threads=1, **(theirs or {}))
    device.add(source, "source", writable=False)
    device.add(result, "result")
    with device.module() as module:
        getattr(module, name)(*codes, source.ctypes.data, result.ctypes.data, source.size, device=0, stream=0, **more)
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
