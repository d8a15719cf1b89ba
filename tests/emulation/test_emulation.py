"""The CUDA kernels and launchers, as C++ under AddressSanitizer and UBSan, against the CPU kernel."""

from itertools import product
from zlib import crc32

import pytest
from statestream.formats import FORMATS as TABLE
from statestream.formats import Role

from .emulator import compiler, run
from .pairwise import all_pairs

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="the emulation of the CUDA kernels needs g++"),
    pytest.mark.timeout(600),
]

NAMES = {"0": "none"} | {str(f.code): f"scaled_{f.name}" if f.scaled else f.name for f in TABLE}
MOMENTS = [str(f.code) for f in TABLE if Role.MOMENT in f.roles]
SCALED = [str(f.code) for f in TABLE if f.scaled]
FORMATS = [
    ",".join(["1" if weight == "1" else "2", *rest, "0" if weight in "1" else weight.strip("p")])
    for weight, *rest in product(["1", "0p", "1p", "3p"], "12", "12", "12")
]
"""Format codes of param, grad, exp_avg, exp_avg_sq and master: every combination that has a kernel of its own."""

WEIGHTS = ["1,0", "2,0", "2,1", "2,3", "2,5", "4,0", "4,1", "4,5"]
"""Codes of param and master."""
GENERIC = [
    formats
    for weight, *rest in product(WEIGHTS, "124", MOMENTS, MOMENTS)
    if (formats := ",".join([weight[0], *rest, weight[2]])) not in FORMATS
]
"""The combinations that the generic kernel serves."""

MODES = {
    "host": "",
    "keep_steps": "advance=0",
    "capturable": "capturable=1",
    "capturable_keep_steps": "capturable=1 advance=0",
    "scalars_on_device": "capturable=1 scalars_on_device=1",
    "found_inf": "capturable=1 scalars_on_device=1 skip=1",
}
SHAPE = {
    "lengths": ["short", "chunk", "many"],
    "offsets": ["aligned", "together", "varied", "apart"],
    "order": ["forward", "reverse", "shuffled"],
    "values": ["ordinary", "any_bits", "zero_rows"],
    "mode": list(MODES),
}
SETTINGS = {
    "steps": ["same", "different"],
    "betas": ["long", "first", "second"],
    "l2": ["0", "1"],
    "maximize": ["0", "1"],
    "bias_correction": ["0", "1"],
    "grad_scale": ["1", "1024"],
    "multiprocessors": ["1", "3", "1000"],
}


def line(case: dict[str, str], seed: int) -> str:
    words = [f"{k}={v}" for k, v in case.items() if k != "mode"]
    return " ".join(["adam", *words, MODES[case["mode"]], f"seed={seed}"])


def name_of(formats: str) -> str:
    return "-".join(NAMES[code] for code in formats.split(","))


PAIRS = all_pairs({"formats": FORMATS, **SHAPE, **SETTINGS}, seed=1)


@pytest.mark.parametrize("formats", FORMATS, ids=name_of)
def test_adam_has_the_cpu_kernels_bits(formats):
    chosen = [(case, seed) for seed, case in enumerate(PAIRS) if case["formats"] == formats]
    for factor, values in {**SHAPE, **SETTINGS}.items():
        assert {case[factor] for case, _ in chosen} == set(values)
    cases = [line(case, seed) for case, seed in chosen]
    assert [o for o in run(cases) if o.difference != "ok"] == []


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("formats", FORMATS, ids=name_of)
def test_adam_has_the_cpu_kernels_bits_in_every_combination(formats):
    others = all_pairs(SETTINGS, seed=2)
    cases = [
        line({"formats": formats, **dict(zip(SHAPE, shape, strict=True)), **others[i % len(others)]}, seed=i)
        for i, shape in enumerate(product(*SHAPE.values()))
    ]
    assert [o for o in run(cases) if o.difference != "ok"] == []


GENERIC_SHAPE = {**SHAPE, "lengths": ["short", "blocks", "pieces", "many"]}
GENERIC_SETTINGS = {
    **SETTINGS,
    "map": ["whole", "offset", "columns", "middle", "experts", "transposed"],
    "stochastic": [str(flags) for flags in range(8)],
}
GENERIC_PAIRS = all_pairs(
    {"weight": WEIGHTS, "grad": "124", "exp_avg": MOMENTS, "exp_avg_sq": MOMENTS, **GENERIC_SHAPE, **GENERIC_SETTINGS},
    seed=4,
)


def generic_line(case: dict[str, str], seed: int) -> str:
    case = dict(case)
    weight, *rest = (case.pop(name) for name in ("weight", "grad", "exp_avg", "exp_avg_sq"))
    return line({"formats": ",".join([weight[0], *rest, weight[2]]), **case}, seed)


@pytest.mark.parametrize("mode", list(MODES))
def test_the_generic_kernel_has_the_cpu_kernels_bits(mode):
    """Every pair of formats, of shapes, of settings."""
    cases = [generic_line(case, seed) for seed, case in enumerate(GENERIC_PAIRS) if case["mode"] == mode]
    assert [o for o in run(cases) if o.difference != "ok"] == []


@pytest.mark.parametrize("one_in", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_generic_kernel_serves_every_combination(weight, one_in):
    others = all_pairs({k: v for k, v in {**GENERIC_SHAPE, **GENERIC_SETTINGS}.items() if k != "lengths"}, seed=5)
    cases = [
        line({"formats": formats, "lengths": "blocks", **others[i % len(others)]}, seed=i)
        for i, formats in enumerate(GENERIC)
        if f"{formats[0]},{formats[-1]}" == weight and crc32(formats.encode()) % one_in == 0
    ]
    assert [o for o in run(cases) if o.difference != "ok"] == []


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_generic_kernel_serves_every_combination_in_every_shape(weight):
    others = all_pairs(GENERIC_SETTINGS, seed=6)
    chosen = [f for f in [*FORMATS, *GENERIC] if f"{f[0]},{f[-1]}" == weight]
    cases = [
        line({"formats": formats, **dict(zip(GENERIC_SHAPE, shape, strict=True)), **others[i % len(others)]}, seed=i)
        for i, (formats, shape) in enumerate(product(chosen, product(*GENERIC_SHAPE.values())))
    ]
    assert [o for o in run(cases) if o.difference != "ok"] == []


@pytest.mark.parametrize(
    "offsets", [(0, 1, 3, 6, 8), pytest.param(range(9), marks=pytest.mark.long)], ids=["some offsets", "every offset"]
)
@pytest.mark.parametrize(
    "what",
    [
        *(f"{what} format={code}" for what in ("decode", "encode") for code in MOMENTS),
        *(f"{what} format={code} root=1" for what in ("decode", "encode") for code in SCALED),
        *(f"refresh_master param_format={param} format={master}" for param in (2, 4) for master in (1, 5)),
    ],
)
def test_conversions_have_the_cpu_kernels_bits(what, offsets):
    factors = {
        "from_offset": list(map(str, offsets)),
        "to_offset": list(map(str, offsets)),
        "order": SHAPE["order"],
        "values": ["ordinary", "any_bits"],
        "multiprocessors": ["1", "1000"],
    }
    cases = [
        " ".join([f"convert what={what} seed={seed}", *(f"{k}={v}" for k, v in case.items())])
        for seed, case in enumerate(all_pairs(factors, seed=3))
    ]
    assert [o for o in run(cases) if o.difference != "ok"] == []


@pytest.mark.parametrize("elements", [(1 << 31) + 8192 * 3 + 7, (1 << 32) + 8192 * 5 + 13])
def test_a_tensor_may_have_more_elements_than_32_bits_count(elements):
    (outcome,) = run([f"huge elements={elements}"])
    assert outcome.difference == "ok"
    assert outcome.threads >= 4 * 128


def test_a_thousand_tensors_take_two_launches():
    same, different, capturable = run(
        [
            "adam formats=2,2,2,2,0 lengths=many",
            "adam formats=2,2,2,2,0 lengths=many steps=different",
            "adam formats=2,2,2,2,0 lengths=many steps=different capturable=1",
        ]
    )
    assert same.launches == 3  # 1,300 tensors, 512 a launch
    assert different.launches <= 15  # 100 different step counts a launch
    assert capturable.launches == 4  # one of them for the counters


def test_tensors_without_elements_cost_nothing():
    host, capturable = run(
        ["adam formats=2,2,2,2,0 lengths=empty", "adam formats=2,2,2,2,0 lengths=empty capturable=1"]
    )
    assert (host.difference, host.launches) == ("ok", 0)
    assert (capturable.difference, capturable.launches) == ("ok", 1)  # their counters are counted


def test_aligned_tensors_take_128_bit_accesses():
    """All BF16: four loads and three stores for eight elements, however the tensors are shifted together."""
    aligned, together, apart = run(
        [f"adam formats=2,2,2,2,0 lengths=chunk offsets={offsets}" for offsets in ("aligned", "together", "apart")]
    )
    lengths = [n + d for n in (8192, 16384, 65536) for d in (-9, -8, -1, 0, 1, 7, 8, 9)]
    assert (aligned.wide_loads, aligned.wide_stores) == (
        4 * sum(n // 8 for n in lengths),
        3 * sum(n // 8 for n in lengths),
    )
    assert together.wide_loads > 0.99 * aligned.wide_loads
    assert apart.wide_loads == 0


@pytest.mark.parametrize("order", SHAPE["order"])
@pytest.mark.parametrize(
    "kernel, outcome",
    [
        ("rounds", "ok"),
        ("halves", "ok"),
        ("lane_ends", "waits for lane 8 of warp 1, which has ended"),
        ("other_mask", "wait at different places"),
        ("not_in_mask", "lane 0 of warp 0 is not in its own mask"),
        ("other_place", "wait at different places"),
    ],
)
def test_lanes_of_a_warp_meet_or_are_told_why_not(kernel, outcome, order):
    (seen,) = run([f"warps kernel={kernel} order={order}"])
    assert outcome in seen.difference


@pytest.mark.parametrize(
    "case, sentence",
    [
        ("device=0", "ok"),
        ("count_error=35 driver=12040", "the NVIDIA driver serves CUDA 12.4 and statestream was built for CUDA 13.0"),
        ("count_error=35 driver=0", "there is no NVIDIA driver"),
        ("count_error=100", "cudaErrorNoDevice"),
        ("image_error=222 driver=13000", "update the driver"),
        ("image_error=200 driver=12020", "serves CUDA 12.2 and statestream was built for CUDA 13.0: update the driver"),
        ("image_error=200", "cudaErrorInvalidKernelImage"),
        ("driver=12000", "serves CUDA 12.0, and the kernels' parameters need 12.1: update the driver to 530 or later"),
        ("driver=12010", "ok"),
        ("image_error=209 capability=75", "its compute capability is 7.5, and statestream needs 8.0 or later"),
        ("image_error=209 capability=130", "build it with STATESTREAM_CUDA_ARCHS=130"),
        ("image_error=98 capability=130", "cudaErrorInvalidDeviceFunction"),
        ("device=1", "CUDA sees 1 devices"),
    ],
)
def test_a_device_that_cannot_run_is_told_why(case, sentence):
    (outcome,) = run([f"why_not {case}"])
    assert sentence in outcome.difference
