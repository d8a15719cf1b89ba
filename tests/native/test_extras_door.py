"""What is refused of scales, indices and random rounding, before anything is read or written."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from statestream import kernels
from statestream.kernels.abi import extras_row, scale_address
from statestream.tensors.global_index import IndexMap

from native.kernel_runner import (
    ADAMW,
    ALL_F32,
    BF16,
    CPU,
    F16,
    F32,
    U8,
    Dtypes,
    State,
    assert_same_bits,
    random_values,
    update,
    use_isa,
)

SCALED = Dtypes(BF16, BF16, U8, F16, F16)
EXP_AVG_SCALE, EXP_AVG_SQ_SCALE, MASTER_SCALE, ORDINAL, FIRST, SIZE0, SIZE1 = range(7)
WORDS = 12


class Rows:
    """Two rows of a call; what is refused about the second must not have touched the first."""

    def __init__(self, dtypes: Dtypes, lengths: tuple[int, int] = (300, 600)):
        self.dtypes = dtypes
        self.states = [State.of(random_values(n, seed=n), dtypes, step=3) for n in lengths]
        self.before = [state.clone() for state in self.states]
        self.rows, self.extras = array("q"), array("q")
        for s in self.states:
            self.rows.extend(kernels.row(s.param, s.grad, s.exp_avg, s.exp_avg_sq, s.master, s.step))
            self.extras.extend(s.extras())

    def call(self, **how) -> None:
        kernels.adam(CPU, self.rows, self.dtypes.formats, ADAMW, **{"extras": self.extras, **how})

    def assert_untouched_and_working(self) -> None:
        for state, untouched in zip(self.states, self.before, strict=True):
            assert_same_bits(state, untouched)
        update(self.states, self.dtypes)
        assert [s.step.item() for s in self.states] == [4, 4]


@pytest.fixture
def rows():
    made = Rows(SCALED)
    yield made
    made.assert_untouched_and_working()


@pytest.mark.parametrize(
    "word, value, message",
    [
        (EXP_AVG_SCALE, 0, "exp_avg_scale is a null"),
        (EXP_AVG_SQ_SCALE, 0, "exp_avg_sq_scale is a null"),
        (MASTER_SCALE, 0, "master_scale is a null"),
        (EXP_AVG_SCALE, 4097, "exp_avg_scale is not aligned"),
        (EXP_AVG_SQ_SCALE, -4, "exp_avg_sq_scale runs past"),
        (ORDINAL, -1, "ordinal"),
        (ORDINAL, 2**32, "ordinal"),
        (FIRST, -256, "first is negative"),
        (FIRST, 2**63 - 256, "first .* too large"),
        (FIRST, 100, "first is not a multiple of 256"),
        (SIZE0, 0, "sizes"),
        (SIZE1, -1, "sizes"),
    ],
)
def test_a_word_of_extras_that_cannot_be_is_refused_and_its_row_named(word, value, message, rows):
    rows.extras[WORDS + word] = value
    with pytest.raises(ValueError, match=f"row 1: {message}"):
        rows.call()


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e[:-1],
        lambda e: e[:WORDS],
        lambda e: e + e[:WORDS],
        lambda e: array("i", [0] * 24),
        lambda e: array("d", [0.0] * 24),
        lambda e: memoryview(e)[::2],
        lambda e: array("q"),
    ],
    ids=["a word short", "a row short", "a row more", "32-bit words", "floats", "strided", "none"],
)
def test_extras_of_another_length_or_kind_are_refused(change, rows):
    with pytest.raises(ValueError, match="twelve for each of 2 rows"):
        rows.call(extras=change(rows.extras))


def test_scaled_formats_without_extras_are_refused(rows):
    with pytest.raises(ValueError, match="need extras"):
        rows.call(extras=None)


@pytest.mark.parametrize(
    "dtypes",
    [Dtypes(BF16, BF16, U8, F32, None), Dtypes(BF16, BF16, F32, F16, None), Dtypes(BF16, BF16, F32, F32, F16)],
    ids=["exp_avg", "exp_avg_sq", "master"],
)
def test_one_scaled_tensor_is_enough_to_need_extras(dtypes):
    made = Rows(dtypes)
    with pytest.raises(ValueError, match="need extras"):
        made.call(extras=None)
    made.assert_untouched_and_working()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_of_more_than_64_bits_is_refused(seed, rows):
    with pytest.raises(ValueError, match="seed"):
        rows.call(seed=seed)


@pytest.mark.parametrize(
    "dtypes, taken",
    [
        (Dtypes(BF16, BF16, BF16, BF16), {*range(8)}),
        (Dtypes(BF16, F16, F16, U8), {*range(8)}),
        (Dtypes(F32, F32, F32, BF16), {0, 2}),
        (Dtypes(F32, F32, U8, F32), {0, 1}),
        (Dtypes(BF16, F32, F32, F32), {0, 4}),
        (Dtypes(BF16, F32, BF16, F32, F32), {0, 1}),
        (Dtypes(BF16, F32, BF16, F32, torch.int16), {0, 1}),
        (Dtypes(BF16, F32, F16, F16, F16), {0, 1, 2, 3}),
        (Dtypes(F16, F16, F32, F32), {0}),
        (ALL_F32, {0}),
    ],
    ids=str,
)
def test_flags_of_tensors_that_are_not_rounded_are_refused(dtypes, taken, isa):
    for stochastic in (*range(-2, 10), 2**31 - 1):
        made = Rows(dtypes)
        if stochastic in taken:
            made.call(stochastic=stochastic)
            continue
        with pytest.raises(ValueError, match="stochastic must be flags"):
            made.call(stochastic=stochastic)
        made.assert_untouched_and_working()


def test_flags_without_extras_are_refused():
    made = Rows(Dtypes(BF16, BF16, BF16, BF16))
    with pytest.raises(ValueError, match="need extras"):
        made.call(extras=None, stochastic=1)
    made.assert_untouched_and_working()


def test_a_row_without_scales_may_start_anywhere_and_hold_anything_where_scales_would_be():
    made = Rows(Dtypes(BF16, BF16, BF16, F32))
    made.extras[WORDS + FIRST] = 100
    made.extras[WORDS + EXP_AVG_SCALE] = 12345
    made.call(stochastic=1)
    assert [s.step.item() for s in made.states] == [4, 4]


def test_empty_rows_need_no_scales():
    state = State.of(random_values(0, seed=0), SCALED)
    rows = array("q", kernels.row(state.param, state.grad, state.exp_avg, state.exp_avg_sq, state.master, state.step))
    kernels.adam(CPU, rows, SCALED.formats, ADAMW, extras=array("q", extras_row(0, ordinal=0)))
    assert state.step.item() == 1


# Scales in Python ------------------------------------------------------------------------------------------

SCALES = torch.ones(5)
"""Of 1,025 to 1,280 elements."""


@pytest.mark.parametrize("first, numel", [(0, 1280), (0, 1025), (256, 512), (1024, 1), (1024, 256), (512, 0)])
def test_the_scale_of_a_range_of_whole_blocks_is_found(first, numel):
    assert scale_address("scale", SCALES, first, numel) == SCALES.data_ptr() + 4 * (first // 256)


@pytest.mark.parametrize(
    "scale, first, numel, message",
    [
        (SCALES, 100, 156, "element 100 starts no block"),
        (SCALES, -256, 256, "element -256 starts no block"),
        (SCALES, 256, 300, "element 556 ends no block"),
        (SCALES, 0, 1281, "5 scales are of 1280 elements; found 1281"),
        (SCALES, 1280, 1, "found 1281"),
        (SCALES.double(), 0, 256, "float64"),
        (torch.ones(10)[::2], 0, 256, "contiguous"),
    ],
)
def test_a_range_that_cuts_a_block_or_has_no_scales_is_refused(scale, first, numel, message):
    with pytest.raises(ValueError, match=f"^exp_avg_scale: .*{message}"):
        extras_row(numel, ordinal=0, first=first, exp_avg_scale=scale)


@pytest.mark.parametrize("dtype", [F16, U8])
def test_a_conversion_of_a_scaled_state_needs_its_scales(dtype):
    state, values = torch.zeros(300, dtype=dtype), torch.ones(300)
    conversions = (
        lambda **how: kernels.encode(values, state, **how),
        lambda **how: kernels.decode(state, values, **how),
    )
    for convert in conversions:
        with pytest.raises(ValueError, match=r"^scale: .*needs the float32 scales"):
            convert()
        with pytest.raises(ValueError, match=r"^scale: 1 scales are of 256"):
            convert(scale=torch.ones(1))
        with pytest.raises(ValueError, match=r"^scale: element 10 starts no block"):
            convert(scale=torch.ones(2), first=10)
        with pytest.raises(ValueError, match=r"^scale: element 300 ends no block"):
            convert(scale=torch.ones(3))
        with pytest.raises(ValueError, match=r"^scale: found on meta"):
            convert(scale=torch.ones(2, device="meta"))
    assert (state == 0).all() and (values == 1).all()


def test_a_conversion_of_another_state_takes_no_scales_and_no_roots():
    state, values = torch.zeros(300, dtype=BF16), torch.ones(300)
    for how in ({"scale": torch.ones(2)}, {"root": True}):
        with pytest.raises(ValueError, match=r"^scale: a state of torch.bfloat16 has no scales"):
            kernels.encode(values, state, **how)
        with pytest.raises(ValueError, match=r"^scale: a state of torch.bfloat16 has no scales"):
            kernels.decode(state, values, **how)
    assert (state == 0).all() and (values == 1).all()


def test_native_conversions_check_their_scales(isa):
    payloads, values = np.zeros(300, np.uint8), np.ones(300, np.float32)
    source, target = values.ctypes.data, payloads.ctypes.data
    for scale, message in ((0, "scale is a null"), (4097, "scale is not aligned")):
        for call, arguments in ((kernels._cpu.encode, (source, target)), (kernels._cpu.decode, (target, source))):
            with pytest.raises(ValueError, match=message):
                call(kernels.SCALED_FLOAT8, *arguments, 300, 1, scale=scale)
    for code in (kernels.FLOAT32, kernels.BFLOAT16):
        with pytest.raises(ValueError, match="formats"):
            kernels._cpu.encode(code, source, source, 10, 1, root=True)


@pytest.mark.parametrize(
    "param, master",
    [(F32, F32), (F32, F16), (BF16, BF16), (BF16, torch.int16), (F16, U8)],
)
def test_a_pair_that_has_no_master_to_refresh_is_refused(param, master):
    scale = torch.ones(1) if master in (F16, U8) else None
    with pytest.raises(ValueError, match="formats"):
        kernels.refresh_master(torch.zeros(8, dtype=param), torch.zeros(8, dtype=master), scale=scale)


def test_fake_tensors_are_checked_and_have_no_address():
    scale = torch.ones(2, device="meta")
    assert scale_address("scale", scale, 256, 100) == 0
    with pytest.raises(ValueError, match="starts no block"):
        scale_address("scale", scale, 100, 100)
    state, values = torch.zeros(300, dtype=U8, device="meta"), torch.zeros(300, device="meta")
    kernels.decode(state, values, scale=scale)
    with pytest.raises(ValueError, match="needs the float32 scales"):
        kernels.decode(state, values)


def test_hot_formats_with_extras_are_the_hot_kernels(isa):
    """Extras that nothing needs change no bit."""
    before = State.of(random_values(1000, seed=1, specials=0.02), ALL_F32)
    want, got = before.clone(), before.clone()
    update(want, ALL_F32)
    got.index_map = IndexMap(offset=77)
    rows = array("q", kernels.row(got.param, got.grad, got.exp_avg, got.exp_avg_sq, None, got.step))
    with use_isa(isa):
        kernels.adam(CPU, rows, ALL_F32.formats, ADAMW, extras=array("q", got.extras()), seed=5)
    assert_same_bits(got, want)
