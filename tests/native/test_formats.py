"""The table of formats: against what torch and the exports say of each, and against its users."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from statestream import FusedAdam, _cpu, kernels
from statestream.formats import (
    FORMATS,
    REMAINDERS,
    SCALE_BLOCK,
    Role,
    dtypes_of,
    format_of,
    format_of_state,
    formats_of,
    plain_name,
    scale_count,
)

STATES = [f for f in FORMATS if f.roles & {Role.MOMENT, Role.MASTER}]


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.name}-{f.code}")
def test_an_element_has_the_bytes_that_torch_says(form):
    assert form.itemsize == torch.empty(0, dtype=form.dtype).element_size()
    assert form.exported_itemsize == torch.empty(0, dtype=form.exported).element_size()
    for elements, scales in ((0, 0), (1, 1), (SCALE_BLOCK, 1), (SCALE_BLOCK + 1, 2)):
        assert form.nbytes(elements) == elements * form.itemsize + 4 * scales * form.scaled


NATIVE_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.MOMENT, Role.MASTER)
"""In the order of FORMATS of the native modules."""


def as_native(table) -> set[tuple[object, ...]]:
    return {(f.code, f.itemsize, f.scaled, *(role in f.roles for role in NATIVE_ROLES)) for f in table}


def test_native_code_has_the_same_table():
    assert {row[1:] for row in _cpu.FORMATS} == as_native(FORMATS)
    assert len(_cpu.FORMATS) == len(FORMATS)


def test_control_a_format_that_one_of_the_two_lacks_or_has_otherwise_is_seen():
    for i, form in enumerate(FORMATS):
        others = [*FORMATS[:i], *FORMATS[i + 1 :]]
        for changed in (others, [*others, replace(form, itemsize=8)], [*others, replace(form, roles=frozenset())]):
            assert {row[1:] for row in _cpu.FORMATS} != as_native(changed)


def gathered(param: torch.nn.Parameter, **arguments) -> tuple[FusedAdam, kernels.Formats]:
    """An optimizer after a step, and the formats that native code finds of its one parameter."""
    optimizer = FusedAdam([param], **arguments)
    param.grad = torch.ones_like(param)
    optimizer.step()
    state_format = optimizer.state_format
    found, left = kernels.gather(
        [param],
        "grad",
        optimizer.state,
        exp_avg=state_format.exp_avg,
        exp_avg_sq=state_format.exp_avg_sq,
        masters={param.dtype: state_format.master_of(param.dtype)},
        step_on_device=False,
        scales=optimizer.backend.scales,
        sharded=False,
        extras=False,
        first_ordinal=0,
    )
    assert left == [] and len(found) == 1, "a format that native code does not know by its dtype takes the slow way"
    return optimizer, found[0].formats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_native_code_takes_the_masters_that_state_has(dtype):
    """By what the optimizer keeps: whatever a parameter's master is stored in, no parameter needs a closer look."""
    for masters in ({}, {"master_weights": True}, {"master_weights": True, "store_param_remainders": True}):
        param = torch.nn.Parameter(torch.ones(300, dtype=dtype))
        optimizer, formats = gathered(param, **masters)
        kept = optimizer.state[param].get("master_param")
        assert formats.master == (0 if kept is None else format_of_state(kept.dtype).code)


@pytest.mark.parametrize("form", [f for f in FORMATS if Role.MOMENT in f.roles], ids=lambda f: f.name)
def test_native_code_takes_the_moments_that_state_has(form):
    param = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    _, formats = gathered(param, exp_avg_dtype=form.name, exp_avg_sq_dtype=form.name)
    assert (formats.exp_avg, formats.exp_avg_sq) == (form.code, form.code)


def test_names_codes_and_dtypes_tell_formats_apart():
    assert len({f.code for f in FORMATS}) == len(FORMATS) and 0 not in {f.code for f in FORMATS}
    for role in Role:
        formats = [f for f in FORMATS if role in f.roles]
        assert list(formats_of(role).values()) == formats, "two of one name"
        assert len(set(dtypes_of(role))) == len(formats)
        assert [format_of(role, f.dtype) for f in formats] == formats
    assert [format_of_state(f.dtype) for f in STATES] == STATES


@pytest.mark.parametrize("role", Role)
def test_a_dtype_that_has_no_format_is_a_key_error(role):
    with pytest.raises(KeyError):
        format_of(role, torch.float64)


@pytest.mark.parametrize("name", sorted({f.name for f in FORMATS if f is not REMAINDERS}))
def test_however_it_is_spelled_it_is_one(name):
    (dtype,) = {f.dtype for f in FORMATS if f.name == name}
    spellings = [name, name.upper(), f" {name} ", dtype, str(dtype), str(dtype).removeprefix("torch.")]
    assert {plain_name(s) for s in spellings} == {name}


@pytest.mark.parametrize("form", [f for f in FORMATS if Role.MOMENT in f.roles], ids=lambda f: f.name)
def test_a_moment_is_stored_and_exported_as_the_table_says(form):
    """From the optimizer itself: what it keeps, and what its checkpoint has."""
    param = torch.nn.Parameter(torch.ones(SCALE_BLOCK + 3, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], exp_avg_dtype=form.name, exp_avg_sq_dtype=form.name)
    param.grad = torch.ones_like(param)
    optimizer.step()
    kept, saved = optimizer.state[param], optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert kept[name].dtype is form.dtype and saved[name].dtype is form.exported
    report = optimizer.memory_report()
    held = sum(n for kind, n in {**report.device, **report.host}.items() if kind.startswith("exp_avg"))
    assert held == 2 * form.nbytes(param.numel())


@pytest.mark.parametrize("form", [f for f in FORMATS if f.scaled], ids=lambda f: f"{f.name}-{f.itemsize}")
def test_payloads_are_the_numbers_that_torch_makes(form):
    """Every payload, and values of every size, those that are not finite among them."""
    number = torch.float8_e4m3fn if form.dtype is torch.uint8 else form.dtype
    bits = {1: torch.uint8, 2: torch.int16}[form.itemsize]

    def as_bits(values: torch.Tensor) -> torch.Tensor:
        return torch.where(values.isnan(), float("nan"), values).view(torch.int32)

    every = torch.arange(1 << 8 * form.itemsize).to(bits).view(form.dtype)
    values = torch.empty(every.shape)
    kernels.decode(every, values, scale=torch.ones(scale_count(values.numel())))
    assert torch.equal(as_bits(values), as_bits(every.view(number).float()))
    kernels.decode(every, values, scale=torch.ones(scale_count(values.numel())), root=True)
    assert torch.equal(as_bits(values), as_bits(every.view(number).float().square()))

    blocks = torch.logspace(-30, 37, 300).float().unsqueeze(1)
    values = torch.randn(300, SCALE_BLOCK, generator=torch.Generator().manual_seed(0)) * blocks
    values[7, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    stored, scale = torch.empty(values.numel(), dtype=form.dtype), torch.empty(300)
    kernels.encode(values.flatten(), stored, scale=scale)
    want = (values / scale.unsqueeze(1)).to(number).float()
    if number is torch.float8_e4m3fn:  # it has no infinity: torch stores its largest number, and statestream NaN
        want[values.isinf()] = float("nan")
    assert torch.equal(as_bits(stored.view(number).float()), as_bits(want.flatten()))
    largest = stored.view(number).float().view(300, -1).nan_to_num(0, 0, 0).abs().amax(1)
    assert (largest >= torch.finfo(number).max / 2).all(), "a scale that is not the smallest"
    exact = torch.empty(values.numel())
    kernels.decode(stored, exact, scale=scale)
    assert torch.equal(as_bits(exact), as_bits((want * scale.unsqueeze(1)).flatten()))


def test_the_table_needs_no_torch():
    """A plan of numbers in a config answers without it."""
    code = "import statestream.formats, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
