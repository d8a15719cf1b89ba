"""FP16 and FP8 payloads, scales and random bits, one number at a time: the functions that every kernel is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from native import payload_judge as judge
from native import scalar_formats as scalars
from native import storage_judge
from native.payload_judge import FP8, FP16, Kind

KINDS = [pytest.param(FP16, id="fp16"), pytest.param(FP8, id="fp8")]
ROOTS = pytest.mark.parametrize("root", [False, True], ids=["value", "root"])


def every_payload(kind: Kind) -> np.ndarray:
    return np.arange(1 << kind.bits, dtype=np.uint32)


def all_scales(kind: Kind, root: bool, every: int = 1) -> np.ndarray:
    """All that encoding can give, or every so many of them, the lowest and the highest two among these."""
    scales = np.ldexp(1.0, np.array(judge.scale_exponents(kind, root))).astype(np.float32)
    return np.unique(np.concatenate([scales[::every], scales[:2], scales[-2:]]))


def as_dtensor_like(numbers: np.ndarray) -> np.ndarray:
    """FP32 numbers, and two neighbours on either side."""
    patterns = np.minimum(numbers, 3.4e38).astype(np.float32).view(np.int32)[:, None] + np.arange(-2, 3)
    return np.abs(patterns).ravel().astype(np.int32).view(np.float32)


def boundaries(kind: Kind) -> np.ndarray:
    """Beside every number of the kind and every halfway case, both signs, and what is special."""
    numbers = judge.magnitudes(kind)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = as_dtensor_like(np.concatenate([numbers, middles]))
    specials = np.array([0.0, np.inf, np.nan, 1e-45, 1e-38, 3.4e38, 65519.0, 65520.0, 465.0], np.float32)
    x = np.concatenate([x, specials])
    return np.concatenate([x, -x])


@ROOTS
@pytest.mark.parametrize("kind", KINDS)
def test_every_payload_stands_for_its_number_under_every_scale(kind, root):
    payloads = every_payload(kind)
    for scale in all_scales(kind, root):
        want = judge.loaded(kind, payloads, float(scale), root=root)
        got = scalars.load(kind.bits, payloads, scale, root=root)
        np.testing.assert_array_equal(got.astype(np.float64), want)
        zero = want == 0
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_boundary_is_stored_to_nearest_even_under_any_scale(kind):
    base = boundaries(kind)
    for scale in all_scales(kind, False, 1 if kind is FP8 else 17):
        with np.errstate(over="ignore"):
            x = base * scale
        got = scalars.store(kind.bits, x, scale, root=False)
        np.testing.assert_array_equal(got, judge.stored_nearest(kind, x, float(scale)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_root_is_stored_to_nearest_even_and_none_becomes_zero(kind):
    base = boundaries(kind)
    for scale in all_scales(kind, True, 1 if kind is FP8 else 9):
        with np.errstate(over="ignore"):
            v = np.concatenate([(base * scale) ** 2, [-1.0, -np.inf, -1e-45, -0.0, 1e-45]]).astype(np.float32)
        got = scalars.store(kind.bits, v, scale, root=True)
        np.testing.assert_array_equal(got, judge.stored_root_nearest(kind, v, float(scale)))
        assert (got[v > 0] != 0).all()


def test_the_judge_of_nearest_agrees_with_numpy_and_torch():
    x = boundaries(FP16)
    number = ~np.isnan(x)
    fits = number & (np.abs(x) <= 65504)
    np.testing.assert_array_equal(judge.stored_nearest(FP16, x, 1.0)[fits], x[fits].astype(np.float16).view(np.uint16))
    plain = scalars.float16_store(x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(plain[number], x[number].astype(np.float16).view(np.uint16))
    assert (plain[~number] == 0x7E00).all()

    x = boundaries(FP8)
    x = x[np.abs(x) <= 448]
    theirs = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(judge.stored_nearest(FP8, x, 1.0), theirs)
    decoded = torch.from_numpy(every_payload(FP8).astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(judge.values(FP8), decoded)
    np.testing.assert_array_equal(judge.values(FP16), np.arange(1 << 16, dtype=np.uint16).view(np.float16))


@ROOTS
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_is_the_smallest_power_of_two_that_fits(kind, root):
    largest = judge.magnitudes(kind)[-1]
    edges = as_dtensor_like(
        np.concatenate([np.ldexp(largest, np.arange(-149, 120)), np.ldexp(1.0, np.arange(-149, 128))])
    )
    edges = np.concatenate([edges, [0.0, 3.4028235e38, 1e-45]]).astype(np.float32)
    edges = edges[np.isfinite(edges)]
    if root:
        with np.errstate(over="ignore"):
            edges = np.concatenate([edges, as_dtensor_like((edges * edges)[np.isfinite(edges * edges)])]).astype(
                np.float32
            )
        edges = edges[np.isfinite(edges)]
    want = [judge.scale_of(kind, x[None], root=root) for x in edges]
    got = scalars.scale(kind.bits, edges, root=root)
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    exponents = judge.scale_exponents(kind, root)
    assert {2.0 ** exponents[0], 2.0 ** exponents[-1]} <= set(got.tolist())
    assert scalars.scale(kind.bits, np.array([np.nan, np.inf], np.float32), root=root).tolist() == [1.0, 1.0]


@ROOTS
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_encodes_to_the_same_numbers_under_the_scale_of_any_block(kind, root):
    """decode(encode(decode(x))) == decode(x): x alone in its block, under a scale of its own, and beside the
    largest that the first scale allows."""
    payloads = every_payload(kind)
    finite = np.isfinite(judge.values(kind))
    for scale in all_scales(kind, root, 1 if kind is FP8 else 7):
        decoded = scalars.load(kind.bits, payloads, scale, root=root)
        alone = scalars.scale(kind.bits, decoded, root=root)
        for again in (alone, np.full_like(alone, scale)):
            stored = scalars.store(kind.bits, decoded, again, root=root)
            back = scalars.load(kind.bits, stored, again, root=root)
            np.testing.assert_array_equal(back.view(np.uint32)[finite], decoded.view(np.uint32)[finite])
            np.testing.assert_array_equal(back[~finite], decoded[~finite])


PUBLISHED = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Known answers of philox4x32-10, published with the paper's code (Random123, kat_vectors)."""


@pytest.mark.parametrize("counter, key, answer", PUBLISHED, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(counter, key, answer):
    want = [int(word, 16) for word in answer.split()]
    assert judge.philox4x32(counter, key) == want
    assert scalars.philox(counter, key) == want


def test_an_elements_bits_are_a_half_of_its_groups_block():
    rng = np.random.default_rng(0)
    indices = np.concatenate([np.arange(40), 2**35 + np.arange(9), rng.integers(0, 2**62, 100)])
    for seed, ordinal, tensor, step in ((0, 0, 0, 1), (2**64 - 1, 2**32 - 1, 2, 2**24), (12345678901234, 7, 1, 1000)):
        got = scalars.random_bits(seed, ordinal, tensor, step, indices)
        np.testing.assert_array_equal(got, judge.random_bits(seed, ordinal, tensor, step, indices))


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_goes_up_for_as_many_of_the_bits_as_is_cut_off(kind):
    """All 65,536 draws for each number: the count of those that go up, over 65,536, is the part cut off."""
    rng = np.random.default_rng(1)
    numbers = judge.magnitudes(kind)
    inside = numbers[:-1] + np.diff(numbers) * rng.random(numbers.size - 1)
    # Also where denormals begin and in the lowest of them.
    x = np.concatenate([rng.choice(inside, 24), inside[:3], inside[(1 << kind.mantissa_bits) - 2 :][:4], numbers[5:8]])
    x = x.astype(np.float32)
    below, above = judge.neighbours(kind, x.astype(np.float64))
    draws = np.arange(1 << 16)
    for value, low, high in zip(x, below, above, strict=True):
        got = scalars.store(kind.bits, np.full(draws.size, value, np.float32), 1.0, root=False, random=draws)
        assert set(got.tolist()) <= {low, high}
        gap = numbers[high] - numbers[low]
        share = (float(value) - numbers[low]) / gap if gap else 0.0
        # The more bits, the more often up: rounding is monotone in the draw.
        np.testing.assert_array_equal(np.sort(got), got)
        assert share - 2.0**-16 < np.count_nonzero(got != low) / draws.size <= share


def test_stochastic_bfloat16_goes_up_for_as_many_of_the_bits_as_is_cut_off():
    patterns = np.array([0x3F800001, 0x3F808000, 0xBF80FFFF, 0x00000001, 0x0000FFFF, 0x7F7EFFFF, 0x3F810000], np.uint32)
    draws = np.arange(1 << 16)
    for pattern in patterns:
        got = scalars.bfloat16_stochastic(np.full(draws.size, pattern, np.uint32).view(np.float32), draws)
        ups = np.count_nonzero(got == (pattern >> 16) + 1)
        assert ups == pattern & 0xFFFF
        assert np.count_nonzero(got == pattern >> 16) == draws.size - ups


def test_chance_makes_no_infinity_of_a_bfloat16_and_keeps_what_is_special():
    beyond = np.array([0x7F7F0001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    beyond = np.concatenate([beyond, beyond | 0x80000000])
    for draw in (0, 1, 0x7FFF, 0xFFFF):
        got = scalars.bfloat16_stochastic(beyond.view(np.float32), draw)
        np.testing.assert_array_equal(got, storage_judge.round_to_bfloat16(beyond))


@pytest.mark.parametrize("seed", range(20))
def test_a_shards_elements_have_the_indices_of_the_whole(seed):
    """Boxes of tensors of up to three dimensions, cut anywhere: numpy says where each element lies."""
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 12, 3)
    whole = np.arange(shape.prod()).reshape(shape)
    low = [int(rng.integers(0, size)) for size in shape]
    high = [int(rng.integers(a + 1, size + 1)) for a, size in zip(low, shape, strict=True)]
    box = whole[low[0] : high[0], low[1] : high[1], low[2] : high[2]]
    first = int(rng.integers(0, box.size))
    strides = [shape[1] * shape[2], shape[2], 1]
    words = [0, 0, 0, 0, first, *box.shape[1:], *strides, int(box.ravel()[0]), 0]
    np.testing.assert_array_equal(scalars.global_indices(words, box.size - first), box.ravel()[first:])
