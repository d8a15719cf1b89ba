"""Every length, start, format and instruction set: each element once, the same bits everywhere, nothing beside it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from statestream import kernels

from native.kernel_runner import (
    ADAMW,
    ALL_DTYPES,
    CHUNK,
    CPU,
    GENERIC_DTYPES,
    I16,
    ISAS,
    Dtypes,
    Guarded,
    State,
    Values,
    assert_same_bits,
    bits,
    random_values,
    update,
    updated,
    use_isa,
)

SIZES = [*range(131), 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
OFFSETS = range(18)
THREADS = (1, 2, 3, 7)
OPTIONS = (ADAMW, replace(ADAMW, decoupled=False, maximize=True, bias_correction=False))
FORM_SLOTS = 4


@functools.cache
def longest(dtypes: Dtypes) -> State:
    return State.of(random_values(max(SIZES), seed=7, specials=0.02), dtypes, step=6)


@functools.cache
def expected(dtypes: Dtypes, options: int) -> State:
    """The longest state after one call with the simplest instruction set; others are prefixes of it."""
    with use_isa(ISAS[-1]):
        return updated(longest(dtypes), dtypes, OPTIONS[options])


def check(dtypes: Dtypes, isa: str, size: int, offset: int, options: int, threads: int) -> None:
    """Tensors start at different places: `offset` elements past a boundary, and others by other amounts."""
    offsets = [(offset + shift) % len(OFFSETS) for shift in (0, 3, 7, 12, 16)]
    guarded = Guarded(longest(dtypes)[:size], offsets)
    with use_isa(isa):
        update(guarded.state, dtypes, OPTIONS[options], threads=threads)
    want = expected(dtypes, options)[:size]
    what = f"{dtypes} {isa} size {size} offset {offset} options {options} threads {threads}"
    assert_same_bits(guarded.state, want, what)
    assert guarded.intact(), f"{what}: a byte outside was written"


def sample() -> list[tuple[int, int, int, int, int, int]]:
    """Indices (dtypes, isa slot, size, offset, options, threads): any two values of any two occur together."""
    return [
        (d, (d + s) % FORM_SLOTS, s, (5 * d + 7 * s + (d + s) // 4) % 18, (d // 2 + s // 3) % 2, (d // 4 + s) % 4)
        for d in range(len(ALL_DTYPES))
        for s in range(len(SIZES))
    ]


def test_the_sample_covers_every_pair():
    counts = (len(ALL_DTYPES), FORM_SLOTS, len(SIZES), len(OFFSETS), len(OPTIONS), len(THREADS))
    for a, b in itertools.combinations(range(len(counts)), 2):
        assert len({(case[a], case[b]) for case in sample()}) == counts[a] * counts[b], (a, b)


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
def test_any_length_and_start_gives_the_bits_of_the_longest(dtypes):
    for d, isa, size, offset, options, threads in sample():
        if ALL_DTYPES[d] == dtypes:
            check(dtypes, ISAS[isa % len(ISAS)], SIZES[size], offset, options, THREADS[threads])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("isa_name", ISAS)
def test_any_length_and_start_gives_the_bits_of_the_longest_in_full(dtypes, isa_name):
    for size, offset, options in itertools.product(SIZES, OFFSETS, range(len(OPTIONS))):
        threads = THREADS if size > CHUNK else (1,)
        for count in threads:
            check(dtypes, isa_name, size, offset, options, count)


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
def test_every_element_is_updated(dtypes):
    """Without this, the comparisons above could agree on elements that no instruction set touches."""
    rng = np.random.default_rng(9)
    uniform = (torch.from_numpy(rng.uniform(0.5, 1.0, max(SIZES)).astype(np.float32)) for _ in range(4))
    weight, grad, exp_avg, exp_avg_sq = uniform
    # Far enough from the moments that even a BF16 one must change.
    before = State.of(Values(weight, 8 * grad, exp_avg, exp_avg_sq), dtypes, step=1)
    after = updated(before, dtypes, replace(ADAMW, lr=0.5, beta1=0.5, beta2=0.5))
    for (name, new), (_, old) in zip(after.tensors(), before.tensors(), strict=True):
        share_changed = float((bits(new) != bits(old)).mean())
        if name == "grad":
            assert share_changed == 0
        elif old.dtype is I16:
            assert share_changed > 0.999  # low bits may meet again by chance
        else:
            assert share_changed == 1, name


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
def test_equal_elements_stay_equal_in_body_head_and_tail(dtypes, isa):
    one = random_values(1, seed=10)
    for size, offset in itertools.product([*range(1, 70), 1000], (0, 1, 5, 13)):
        values = Values(*(t.expand(size) for t in (one.weight, one.grad, one.exp_avg, one.exp_avg_sq)))
        guarded = Guarded(State.of(values, dtypes, step=2), [offset] * 5)
        update(guarded.state, dtypes)
        for name, tensor in guarded.state.tensors():
            assert len(np.unique(bits(tensor))) == 1, (name, size, offset)


def test_the_formats_with_a_kernel_are_these_and_no_others(isa):
    here = {d.formats for d in (*ALL_DTYPES, *GENERIC_DTYPES)}
    assert len(here) == 8 * 3 * 4 * 4
    codes = range(-1, 8)
    for formats in itertools.product(codes, repeat=5):
        known = kernels.has_adam(CPU, kernels.Formats(*formats))
        assert known == (formats in here), formats
