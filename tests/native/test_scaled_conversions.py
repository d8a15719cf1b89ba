"""Scaled states from and to FP32, and masters from changed weights, with every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from statestream import kernels
from statestream.formats import scale_count

from native import payload_judge as judge
from native import storage_judge
from native.kernel_runner import BF16, CHUNK, F16, F32, PAYLOADS, U8, as_bfloat16, as_payloads, bits, use_isa
from native.step_judge import as_float16

LENGTHS = [*range(1, 18), 31, 33, 255, 256, 257, 511, 512, 513, 1000, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 300]
SCALED = pytest.mark.parametrize("dtype", [F16, U8], ids=["fp16", "fp8"])
ROOTS = pytest.mark.parametrize("root", [False, True], ids=["value", "root"])


def wide(n: int, seed: int, *, root: bool) -> np.ndarray:
    """Magnitudes over twelve decades within a block and thirty among blocks; some zeros and what is not finite."""
    rng = np.random.default_rng(seed)
    block = np.repeat(rng.uniform(-15, 15, scale_count(n)), 256)[:n]
    x = rng.standard_normal(n) * 10.0 ** (block + rng.uniform(-12, 0, n))
    chosen = rng.random(n) < 0.02
    x[chosen] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], chosen.sum())
    # Negative second moments are no numbers; a few, all the same.
    return (np.where(rng.random(n) < 0.99, np.abs(x), x) if root else x).astype(np.float32)


def guarded(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer and the n elements in the middle of it, at an odd place."""
    buffer = torch.full((n + 600,), 3, dtype=dtype)
    return buffer, buffer[299 : n + 299]


def intact(buffer: torch.Tensor, n: int) -> bool:
    return bool((buffer[:299] == 3).all() and (buffer[n + 299 :] == 3).all())


@ROOTS
@SCALED
def test_a_tensor_of_any_length_is_stored_to_nearest_with_the_scales_of_its_blocks(dtype, root, isa):
    kind = PAYLOADS[dtype]
    for n in LENGTHS:
        x = wide(n, n, root=root)
        buffer, state = guarded(n, dtype)
        scales, scale = guarded(scale_count(n), F32)
        values, source = guarded(n, F32)
        source.copy_(torch.from_numpy(x))
        kernels.encode(source, state, scale=scale, root=root)
        payloads, want_scales = judge.stored_tensor(kind, x, root=root)
        np.testing.assert_array_equal(bits(state), payloads, err_msg=str(n))
        np.testing.assert_array_equal(scale.numpy(), want_scales)

        source.zero_()
        kernels.decode(state, source, scale=scale, root=root)
        want = judge.loaded_tensor(kind, payloads, want_scales, root=root)
        np.testing.assert_array_equal(bits(source), storage_judge.store_float32(want.view(np.uint32)))
        for whole, count in ((buffer, n), (scales, scale.numel()), (values, n)):
            assert intact(whole, count)


@ROOTS
@SCALED
def test_slices_on_block_edges_in_any_order_convert_as_the_whole(dtype, root, isa):
    n = 256 * 9 + 50
    x = torch.from_numpy(wide(n, 5, root=root))
    whole, whole_scale = torch.zeros(n, dtype=dtype), torch.zeros(scale_count(n))
    kernels.encode(x, whole, scale=whole_scale, root=root)
    values = torch.empty(n)
    kernels.decode(whole, values, scale=whole_scale, root=root)
    state, scale, back = torch.zeros(n, dtype=dtype), torch.zeros(scale_count(n)), torch.empty(n)
    for first, end in ((1024, 1280), (1280, n), (0, 256), (256, 1024)):
        kernels.encode(x[first:end], state[first:end], scale=scale, root=root, first=first)
    np.testing.assert_array_equal(bits(state), bits(whole))
    assert torch.equal(scale, whole_scale)
    for first, end in ((256, 2304), (2304, n), (0, 256)):
        kernels.decode(state[first:end], back[first:end], scale=scale, root=root, first=first)
    np.testing.assert_array_equal(bits(back), bits(values))


@ROOTS
@SCALED
def test_what_is_decoded_encodes_to_what_decodes_the_same_for_random_payloads_and_scales(dtype, root, isa):
    """Blocks of any payloads, each with a scale that encoding can give."""
    kind = PAYLOADS[dtype]
    rng = np.random.default_rng(7)
    blocks = 4 * len(judge.scale_exponents(kind, root))
    payloads = rng.integers(0, 1 << kind.bits, blocks * 256 - 100)
    # Of every fourth block all are small: its scale was another's, and encoding finds a smaller one.
    payloads[np.arange(payloads.size) // 256 % 4 == 3] %= 16
    state = as_payloads(payloads, dtype)
    exponents = np.tile(np.array(judge.scale_exponents(kind, root)), 4)
    scale = torch.from_numpy(np.ldexp(1.0, exponents).astype(np.float32))
    once, twice = torch.empty(payloads.size), torch.empty(payloads.size)
    kernels.decode(state, once, scale=scale, root=root)
    kernels.encode(once, state, scale=scale, root=root)
    kernels.decode(state, twice, scale=scale, root=root)
    np.testing.assert_array_equal(bits(twice), bits(once))
    assert not np.array_equal(bits(state), payloads)


@ROOTS
@SCALED
def test_flushed_denormals_change_no_bit_of_a_conversion(dtype, root, isa):
    kind, n = PAYLOADS[dtype], 2000
    x = wide(n, 9, root=root)
    x[256:512] = np.random.default_rng(0).uniform(0, 1e-38, 256)  # every one a denormal
    assert (x[256:512] > 0).all()
    values, state, scale, back = torch.from_numpy(x), torch.empty(n, dtype=dtype), torch.empty(8), torch.empty(n)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    try:
        kernels.encode(values, state, scale=scale, root=root)
        kernels.decode(state, back, scale=scale, root=root)
    finally:
        torch.set_flush_denormal(False)
    payloads, scales = judge.stored_tensor(kind, x, root=root)
    want = judge.loaded_tensor(kind, payloads, scales, root=root)
    np.testing.assert_array_equal(bits(state), payloads)
    np.testing.assert_array_equal(bits(back), storage_judge.store_float32(want.view(np.uint32)))


# Masters --------------------------------------------------------------------------------------------------


def as_weight(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """FP32 numbers rounded to nearest, by the judges."""
    if dtype is BF16:
        return as_bfloat16(storage_judge.round_to_bfloat16(x.view(np.uint32)))
    return as_float16(torch.from_numpy(x))


def weights_and_changes(n: int, dtype: torch.dtype, masters: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """The masters' weights, of which a third were written from outside; and which."""
    rng = np.random.default_rng(n)
    weight = as_weight(masters, dtype)
    written = rng.random(n) < 0.3
    written[: n // 4] = False
    outside = as_weight((rng.standard_normal(n) * 3).astype(np.float32), dtype)
    weight[torch.from_numpy(written)] = outside[torch.from_numpy(written)]
    return weight, written


@pytest.mark.parametrize("param", [BF16, F16], ids=["bf16", "fp16"])
def test_an_fp32_master_becomes_the_weight_where_it_does_not_round_to_it(param, isa):
    n = 2 * CHUNK + 9
    masters = (np.random.default_rng(1).standard_normal(n) * 10.0 ** np.linspace(-9, 6, n)).astype(np.float32)
    masters[:8] = [np.inf, -np.inf, 0.0, -0.0, 65519.0, 65520.0, 6e-8, 1e-8]
    weight, written = weights_and_changes(n, param, masters)
    got = torch.from_numpy(masters.copy())
    kernels.refresh_master(weight, got)
    different = bits(as_weight(masters, param)) != bits(weight)
    assert 0.2 < different.mean() <= written.mean()
    want = np.where(different, weight.float().numpy(), masters)
    np.testing.assert_array_equal(bits(got), want.view(np.uint32))


@pytest.mark.parametrize("param", [BF16, F16], ids=["bf16", "fp16"])
def test_an_fp16_master_becomes_the_weight_and_its_block_a_new_scale(param, isa):
    n = CHUNK + 256 * 7 + 30
    x = (np.random.default_rng(2).standard_normal(n) * 0.02).astype(np.float32)
    payloads, scales = judge.stored_tensor(judge.FP16, x, root=False)
    masters = judge.loaded_tensor(judge.FP16, payloads, scales, root=False)
    weight, written = weights_and_changes(n, param, masters)
    master, scale = as_payloads(payloads, F16), torch.from_numpy(scales.copy())
    kernels.refresh_master(weight, master, scale=scale)

    different = bits(as_weight(masters, param)) != bits(weight)
    assert 0.15 < different.mean() <= written.mean()
    values = np.where(different, weight.float().numpy(), masters)
    want, want_scales = judge.stored_tensor(judge.FP16, values, root=False)
    np.testing.assert_array_equal(bits(master), want)
    np.testing.assert_array_equal(scale.numpy(), want_scales)
    assert (want_scales != scales).any()
    unchanged = ~np.pad(different, (0, -n % 256)).reshape(-1, 256).any(axis=1)
    assert unchanged.sum() > 50 and np.array_equal(want_scales[unchanged], scales[unchanged])
    # Now they agree, and nothing more happens.
    again = master.clone()
    kernels.refresh_master(weight, again, scale=scale)
    np.testing.assert_array_equal(bits(again), bits(master))
    with use_isa(isa):
        values = torch.empty(n)
        kernels.decode(master, values, scale=scale)
    np.testing.assert_array_equal(bits(as_weight(values.numpy(), param)), bits(weight))
