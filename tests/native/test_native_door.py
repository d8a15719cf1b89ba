"""What native code refuses, by ValueError, before it reads or writes an address."""

from __future__ import annotations

from array import array
from ctypes import c_void_p

import pytest
import torch
from statestream import _cpu, kernels

from native.kernel_runner import (
    ADAMW,
    ALL_BF16,
    ALL_F32,
    BF16,
    F32,
    I16,
    Dtypes,
    State,
    assert_same_bits,
    random_values,
    update,
)

REMAINDERS = Dtypes(BF16, BF16, F32, BF16, I16)
NUMEL, PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, STEP = range(7)
WORDS = kernels.ROW_WORDS


def rows_of(states: list[State]) -> array:
    rows = array("q")
    for s in states:
        rows.extend(kernels.row(s.param, s.grad, s.exp_avg, s.exp_avg_sq, s.master, s.step))
    return rows


def call(rows, formats=REMAINDERS.formats, *, threads: int = 1) -> None:
    _cpu.adam(
        rows,
        tuple(formats),
        lr=ADAMW.lr,
        beta1=ADAMW.beta1,
        beta2=ADAMW.beta2,
        eps=ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
        decoupled=True,
        bias_correction=True,
        maximize=False,
        grad_scale=1.0,
        advance=True,
        threads=threads,
    )


@pytest.fixture
def two_rows():
    """Rows of two parameters; whatever is refused about the second must not have touched the first."""
    states = [State.of(random_values(n, seed=n), REMAINDERS, step=3) for n in (40, 70)]
    before = [s.clone() for s in states]
    yield rows_of(states)
    for state, untouched in zip(states, before, strict=True):
        assert_same_bits(state, untouched)
    # And it goes on working.
    update(states, REMAINDERS)
    assert [s.step.item() for s in states] == [4, 4]


def test_the_door_lets_a_good_table_through():
    state = State.of(random_values(40, seed=1), REMAINDERS)
    call(rows_of([state]))
    assert state.step.item() == 1


@pytest.mark.parametrize("word", [PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, STEP])
def test_a_null_address_is_refused_and_its_row_named(word, two_rows):
    two_rows[WORDS + word] = 0
    with pytest.raises(ValueError, match=r"row 1.*null"):
        call(two_rows)


@pytest.mark.parametrize(
    "word, off", [(PARAM, 1), (GRAD, 1), (EXP_AVG, 1), (EXP_AVG, 2), (EXP_AVG_SQ, 1), (MASTER, 1), (STEP, 2)]
)
def test_a_misaligned_address_is_refused_and_its_row_named(word, off, two_rows):
    two_rows[WORDS + word] += off
    with pytest.raises(ValueError, match=r"row 1.*aligned"):
        call(two_rows)


@pytest.mark.parametrize("numel", [-1, -(2**63)])
def test_a_negative_count_is_refused(numel, two_rows):
    two_rows[WORDS + NUMEL] = numel
    with pytest.raises(ValueError, match=r"row 1.*negative"):
        call(two_rows)


@pytest.mark.parametrize("numel", [2**63 - 1, 2**62])
def test_a_count_past_the_end_of_the_address_space_is_refused(numel, two_rows):
    two_rows[WORDS + NUMEL] = numel
    with pytest.raises(ValueError, match=r"row 1.*address space"):
        call(two_rows)


@pytest.mark.parametrize("numel", [2**62, 2**57, 2**56 + 1])
def test_a_count_that_no_address_space_holds_is_refused_at_any_address(numel):
    state = State.of(random_values(40, seed=4), ALL_BF16, step=3)
    before = state.clone()
    rows = rows_of([state])
    rows[NUMEL] = numel
    rows[PARAM] = rows[GRAD] = rows[EXP_AVG] = rows[EXP_AVG_SQ] = 64
    with pytest.raises(ValueError, match=r"row 0: param.*address space"):
        call(rows, ALL_BF16.formats)
    assert_same_bits(state, before)


@pytest.mark.parametrize("change", [lambda r: r[:-1], lambda r: r[:3], lambda r: r + array("q", [0])])
def test_a_table_of_broken_rows_is_refused(change, two_rows):
    with pytest.raises(ValueError, match="eight a row"):
        call(change(two_rows))


@pytest.mark.parametrize(
    "make",
    [
        lambda r: array("i", [0] * 16),
        lambda r: array("d", [0.0] * 16),
        lambda r: (c_void_p * 16)(),
        lambda r: bytes(128),
        lambda r: memoryview(r)[::2],
        lambda r: memoryview(r).cast("B").cast("q", (2, 8)),
    ],
    ids=["32-bit words", "float64", "pointers", "bytes", "strided", "two-dimensional"],
)
def test_a_buffer_of_another_layout_is_refused(make, two_rows):
    with pytest.raises(ValueError, match="64-bit"):
        call(make(two_rows))


@pytest.mark.parametrize(
    "formats",
    [
        (),
        (1, 1, 1, 1),
        (1, 1, 1, 1, 0, 0),
        (0, 1, 1, 1, 0),
        (1, 0, 1, 1, 0),
        (3, 1, 1, 1, 0),
        (2, 3, 1, 1, 0),
        (2, 2, 3, 2, 3),
        (2, 2, 2, 2, 2),
        (1, 1, 1, 1, 1),
        (1, 1, 1, 1, 3),
        (99, 1, 1, 1, 0),
        (1, 1, 1, 1, -1),
        (2**31 - 1,) * 5,
    ],
    ids=str,
)
def test_formats_without_a_kernel_are_refused(formats, two_rows):
    with pytest.raises(ValueError, match="formats"):
        call(two_rows, formats)


@pytest.mark.parametrize("threads", [0, -1, 4097, 2**31 - 1, -(2**31)])
def test_a_thread_count_out_of_range_is_refused(threads, two_rows):
    with pytest.raises(ValueError, match="threads"):
        call(two_rows, threads=threads)
    values = torch.ones(8)
    stored = torch.zeros(8, dtype=BF16)
    with pytest.raises(ValueError, match="threads"):
        _cpu.encode(kernels.BFLOAT16, values.data_ptr(), stored.data_ptr(), 8, threads)
    with pytest.raises(ValueError, match="threads"):
        _cpu.decode(kernels.BFLOAT16, stored.data_ptr(), values.data_ptr(), 8, threads)
    with pytest.raises(ValueError, match="threads"):
        _cpu.refresh_master(stored.data_ptr(), values.data_ptr(), 8, threads)
    assert values.tolist() == [1.0] * 8 and stored.tolist() == [0.0] * 8


BAD_SLICES = {
    "a null source": (lambda a, b: (0, b, 8), "source.*null"),
    "a null destination": (lambda a, b: (a, 0, 8), "destination.*null"),
    "a misaligned source": (lambda a, b: (a + 1, b, 8), "source.*aligned"),
    "a misaligned destination": (lambda a, b: (a, b + 1, 8), "destination.*aligned"),
    "a negative count": (lambda a, b: (a, b, -1), "negative"),
    "an overflowing count": (lambda a, b: (a, b, 2**63 - 1), "address space"),
}


@pytest.mark.parametrize("case", BAD_SLICES)
def test_a_bad_slice_is_refused_by_every_conversion(case):
    values, stored = torch.ones(8), torch.zeros(8, dtype=BF16)
    change, message = BAD_SLICES[case]
    source, destination, n = change(values.data_ptr(), stored.data_ptr())
    with pytest.raises(ValueError, match=message):
        _cpu.encode(kernels.BFLOAT16, source, destination, n, 1)
    source, destination, n = change(stored.data_ptr(), values.data_ptr())
    with pytest.raises(ValueError, match=message):
        _cpu.decode(kernels.BFLOAT16, source, destination, n, 1)
    with pytest.raises(ValueError, match=message):
        _cpu.refresh_master(source, destination, n, 1)
    assert values.tolist() == [1.0] * 8 and stored.tolist() == [0.0] * 8


@pytest.mark.parametrize("format_code", [kernels.NONE, kernels.REMAINDER, -1, 99])
def test_a_conversion_of_an_unknown_format_is_refused(format_code):
    a, b = torch.ones(8), torch.zeros(8)
    for convert in (_cpu.encode, _cpu.decode):
        with pytest.raises(ValueError, match="formats"):
            convert(format_code, a.data_ptr(), b.data_ptr(), 8, 1)
    assert b.tolist() == [0.0] * 8


@pytest.mark.parametrize(
    "values, message",
    [(torch.ones(7), "7"), (torch.ones(9), "9"), (torch.ones(8, dtype=torch.float64), "float64")],
    ids=["fewer", "more", "float64"],
)
def test_a_slice_and_its_values_must_agree(values, message):
    stored = torch.zeros(8, dtype=BF16)
    with pytest.raises(ValueError, match=message):
        kernels.encode(values, stored)
    with pytest.raises(ValueError, match=message):
        kernels.decode(stored, values)
    assert stored.tolist() == [0.0] * 8


TENSORS_OF_A_ROW = ["param", "grad", "exp_avg", "exp_avg_sq", "master", "step"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", TENSORS_OF_A_ROW[1:])
def test_the_tensors_of_a_row_must_have_one_count(name, device):
    state = State.of(random_values(40, seed=5), REMAINDERS)
    tensors = {of: getattr(state, of).to(device) for of in TENSORS_OF_A_ROW}
    kernels.row(**tensors)
    tensors[name] = tensors[name].repeat(2)
    found, expected = ("2", "one") if name == "step" else ("80", "40")
    with pytest.raises(ValueError, match=f"^{name}.*found {found} .*expected.* {expected}"):
        kernels.row(**tensors)


@pytest.mark.parametrize("numel", [7, 9])
def test_a_parameter_and_its_master_must_have_one_count(numel):
    param, master = torch.ones(8, dtype=BF16), torch.zeros(numel)
    with pytest.raises(ValueError, match=f"master_param.*found {numel} .*expected.* 8"):
        kernels.refresh_master(param, master)
    assert not master.any()


def test_an_unknown_form_is_refused_by_name_and_changes_nothing():
    before = _cpu.isa()
    with pytest.raises(ValueError, match=r"'mmx'.*choose from.*portable"):
        _cpu.use_isa("mmx")
    assert _cpu.isa() == before


@pytest.mark.parametrize("dtypes", [ALL_F32, ALL_BF16], ids=str)
def test_addresses_of_what_is_absent_are_not_looked_at(dtypes):
    """No master: its word may hold anything. No elements: addresses may be null."""
    state = State.of(random_values(40, seed=2), dtypes)
    rows = rows_of([state])
    rows[MASTER] = 12345
    call(rows, dtypes.formats)
    rows[NUMEL] = 0
    rows[PARAM] = rows[GRAD] = rows[EXP_AVG] = rows[EXP_AVG_SQ] = 0
    call(rows, dtypes.formats)
    assert state.step.item() == 2


def test_a_device_without_kernels_is_refused_by_name():
    state = State.of(random_values(40, seed=3), ALL_F32)
    with pytest.raises(RuntimeError, match="meta"):
        kernels.adam(torch.device("meta"), rows_of([state]), ALL_F32.formats, ADAMW)
    assert state.step.item() == 0
