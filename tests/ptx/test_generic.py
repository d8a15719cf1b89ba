"""The generic kernel as nvcc compiled it: every kind of format, random rounding, index maps, conversions."""

from array import array
from dataclasses import replace

import numpy as np
import pytest
from statestream.formats import FORMATS, Role
from statestream.kernels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NONE,
    REMAINDER,
    SCALED_FLOAT8,
    SCALED_FLOAT16,
    Formats,
)
from statestream.tensors.global_index import WHOLE, IndexMap

from .build import ARCHS, find_nvcc
from .cases import (
    ADAMW,
    ALL_FORMATS,
    GENERIC,
    HOT,
    SCALED,
    WIDTHS,
    Tensors,
    assert_same,
    check,
    chunk_elements,
    generic_formats,
    launches_of,
    on_cpu,
    on_device,
    rows_of,
    tensors,
    unit,
)
from .device import Device
from .test_kernels import capturable, convert_pair, reversed_range
from .test_launcher import HUGE, last_blocks, map_the_end, rows_at

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

sample = pytest.mark.parametrize("formats", GENERIC, ids=unit)

MAPS = {
    "whole": (WHOLE, 0),
    "shard that begins within a group": (IndexMap(offset=2**35 + 3), 256),
    "columns": (IndexMap(size1=13, stride0=64, stride2=1, offset=5), 512),
    "whole groups of columns": (IndexMap(size1=24, stride0=64, stride2=1), 0),
    "middle level": (IndexMap(size0=24, stride0=100, stride1=1), 256),
    "experts": (IndexMap(size0=3, size1=8, stride0=4096, stride1=40, stride2=1), 256),
    "transposed": (IndexMap(size1=4, stride0=1, stride2=64), 0),
}
"""Index maps, and the number of a row's first element in its local tensor."""


def flags_taken(formats: Formats) -> int:
    """Every flag of `stochastic` that the formats take."""
    rounded = (BFLOAT16, *SCALED)
    param = formats.param == BFLOAT16 and formats.master == NONE
    return (formats.exp_avg in rounded) | (formats.exp_avg_sq in rounded) << 1 | param << 2


def group_of(formats: Formats, sizes: list[tuple[int, tuple[int, ...]]], specials: float = 0.05) -> list[Tensors]:
    """Tensors of (elements, offsets), each with a map and an ordinal of its own."""
    group = []
    for k, (n, offsets) in enumerate(sizes):
        index_map, first = list(MAPS.values())[k % len(MAPS)]
        one = tensors(formats, n, seed=n, offsets=offsets, step=k % 3, specials=specials)
        group.append(replace(one, ordinal=k * 0x10001, first=first, index_map=index_map))
    return group


def test_the_sample_has_every_format_in_every_place():
    for place, role in enumerate((Role.PARAMETER, Role.GRADIENT, Role.MOMENT, Role.MOMENT, Role.MASTER)):
        assert {f[place] for f in GENERIC} - {NONE} == {f.code for f in FORMATS if role in f.roles}


SHORT = [(n, (n % 9,)) for n in (0, 1, 7, 8, 9, 15, 16, 17, 31, 100, 255)]
BLOCKS = [(256, (0,)), (257, (1,)), (264, (0,)), (511, (0, 1)), (513, (8, 8, 8, 8, 3)), (1300, (0,))]


@pytest.mark.parametrize("arch", ARCHS)
@sample
def test_blocks_and_what_is_shorter(formats, arch):
    check(group_of(formats, SHORT + BLOCKS), formats, Device(arch), stochastic=flags_taken(formats))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("formats", [*generic_formats(), *ALL_FORMATS], ids=unit)
def test_every_combination(formats, arch):
    for stochastic in {0, flags_taken(formats)}:
        device = Device(arch, order=reversed_range)
        check(group_of(formats, SHORT + BLOCKS), formats, device, stochastic=stochastic)


@pytest.mark.parametrize("stochastic", range(1, 8))
def test_each_flag_of_a_hot_combination(stochastic):
    check(group_of(HOT[1], [(300, (3,)), (9, (0, 1))]), HOT[1], Device(ARCHS[0]), stochastic=stochastic)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MAPS)
def test_index_maps(name, arch):
    formats = Formats(BFLOAT16, BFLOAT16, BFLOAT16, SCALED_FLOAT8, NONE)
    index_map, first = MAPS[name]
    one = replace(tensors(formats, 520, seed=1), ordinal=2**32 - 1, first=first, index_map=index_map)
    check([one], formats, Device(arch), stochastic=7)


def test_chunk_edges():
    formats = GENERIC[0]
    chunk = chunk_elements(formats)
    sizes = [(chunk - 1, (0,)), (chunk, (3,)), (chunk + 5, (5,)), (2 * chunk + 9, (0,)), (chunk + 1, (0, 1))]
    check(group_of(formats, sizes), formats, Device(ARCHS[-1], multiprocessors=3))


@pytest.mark.parametrize("formats", GENERIC[:2], ids=unit)
@pytest.mark.parametrize("offset", range(1, 16, 3))
def test_alignments(formats, offset):
    """Each tensor of the row off by itself, and all of them together."""
    sizes = [(264, (offset,))]
    sizes += [(264, tuple(offset if k == which else 0 for k in range(5))) for which in range(4)]
    check(group_of(formats, sizes), formats, Device(ARCHS[-1]))


@pytest.mark.parametrize("formats", [*GENERIC, HOT[1]], ids=unit)
def test_aligned_elements_take_one_access_a_stream(formats):
    """Of 64 or 128 bits, two where eight elements have 256; and one lane of a warp reads and writes a scale."""
    n = 8 * 256
    device = Device(ARCHS[0])
    on_device([tensors(formats, n, seed=1)], formats, device, stochastic=flags_taken(formats))
    width = {NONE: 0, **WIDTHS}
    loaded = [formats.grad, formats.exp_avg, formats.exp_avg_sq, formats.master or formats.param]
    stored = [formats.param, formats.exp_avg, formats.exp_avg_sq, formats.master]
    if formats.master == REMAINDER:
        loaded.append(formats.param)
    scales = sum(code in SCALED for code in formats)
    for kind, streams in (("ld", loaded), ("st", stored)):
        bits = [8 * width[code] * 8 for code in streams]
        counted = {o: c for o, c in device.counts.items() if of_global_memory(kind, o)}
        wide = sum(c for o, c in counted.items() if o.endswith("cs.v4.u32"))
        assert wide == sum(b // 128 for b in bits if b >= 128) * n // 8, (kind, counted)
        assert sum(c for o, c in counted.items() if o.endswith("cs.v2.u32")) == bits.count(64) * n // 8
        assert sum(counted.values()) - wide - bits.count(64) * n // 8 == scales * n // 256, (kind, counted)


INSTRUCTIONS = {
    "bf16-bf16-scaled_fp8-scaled_fp8": 124,
    "bf16+scaled_fp16-bf16-scaled_fp16-scaled_fp16": 124,
    "fp16+fp32-fp16-scaled_fp8-scaled_fp16": 138,
    "fp32-fp16-fp32-scaled_fp8": 96,
    "bf16+remainders-fp32-scaled_fp8-bf16": 96,
    "fp16+scaled_fp16-fp32-bf16-fp32": 83,
    "bf16-bf16-bf16-bf16": 113,
}
"""An element, of aligned tensors of ordinary numbers with every flag; but for moves and branches, of which the
assembler leaves few, and for loads of parameters."""


@pytest.mark.parametrize("formats", [*GENERIC, HOT[1]], ids=unit)
def test_instructions_an_element(formats):
    n = 8 * 1024
    device = Device(ARCHS[-1])
    on_device([tensors(formats, n, seed=1)], formats, device, stochastic=flags_taken(formats) if formats in HOT else 0)
    counted = sum(c for o, c in device.counts.items() if not o.startswith(("mov.", "bra", "ld.param")))
    assert counted / n <= INSTRUCTIONS[unit(formats)]


def of_global_memory(kind: str, opcode: str) -> bool:
    """Whether an opcode loads or stores global memory, by whatever address."""
    return opcode.startswith(f"{kind}.") and not opcode.startswith((f"{kind}.param", f"{kind}.shared"))


@pytest.mark.parametrize(
    "options",
    [
        replace(ADAMW, decoupled=False, maximize=True),
        replace(ADAMW, bias_correction=False, weight_decay=0.0),
        replace(ADAMW, lr=0.1, weight_decay=0.5, eps=0.0, beta1=0.0),
        replace(ADAMW, beta2=0.4999),
    ],
    ids=["l2 maximizing", "uncorrected", "large", "short beta2"],
)
def test_options(options):
    group = group_of(GENERIC[0], [(45, (0,)), (270, (0,)), (3, (0,))])
    check(group, GENERIC[0], Device(ARCHS[0]), options=options, grad_scale=3.0)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_seeds(seed):
    check(group_of(GENERIC[0], [(300, (0,))]), GENERIC[0], Device(ARCHS[0]), seed=seed)


# ---- capturable


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("formats", GENERIC[:2], ids=unit)
def test_a_capturable_step_is_the_same_step(formats, arch):
    """Its random bits too: they hang on the counter, which only the device knows."""
    sizes = [(0, (0,)), (1, (0,)), (20, (0,)), (300, (3,))]
    group = [replace(one, step=np.array([k], np.float32)) for k, one in enumerate(group_of(formats, sizes))]
    want = [one.copy() for one in group]
    options, flags = replace(ADAMW, lr=float(np.float32(3e-4))), flags_taken(formats)
    on_cpu(want, formats, options, stochastic=flags)
    capturable(group, formats, Device(arch), replace(ADAMW, lr=99.0), lr=3e-4, stochastic=flags)
    assert_same(group, want)


def test_found_inf_changes_nothing():
    group = group_of(GENERIC[1], [(3, (0,)), (300, (0,))])
    want = [one.copy() for one in group]
    device = Device(ARCHS[-1])
    capturable(group, GENERIC[1], device, ADAMW, found_inf=np.inf)
    assert_same(group, want)
    assert len(device.launches) == 2


# ---- conversion


def convert(what: str, code: int, n: int, offset: int, root: bool, arch: int) -> None:
    formats = Formats(FLOAT32, FLOAT32, NONE if root else code, code if root else NONE, NONE)
    values = tensors(formats, n, seed=n, offsets=(offset, offset + n % 2), specials=0.1)
    stored, scale = (values.exp_avg_sq, values.exp_avg_sq_scale) if root else (values.exp_avg, values.exp_avg_scale)
    arrays = (stored, values.grad) if what == "decode" else (values.grad, stored)
    device, before = Device(arch), scale.copy()
    device.add(scale, "scale", writable=what == "encode")
    more = {"scale": scale.ctypes.data, "root": root}
    want = convert_pair(what, *arrays, code, device, theirs={**more, "scale": before.ctypes.data}, **more)
    assert arrays[1].tobytes() == want.tobytes(), (n, offset)
    assert scale.tobytes() == before.tobytes(), (n, offset)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("root", [False, True], ids=["values", "roots"])
@pytest.mark.parametrize("code", SCALED, ids=str)
@pytest.mark.parametrize("what", ["decode", "encode"])
def test_conversion(what, code, root, arch):
    for n, offset in [(n, n % 5) for n in (0, 1, 7, 8, 9, 40, 255, 257)] + [(256, 0), (1291, 1), (1288, 0)]:
        convert(what, code, n, offset, root, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("param, master", [(FLOAT16, FLOAT32), (BFLOAT16, SCALED_FLOAT16), (FLOAT16, SCALED_FLOAT16)])
def test_refreshing_masters(param, master, arch):
    formats = Formats(param, FLOAT32, FLOAT32, FLOAT32, master)
    for n, offset, specials in [(1, 0, 0.1), (9, 1, 0.1), (256, 0, 0.1), (700, 0, 0.1), (700, 3, 0.1), (700, 0, 0.0)]:
        one = tensors(formats, n, seed=n, offsets=(offset,), specials=specials)
        # The first block's parameters are their masters rounded, as after a step; some others are too.
        stepped = one.copy()
        on_cpu([stepped], formats)
        one.param[:], one.master[:] = stepped.param, stepped.master
        if one.master_scale is not None:
            one.master_scale[:] = stepped.master_scale
        one.param[256:512:3] ^= 0x11
        one.param[512:513] = 0x4780  # one lane's alone, and large: without specials the block has a new scale
        device, more, theirs = Device(arch), {"param_format": param, "master_format": master}, {}
        if one.master_scale is not None:
            before = one.master_scale.copy()
            more["scale"] = device.add(one.master_scale, "scale")
            theirs["scale"] = before.ctypes.data
        want = convert_pair("refresh_master", one.param, one.master, None, device, theirs={**more, **theirs}, **more)
        assert one.master.tobytes() == want.tobytes(), (n, offset)
        if one.master_scale is not None:
            assert one.master_scale.tobytes() == before.tobytes(), (n, offset)


# ---- the launcher


def test_more_tensors_than_a_launch_holds():
    """Empty ones among them cost nothing."""
    formats = GENERIC[0]
    group = [tensors(formats, k % 10 and 1, seed=k, step=k % 7) for k in range(180)]
    device = Device(ARCHS[-1], multiprocessors=16)
    check(group, formats, device)
    assert len(device.launches) == 2 and device.launches[0].grid == 16


def test_the_chunks_of_a_launch_are_counted_in_31_bits():
    formats = Formats(FLOAT16, FLOAT16, FLOAT32, FLOAT32, NONE)
    quarter = 2**29 * chunk_elements(formats)
    assert len(launches_of(rows_at([quarter] * 3), formats)) == 1
    assert len(launches_of(rows_at([quarter] * 4), formats)) == 2
    with pytest.raises(ValueError, match="more elements"):
        launches_of(rows_at([4 * quarter], np.zeros(1, np.float32)), formats)


def test_indices_have_64_bits():
    """Of elements, of scales, and of the whole tensor."""
    formats = GENERIC[0]
    chunk = chunk_elements(formats)
    mapped, n = chunk + 13, HUGE + chunk + 13  # what the last two blocks have
    one = replace(tensors(formats, mapped, seed=5, step=2), ordinal=7, first=HUGE)
    want = [one.copy()]
    on_cpu(want, formats)
    device = Device(ARCHS[-1], multiprocessors=2**30, order=last_blocks)
    arrays = [(name, values) for name, values in one.arrays() if name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    row = [n, *map_the_end(device, n, arrays, "grad"), 0, one.step.ctypes.data, 0]
    extras = one.extras()
    for k, scale in enumerate((one.exp_avg_scale, one.exp_avg_sq_scale)):
        extras[k] = 2**50 * (k + 1)
        device.add(scale, f"scale {k}", base=extras[k] + HUGE // 256 * 4)
    extras[4] = 0
    options = {**vars(ADAMW), "grad_scale": 1.0, "advance": True, "seed": 0x123456789ABCDEF0}
    with device.module() as module:
        module.adam(array("q", row), tuple(formats), extras=array("q", extras), **options, device=0, stream=0)
    assert_same([one], want)


# ---- the instruments see what they are for


def test_a_scale_that_another_block_reads_is_a_race():
    """Two rows that share scales: the second block's would be read as the first's is written."""
    formats = GENERIC[0]
    one, other = tensors(formats, 40, seed=1), tensors(formats, 40, seed=2)
    other = replace(other, exp_avg_scale=one.exp_avg_scale)
    device = Device(ARCHS[-1])
    for k, each in enumerate((one, other)):
        for name, values in each.arrays():
            if name != "step" and not (k and name == "exp_avg_scale"):
                device.add(values, f"{name} {k}", writable=name != "grad")
    call = {**vars(ADAMW), "grad_scale": 1.0, "advance": True, "device": 0, "stream": 0}
    extras = array("q", [*one.extras(), *other.extras()])
    with pytest.raises(Exception, match="race"), device.module() as module:
        module.adam(rows_of([one, other]), tuple(formats), extras=extras, **call)
