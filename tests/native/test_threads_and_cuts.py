"""The bits do not depend on threads, on how rows are put together, or on where the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from statestream import kernels

from native.kernel_runner import (
    ALL_BF16,
    ALL_DTYPES,
    ALL_F32,
    CHUNK,
    Dtypes,
    State,
    assert_same_bits,
    random_values,
    update,
    updated,
)

MIXED_SIZES = [CHUNK + 1, 1, 0, 3 * CHUNK, 130, 0, 2 * CHUNK - 1, 7, 4096]


def mixed_rows(dtypes: Dtypes) -> list[State]:
    """Rows of very different sizes, some empty; counts that differ, and stay alike in runs."""
    steps = [3, 3, 900, 0, 0, 3, 7, 7, 100_000]
    return [
        State.of(random_values(n, seed=i, specials=0.01), dtypes, step)
        for i, (n, step) in enumerate(zip(MIXED_SIZES, steps, strict=True))
    ]


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("dtypes", ALL_DTYPES[::5], ids=str)
def test_rows_of_one_call_are_each_as_if_stepped_alone(dtypes, threads):
    before = mixed_rows(dtypes)
    together = [row.clone() for row in before]
    update(together, dtypes, threads=threads)
    for i, (row, result) in enumerate(zip(before, together, strict=True)):
        assert_same_bits(result, updated(row, dtypes), f"row {i}")


@pytest.mark.parametrize(
    "threads", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(16, marks=pytest.mark.long)]
)
def test_pieces_of_any_length_are_as_the_whole(threads):
    """The more there is for each thread, the longer are the pieces that it takes: three lengths here."""
    for numel in (45 * CHUNK + 17, 80 * CHUNK - 1):
        rows = [State.of(random_values(n, seed=n), ALL_BF16, 3) for n in (numel, 5, numel // 3)]
        together = [row.clone() for row in rows]
        update(together, ALL_BF16, threads=threads)
        for i, (row, result) in enumerate(zip(rows, together, strict=True)):
            assert_same_bits(result, updated(row, ALL_BF16, threads=1), f"row {i} of {numel}")


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_conversions_do_not_depend_on_threads(threads, isa, monkeypatch):
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", str(threads))
    values = random_values(5 * CHUNK + 3, seed=1, specials=0.1).weight
    stored = torch.empty_like(values, dtype=torch.bfloat16)
    kernels.encode(values, stored)
    back = torch.empty_like(values)
    kernels.decode(stored, back)
    number = ~values.isnan()
    assert torch.equal(stored[number], values.to(torch.bfloat16)[number])
    assert torch.equal(back[number], stored[number].float())
    assert bool(back[~number].isnan().all())


@pytest.mark.parametrize("cuts", ["blocks", "anywhere"])
@pytest.mark.parametrize("dtypes", ALL_DTYPES[::3], ids=str)
def test_a_tensor_updated_in_several_calls_is_as_if_in_one(dtypes, cuts, isa):
    n = 2 * CHUNK + 1234
    before = State.of(random_values(n, seed=2, specials=0.01), dtypes, step=11)
    rng = np.random.default_rng(3)
    grain = 256 if cuts == "blocks" else 1
    inner = np.unique(rng.integers(1, n // grain, 9)) * grain
    edges = sorted({0, grain, *inner.tolist(), n})
    in_pieces = before.clone()
    order = rng.permutation(len(edges) - 1)
    for k, piece in enumerate(order):
        elements = slice(edges[piece], edges[piece + 1])
        update(in_pieces[elements], dtypes, threads=1 + k % 3, advance=k == 0)
    assert_same_bits(in_pieces, updated(before, dtypes))


@pytest.mark.parametrize("cut", range(256, 2048, 256))
def test_pieces_as_rows_of_one_call_are_as_the_whole(cut):
    before = State.of(random_values(2048, seed=4), ALL_BF16, step=1)
    pieces = before.clone()
    pieces.step += 1
    update([pieces[:cut], pieces[cut:]], ALL_BF16, threads=2, advance=False)
    assert_same_bits(pieces, updated(before, ALL_BF16))


def test_a_thousand_small_rows_are_all_updated():
    before = [State.of(random_values(1 + i % 97, seed=i), ALL_F32, step=i) for i in range(1000)]
    after = [row.clone() for row in before]
    update(after, ALL_F32, threads=3)
    for row, result in zip(before, after, strict=True):
        assert_same_bits(result, updated(row, ALL_F32))


@pytest.mark.parametrize("position", range(40))
def test_an_empty_tensor_anywhere_changes_nothing_but_its_own_count(position):
    full = [State.of(random_values(50 + i, seed=i), ALL_F32) for i in range(39)]
    empty = State.of(random_values(0, seed=0), ALL_F32)
    rows = [row.clone() for row in full]
    rows.insert(position, empty)
    update(rows, ALL_F32, threads=2)
    assert rows.pop(position).step.item() == 1
    for row, result in zip(full, rows, strict=True):
        assert_same_bits(result, updated(row, ALL_F32))


@pytest.mark.parametrize("threads", [1, 3])
def test_only_empty_tensors_or_no_rows_are_a_step_of_nothing(threads):
    empty = State.of(random_values(0, seed=0), ALL_BF16)
    update([empty, empty.clone()], ALL_BF16, threads=threads)
    assert empty.step.item() == 1
    update([], ALL_BF16, threads=threads)
    nothing = torch.empty(0)
    kernels.encode(nothing, nothing.to(torch.bfloat16))
    kernels.decode(nothing.to(torch.bfloat16), nothing)
