"""Random rounding: unbiased, a function of what an element is and of nothing else, and what it is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from statestream.tensors.global_index import IndexMap

from native import payload_judge as judge
from native.kernel_runner import (
    ADAMW,
    ALL_BF16,
    BF16,
    CHUNK,
    F16,
    F32,
    PAYLOADS,
    U8,
    Dtypes,
    State,
    Values,
    assert_same_bits,
    bits,
    difference,
    random_values,
    update,
    updated,
)
from native.step_judge import TENSORS

ALL_BF16_FLAGS = 7
KEEP = replace(ADAMW, lr=0.0, weight_decay=0.0)


# Statistics -----------------------------------------------------------------------------------------------


def constant(n: int, dtypes: Dtypes, weight: float, grad: float, exp_avg: float, exp_avg_sq: float) -> State:
    filled = (np.full(n, x, np.float32) for x in (weight, grad, exp_avg, exp_avg_sq))
    return State.of(Values(*map(torch.from_numpy, filled)), dtypes, step=4)


def exact_step(state: State, options=ADAMW) -> dict[str, np.ndarray]:
    """FP32 results of the step, by name; of exp_avg_sq in a scaled format the root."""
    weight, grad, exp_avg, exp_avg_sq = (
        torch.from_numpy(np.array(state.values(name))) for name in ("param", "grad", "exp_avg", "exp_avg_sq")
    )
    after = updated(State(weight, grad, exp_avg, exp_avg_sq, None, state.step), Dtypes(F32, F32, F32, F32), options)
    results = {name: getattr(after, name).numpy() for name in TENSORS}
    if "exp_avg_sq" in state.scales:
        results["exp_avg_sq"] = np.sqrt(results["exp_avg_sq"])
    return results


def stored_units(state: State, name: str) -> np.ndarray:
    """float64 numbers as stored; of exp_avg_sq in a scaled format the roots."""
    tensor = getattr(state, name)
    if name not in state.scales:
        return tensor.double().numpy()
    scale = np.repeat(state.scales[name].double().numpy(), 256)[: tensor.numel()]
    return judge.values(PAYLOADS[tensor.dtype])[bits(tensor)] * scale


def assert_unbiased(got: np.ndarray, exact: np.ndarray, what: str) -> None:
    """Each is one of two neighbours of the exact number; their mean error is that of chance, to 4 sigma."""
    numbers = np.unique(got)
    assert numbers.size == 2, f"{what}: {numbers}"
    low, high = numbers
    value = float(exact[0])
    assert (exact == exact[0]).all() and low < value < high, what
    share = (value - low) / (high - low)
    assert 0.02 < share < 0.98, f"{what}: {share} proves little"
    sigma = np.sqrt(share * (1 - share) / got.size)
    found = np.mean(got == high)
    assert abs(found - share) < 4 * sigma + 2.0**-16, f"{what}: {found} of {share}, sigma {sigma}"


@pytest.mark.parametrize("moments", [BF16, F16, U8], ids=["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("seed", range(3))
def test_each_tensor_is_rounded_to_its_exact_number_on_average(moments, seed, isa):
    dtypes = Dtypes(BF16, F32, moments, moments)
    n = 1 << 18
    before = constant(n, dtypes, 1.0, 0.37, 0.5, 0.2)
    options = replace(ADAMW, lr=0.0123, beta2=0.9)
    exact = exact_step(before, options)
    after = updated(before, dtypes, options, seed=seed, stochastic=ALL_BF16_FLAGS)
    for name in TENSORS:
        assert_unbiased(stored_units(after, name), exact[name], name)


def test_the_draws_of_neighbours_tensors_steps_seeds_and_parameters_have_nothing_in_common():
    """Correlations of which way an element is rounded; each within 4.5 sigma of none."""
    n = 1 << 18
    before = constant(n, ALL_BF16, 1.0, 0.37, 0.5, 0.2)

    def ups(name: str, seed: int = 0, ordinal: int = 0, step: int = 4, offset: int = 0) -> np.ndarray:
        state = before.clone()
        state.step.fill_(float(step))
        state.ordinal, state.index_map = ordinal, IndexMap(offset=offset)
        # Without bias correction or a step size, the results are the same at any step.
        options = replace(ADAMW, lr=0.0, bias_correction=False, weight_decay=0.0)
        after = updated(state, ALL_BF16, options, seed=seed, stochastic=3)
        got = getattr(after, name).float().numpy()
        return got == got.max()

    first = ups("exp_avg")
    others = [
        ups("exp_avg_sq"),
        ups("exp_avg", seed=1),
        ups("exp_avg", seed=2**32),
        ups("exp_avg", ordinal=1),
        ups("exp_avg", step=5),
        ups("exp_avg", offset=n),
        ups("exp_avg", offset=1 << 40),
        *(np.roll(first, shift) for shift in (1, 2, 4, 7, 8, 64, 256)),
    ]
    for k, other in enumerate(others):
        correlation = np.corrcoef(first, other)[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(n), (k, correlation)
    assert np.array_equal(first, ups("exp_avg")), "the same again"
    np.testing.assert_array_equal(np.roll(first, -8)[: n - 8], ups("exp_avg", offset=8)[: n - 8])


def test_a_count_that_is_none_draws_as_the_device_converts_it(isa):
    """To an int of 32 bits: what is too large to the largest, NaN to 0. Bias correction would show the count itself."""
    options = replace(ADAMW, bias_correction=False)

    def drawn(count: float) -> State:
        state = State.of(random_values(3000, seed=3), ALL_BF16)
        state.step.fill_(count)
        update(state, ALL_BF16, options, advance=False, seed=9, stochastic=ALL_BF16_FLAGS)
        return state.replaced(torch.Tensor.clone)

    def same(a: float, b: float) -> bool:
        return all(torch.equal(x, y) for (_, x), (_, y) in zip(drawn(a).tensors(), drawn(b).tensors(), strict=True))

    # Of the count 30 bits are left, so that -1 stands for the largest number.
    assert all(same(count, -1.0) for count in (2.0**31, 1e30, float("inf")))
    assert all(same(count, 0.0) for count in (float("nan"), float("-inf"), -1e30, 2.0**30))
    assert not same(0.0, -1.0)


def test_exact_numbers_stay_exact(isa):
    """Nothing is cut off: no draw changes anything."""
    for moments in (BF16, F16, U8):
        dtypes = Dtypes(BF16, F32, moments, moments)
        before = constant(5000, dtypes, 1.5, 0.5, 0.5, 0.25)
        assert set(before.values("exp_avg_sq").tolist()) == {0.25}
        for seed in range(3):
            after = updated(before, dtypes, KEEP, seed=seed, stochastic=ALL_BF16_FLAGS)
            after.step = before.step
            assert_same_bits(after, before, moments)


# Bits -----------------------------------------------------------------------------------------------------


def rounded_whole(shape: tuple[int, ...], dtypes: Dtypes, seed: int = 5) -> tuple[State, State]:
    """A tensor of that shape before and after a step with every flag; its tensors are flat."""
    before = State.of(random_values(int(np.prod(shape)), seed=8), dtypes, step=11)
    before.ordinal = 2**31 + 5
    return before, updated(before, dtypes, seed=seed, stochastic=ALL_BF16_FLAGS)


def cut_out(state: State, shape: tuple[int, ...], box: tuple[slice, ...]) -> State:
    return state.replaced(lambda tensor: tensor.view(shape)[box].contiguous().view(-1)).clone()


def contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    return [int(np.prod(shape[k + 1 :])) for k in range(len(shape))]


BOXES = [
    ((60, 37), (slice(20, 45), slice(None)), "Shard(0)"),
    ((60, 37), (slice(None), slice(5, 29)), "Shard(1)"),
    ((60, 37), (slice(None), slice(36, 37)), "one column"),
    ((60, 37), (slice(13, 50), slice(7, 8 + 16)), "Shard(0) and Shard(1)"),
    ((3, 700), (slice(None), slice(129, 700)), "vectors that cross a row"),
    ((7, 9, 11), (slice(2, 6), slice(1, 8), slice(3, 10)), "three dimensions"),
    ((700, 3), (slice(1, 699), slice(1, 3)), "rows of two"),
]


def maps_of(shape: tuple[int, ...], local: np.ndarray) -> list[IndexMap]:
    """The map of a box of the tensor, told in each way that its dimensions allow."""
    offset, strides = int(local.flat[0]), contiguous_strides(shape)
    if local.ndim == 3:
        return [IndexMap(*local.shape[1:], *strides, offset)]
    rows, columns = strides
    return [
        IndexMap(1, local.shape[1], rows, 0, columns, offset),
        IndexMap(local.shape[1], 1, rows, columns, 0, offset),
    ]


@pytest.mark.parametrize("shape, box", [(s, b) for s, b, _ in BOXES], ids=[name for *_, name in BOXES])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_shards_bits_are_those_of_the_whole(shape, box, threads, isa):
    before, after = rounded_whole(shape, ALL_BF16)
    want = cut_out(after, shape, box)
    for index_map in maps_of(shape, np.arange(np.prod(shape)).reshape(shape)[box]):
        shard = cut_out(before, shape, box)
        shard.index_map = index_map
        update(shard, ALL_BF16, seed=5, stochastic=ALL_BF16_FLAGS, threads=threads)
        assert_same_bits(shard, want, index_map)
    # And the map matters.
    wrong = cut_out(before, shape, box)
    wrong.index_map = IndexMap(offset=1)
    assert difference(updated(wrong, ALL_BF16, seed=5, stochastic=ALL_BF16_FLAGS), want)


def test_a_ragged_shard_is_a_row_a_run():
    before, after = rounded_whole((1000,), ALL_BF16)
    runs = [(3, 40), (41, 300), (555, 1000)]
    pieces = [before[a:b].clone() for a, b in runs]
    for piece, (a, _) in zip(pieces, runs, strict=True):
        piece.first, piece.index_map = 0, IndexMap(offset=a)
        piece.step = pieces[0].step
    pieces[0].step += 1
    update(pieces, ALL_BF16, seed=5, stochastic=ALL_BF16_FLAGS, advance=False)
    for piece, (a, b) in zip(pieces, runs, strict=True):
        assert_same_bits(piece, after[a:b])


def test_a_transposed_layout_has_the_bits_of_its_indices(isa):
    """Memory order is not index order: the inner level strides over the whole tensor."""
    rows, columns = 30, 70
    before, after = rounded_whole((rows, columns), ALL_BF16)
    turned = before.replaced(lambda t: t.view(rows, columns).t().contiguous().view(-1)).clone()
    want = after.replaced(lambda t: t.view(rows, columns).t().contiguous().view(-1))
    turned.index_map = IndexMap(1, rows, 1, 0, columns)
    update(turned, ALL_BF16, seed=5, stochastic=ALL_BF16_FLAGS)
    assert_same_bits(turned, want)


@pytest.mark.parametrize("moments", [F16, U8], ids=["fp16", "fp8"])
def test_dithered_rows_of_whole_blocks_are_those_of_the_whole_tensor(moments, isa):
    """Shard(0) whose rows are blocks: even scaled formats keep their bits."""
    shape = (12, 256)
    dtypes = Dtypes(F32, F32, moments, moments)
    before = State.of(random_values(shape[0] * shape[1], seed=8), dtypes, step=11)
    after = updated(before, dtypes, seed=5, stochastic=1)
    a, b = 4 * 256, 9 * 256
    shard = before[a:b].clone()
    shard.scales = {name: scale[4:9].clone() for name, scale in shard.scales.items()}
    shard.first, shard.index_map = 0, IndexMap(offset=a)
    update(shard, dtypes, seed=5, stochastic=1)
    for name, tensor in shard.tensors():
        np.testing.assert_array_equal(bits(tensor), bits(getattr(after, name)[a:b]))
    for name, scale in shard.scales.items():
        assert torch.equal(scale, after.scales[name][4:9])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_and_isas_change_no_draw(threads, isa):
    n = 2 * CHUNK + 1001
    before = State.of(random_values(n, seed=3, specials=0.01), ALL_BF16, step=2)
    before.index_map = IndexMap(1, 777, 5000, 0, 1, 12345)
    got = updated(before, ALL_BF16, seed=77, stochastic=ALL_BF16_FLAGS, threads=threads)
    x = np.arange(n)
    indices = 12345 + x // 777 * 5000 + x % 777
    exact = exact_step(before)
    for tensor, name in enumerate(TENSORS):
        drawn = judge.random_bits(77, 0, tensor, 3, indices)
        finite = np.isfinite(exact[name])
        up = (exact[name].view(np.uint32) & 0xFFFF) + drawn >= 0x10000
        want = (exact[name].view(np.uint32) >> 16) + up
        normal = finite & (np.abs(exact[name]) < 3.3e38)
        np.testing.assert_array_equal(bits(getattr(got, name))[normal], want[normal])


# What it is for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [2.0**-20, 3e-7, 1e-3])
def test_bfloat16_second_moments_arrive_where_to_nearest_they_stall_at_a_third(grad, isa):
    steps, n = 2000, 4096
    grad = float(torch.tensor(grad).to(BF16))
    options = replace(ADAMW, weight_decay=0.0)
    start = constant(n, ALL_BF16, 0.0, grad, 0.0, 0.0)
    start.step.zero_()
    nearest, stochastic = start[:16].clone(), start.clone()
    for _ in range(steps):
        update(stochastic, ALL_BF16, options, seed=1, stochastic=3)
        update(nearest, ALL_BF16, options)
    in_fp32 = grad**2 * (1 - 0.999**steps)
    mean = stochastic.exp_avg_sq.double().mean().item()
    print(f"grad {grad:.3g}: {mean / in_fp32:.4f} of FP32's, to nearest {nearest.exp_avg_sq[0].item() / in_fp32:.3f}")
    assert mean == pytest.approx(in_fp32, rel=0.01)
    assert stochastic.exp_avg.double().mean().item() == pytest.approx(grad, rel=0.01)
    assert nearest.exp_avg_sq[0].item() < 0.5 * in_fp32


@pytest.mark.parametrize("moments", [F16, U8], ids=["fp16", "fp8"])
def test_scaled_second_moments_never_stall(moments, isa):
    """They are dithered without being asked: up from nothing, and down again when gradients get small."""
    n, steps = 4096, 2000
    dtypes = Dtypes(F32, F32, F32, moments)
    options = replace(ADAMW, weight_decay=0.0)
    state = constant(n, dtypes, 0.0, 0.37, 0.0, 0.0)
    state.step.zero_()
    v = 0.0
    for grad in (0.37, 0.037):
        state.grad.fill_(grad)
        for _ in range(steps):
            update(state, dtypes, options, seed=3)
            v += 0.001 * (float(np.float32(grad)) ** 2 - v)
        root = stored_units(state, "exp_avg_sq").mean()
        # Of FP8 a root is told by an eighth; its mean over many is what is unbiased.
        assert root == pytest.approx(np.sqrt(v), rel=0.01 if moments is F16 else 0.05), (grad, moments)


def test_a_bfloat16_weight_moves_by_less_than_half_a_unit_on_average(isa):
    n, steps = 4096, 200
    dtypes = Dtypes(BF16, F32, F32, F32)
    options = replace(ADAMW, lr=1e-4, weight_decay=0.0)
    start = constant(n, dtypes, 1.0, 0.5, 0.0, 0.0)
    start.step.zero_()
    nearest, stochastic = start.clone(), start.clone()
    for _ in range(steps):
        update(nearest, dtypes, options)
        update(stochastic, dtypes, options, seed=2, stochastic=4)
    assert (nearest.param == 1.0).all()
    moved = 1.0 - stochastic.param.double().numpy()
    # A draw a step of at most 2^-8: the mean's sigma is far below what is asked.
    assert moved.mean() == pytest.approx(steps * 1e-4, rel=0.05)
