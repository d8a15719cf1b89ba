"""Every length, start, cut, thread count, instruction set of scaled states: the same bits, and nothing beside them."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from helpers.memory import peak_extra_bytes

from native.kernel_runner import (
    ADAMW,
    BF16,
    CHUNK,
    F16,
    F32,
    I16,
    ISAS,
    U8,
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
from native.step_judge import stored_step

MIXES = [
    Dtypes(F32, F32, U8, U8),
    Dtypes(F32, F32, F16, F16),
    Dtypes(BF16, BF16, U8, F16, F16),
    Dtypes(F16, F16, F16, U8, F32),
    Dtypes(BF16, F16, BF16, BF16),
    Dtypes(BF16, F32, BF16, U8, I16),
    Dtypes(F16, BF16, F32, F32),
]
SIZES = [*range(20), 31, 63, 127, 255, 256, 257, 300, 511, 512, 513, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300]
THREADS = (1, 2, 3, 7)


@functools.cache
def longest(dtypes: Dtypes) -> State:
    values = random_values(max(SIZES), seed=7, specials=0.01)
    # Blocks of zeros, and blocks in which only the last element is not.
    for tensor in (values.grad, values.exp_avg, values.exp_avg_sq):
        tensor[: 256 * 4] = 0.0
        tensor[256 * 3 - 1] = 1e-12
    return State.of(values, dtypes, step=6)


@functools.cache
def expected(dtypes: Dtypes) -> State:
    return stored_step(longest(dtypes), dtypes, ADAMW, seed=9)


def prefix(state: State, size: int) -> State:
    """The first elements, with scales of their own: short blocks have other scales than whole ones."""
    part = state[:size].clone()
    part.scales = {name: scale[: -(-size // 256)] for name, scale in part.scales.items()}
    return part


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_any_length_and_start_is_stored_as_judged_and_nothing_beside_it(dtypes):
    for index, size in enumerate(SIZES):
        before = prefix(longest(dtypes), size)
        want = stored_step(before, dtypes, ADAMW, seed=9)
        for k, isa in enumerate(ISAS):
            offsets = [(5 * index + 7 * k + shift) % 18 for shift in (0, 3, 7, 12, 16)]
            guarded = Guarded(before, offsets)
            guarded.state.scales = {name: scale.clone() for name, scale in before.scales.items()}
            with use_isa(isa):
                update(guarded.state, dtypes, seed=9, threads=THREADS[(index + k) % 4])
            assert_same_bits(guarded.state, want, f"{isa} size {size} offsets {offsets}")
            assert guarded.intact(), f"{isa} size {size} offsets {offsets}: a byte outside was written"


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_threads_change_no_bit(dtypes, threads, isa):
    assert_same_bits(updated(longest(dtypes), dtypes, threads=threads, seed=9), expected(dtypes))


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
@pytest.mark.parametrize("as_rows", [False, True], ids=["calls", "rows"])
def test_any_cut_on_block_edges_gives_the_bits_of_the_whole(dtypes, as_rows, isa):
    n = 256 * 40 + 77
    before = prefix(longest(dtypes), n)
    want = updated(before, dtypes, seed=9)
    rng = np.random.default_rng(3)
    edges = [0, *sorted(256 * rng.choice(np.arange(1, 40), 7, replace=False)), n]
    pieces = before.clone()
    slices = [pieces[int(a) : int(b)] for a, b in itertools.pairwise(edges)]
    rng.shuffle(slices)
    if as_rows:
        pieces.step += 1
        update(slices, dtypes, seed=9, threads=2, advance=False)
    else:
        for k, piece in enumerate(slices):
            update(piece, dtypes, seed=9, threads=1 + k % 3, advance=k == 0)
    assert_same_bits(pieces, want)


@pytest.mark.parametrize("dtypes", [d for d in MIXES if not d.scaled], ids=str)
def test_without_scales_any_cut_at_all_gives_the_bits_of_the_whole(dtypes, isa):
    n = 3000
    before = prefix(longest(dtypes), n)
    stochastic = 7 if dtypes.param is BF16 and dtypes.exp_avg is BF16 else 0
    want = updated(before, dtypes, seed=9, stochastic=stochastic)
    pieces = before.clone()
    for k, (a, b) in enumerate(itertools.pairwise([0, 1, 100, 255, 257, 258, 1001, 2047, n])):
        update(pieces[a:b], dtypes, seed=9, stochastic=stochastic, advance=k == 0)
    assert_same_bits(pieces, want)


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_an_element_depends_on_no_block_but_its_own(dtypes, isa):
    """Another block changed by a hundred orders of magnitude, infinite or NaN: the rest keeps its bits."""
    n = 256 * 5 + 100
    before = prefix(longest(dtypes), n)
    want = updated(before, dtypes, seed=9)
    for block in range(6):
        for grad in (1e4, float("inf"), float("nan")):
            changed = before.clone()
            changed.grad[256 * block : 256 * block + 256] = grad
            after = updated(changed, dtypes, seed=9)
            others = np.arange(n) // 256 != block
            for name, tensor in after.tensors():
                np.testing.assert_array_equal(bits(tensor)[others], bits(getattr(want, name))[others])
            for name, scale in after.scales.items():
                keep = np.arange(6) != block
                np.testing.assert_array_equal(scale.numpy()[keep], want.scales[name].numpy()[keep])


def test_a_short_block_takes_its_scale_from_its_own_elements(isa):
    """Whatever lies behind the last element counts for nothing, eps 0 included."""
    dtypes = Dtypes(F32, F32, U8, F16)
    rng = np.random.default_rng(0)
    for n in (1, 9, 100, 255):
        small = Values(*(torch.from_numpy(1e-6 * rng.random(n).astype(np.float32)) for _ in range(4)))
        state = updated(State.of(small, dtypes, step=1), dtypes)
        for name in ("exp_avg", "exp_avg_sq"):
            values = np.abs(state.values(name))
            largest = np.sqrt(values.max()) if name == "exp_avg_sq" else values.max()
            top = 448.0 if name == "exp_avg" else 65504.0
            assert top / 2.3 <= largest / state.scales[name].item() <= top


def test_a_step_needs_no_memory_beside_the_state():
    """64 MiB of elements with FP8 moments: decoded whole they would be 4 bytes an element each."""
    n = 1 << 26
    dtypes = Dtypes(BF16, BF16, U8, U8)
    state = State(
        *(torch.zeros(n, dtype=t) for t in (BF16, BF16, U8, U8)),
        None,
        torch.tensor(0.0),
        {name: torch.ones(n // 256) for name in ("exp_avg", "exp_avg_sq")},
    )
    update(state, dtypes, threads=2)  # threads and their stacks are there from now on
    extra = peak_extra_bytes(lambda: update(state, dtypes, threads=2, stochastic=7))
    assert extra < 2 << 20, f"{extra} bytes for {n} elements"
