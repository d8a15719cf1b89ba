"""The kernels on a GPU give the CPU kernel's bits."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import (
    ALL_BF16,
    ALL_FORMATS,
    BULK,
    GENERIC_FORMATS,
    GPU,
    OPTIONS,
    SCALED_BF16,
    Tensors,
    assert_equal_bits,
    assert_same_bits,
    flags_of,
    name_of,
    step,
)
from statestream import kernels
from statestream.formats import scale_count
from statestream.kernels import DeviceScalars

CHUNKS = (1, 2, 8) if BULK == 1 else (1, 2)
LENGTHS = [*range(131), 4095, 4096, 4097, *(k * 8192 + d for k in CHUNKS for d in (-9, -1, 0, 1, 7, 9))]


@pytest.mark.parametrize("dtypes", ALL_FORMATS, ids=name_of)
@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("any_bits", [False, True], ids=["ordinary", "any_bits"])
def test_step_has_the_cpus_bits(dtypes, shift, any_bits):
    for seed, options in enumerate(
        [
            OPTIONS,
            replace(OPTIONS, decoupled=False, maximize=True),
            replace(OPTIONS, bias_correction=False, weight_decay=0.0, eps=0.0),
        ]
    ):
        want = Tensors.random(dtypes, LENGTHS, seed, any_bits=any_bits, shift=shift)
        got = want.to(GPU)
        for _ in range(3):
            step(want, options, grad_scale=8.0)
            step(got, options, grad_scale=8.0)
        assert_same_bits(got, want)


GENERIC_LENGTHS = [*range(20), *(k * 256 + d for k in (1, 2, 5) for d in (-9, -1, 0, 1, 8)), 8191, 8193, 70001]


@pytest.mark.parametrize("index", range(len(GENERIC_FORMATS)), ids=lambda i: name_of(GENERIC_FORMATS[i]))
def test_generic_step_has_the_cpus_bits(index):
    """To nearest and with every flag, on tensors that are somewhere in a whole one."""
    dtypes = GENERIC_FORMATS[index]
    short = replace(OPTIONS, beta1=0.3, beta2=0.4, decoupled=False, maximize=True)
    for stochastic in (0, flags_of(dtypes)):
        for any_bits, options in ((False, OPTIONS), (True, short)):
            want = Tensors.random(dtypes, GENERIC_LENGTHS, index, any_bits=any_bits, shift=(0, 1, 5)[index % 3])
            got = want.to(GPU)
            for _ in range(3):
                step(want, options, grad_scale=8.0, stochastic=stochastic)
                step(got, options, grad_scale=8.0, stochastic=stochastic)
            assert_same_bits(got, want)


@pytest.mark.parametrize("stochastic", range(1, 8))
def test_random_rounding_has_the_cpus_bits(stochastic):
    want = Tensors.random(ALL_BF16, [*GENERIC_LENGTHS, (1 << 20) // BULK], seed=1)
    got = want.to(GPU)
    for _ in range(3):
        step(want, stochastic=stochastic)
        step(got, stochastic=stochastic)
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtypes", [*ALL_FORMATS, *GENERIC_FORMATS[::17], SCALED_BF16], ids=name_of)
def test_capturable_step_has_the_cpus_bits(dtypes):
    want = Tensors.random(dtypes, LENGTHS, seed=1)
    got = want.to(GPU, steps_on_device=True)
    lr, scale, found_inf = (torch.tensor(x, device=GPU) for x in (0.003, 1024.0, 0.0))
    scalars = DeviceScalars(lr, scale, found_inf)
    for _ in range(3):
        step(want, replace(OPTIONS, lr=lr.item()), grad_scale=1024.0)
        step(got, replace(OPTIONS, lr=0.0), scalars=scalars)
    assert_same_bits(got, want)
    found_inf.fill_(1.0)
    step(got, scalars=scalars)
    assert_same_bits(got, want)
    found_inf.fill_(0.0)
    step(got, scalars=scalars, advance=False)
    step(want, replace(OPTIONS, lr=lr.item()), grad_scale=1024.0, advance=False)
    assert_same_bits(got, want)


@pytest.mark.parametrize("t", [1, 2, 3, 1000, 65535, 1 << 20, (1 << 24) - 1, 1 << 24])
def test_scalars_formed_on_the_device_are_the_hosts(t):
    """Of one element each, with many learning rates and betas: a scalar off by its last bit shows."""
    lengths = [64] * 8
    for k in range(20):
        options = replace(OPTIONS, lr=1e-5 * 1.7**k, beta1=0.8 + 0.009 * k, beta2=0.95 + 0.0024 * k, weight_decay=0.3)
        want = Tensors.random(ALL_FORMATS[0], lengths, seed=k)
        for counter in want.steps:
            counter.fill_(t - 1)
        got = want.to(GPU, steps_on_device=True)
        step(want, options)
        step(got, options, scalars=DeviceScalars())
        assert_same_bits(got, want)


def test_advance_steps_counts_unless_found_inf():
    counters = [torch.tensor(float(i), device=GPU) for i in range(4500)]
    found_inf = torch.tensor(1.0, device=GPU)
    kernels.advance_steps(GPU, counters, found_inf)
    assert torch.equal(torch.stack(counters).cpu(), torch.arange(4500.0))
    kernels.advance_steps(GPU, counters)
    assert torch.equal(torch.stack(counters).cpu(), torch.arange(4500.0) + 1)


@pytest.mark.parametrize("dtypes", [ALL_FORMATS[0], SCALED_BF16], ids=name_of)
def test_many_millions_of_ordinary_numbers(dtypes):
    """Division, square root and FP16 conversion of the hardware, in bulk."""
    want = Tensors.random(dtypes, [(1 << 24) // BULK], seed=3)
    got = want.to(GPU)
    for _ in range(2):
        step(want)
        step(got)
    assert_same_bits(got, want)


@pytest.mark.parametrize("eps", [0.0, 1e-45, 1e-30, 1e-8, 1.0])
def test_untouched_rows_stay_exact(eps):
    """Zero moments and gradients take a way of their own round the slow paths of division and square root."""
    want = Tensors.random(ALL_FORMATS[0], [4096, 4097], seed=4)
    for role in want.roles[1:]:
        for k, tensor in enumerate(role):
            tensor[k::3] = 0.0
            tensor[1::6] *= -0.0
    got = want.to(GPU)
    step(want, replace(OPTIONS, eps=eps))
    step(got, replace(OPTIONS, eps=eps))
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (3, 1), (0, 5)])
def test_conversions_have_the_cpus_bits(dtype, offsets):
    for n in [*range(131), 8191, 70001]:
        patterns = torch.randint(-(1 << 31), 1 << 31, (n + 8,), dtype=torch.int64).int().view(torch.float32)
        values, state = patterns[offsets[0] :][:n], torch.zeros(n + 8, dtype=dtype)[offsets[1] :][:n]
        on_gpu = torch.zeros(n + 8, dtype=dtype, device=GPU)[offsets[1] :][:n]
        kernels.encode(values, state)
        kernels.encode(patterns.to(GPU)[offsets[0] :][:n], on_gpu)
        assert_equal_bits(on_gpu, state)
        decoded, decoded_on_gpu = torch.empty(n), torch.empty(n, device=GPU)
        kernels.decode(state, decoded)
        kernels.decode(on_gpu, decoded_on_gpu)
        assert_equal_bits(decoded_on_gpu, decoded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
@pytest.mark.parametrize("root", [False, True], ids=["values", "roots"])
def test_scaled_conversions_have_the_cpus_bits(dtype, root):
    for n in [*range(20), 255, 256, 257, 8191, 70001]:
        patterns = torch.randint(-(1 << 31), 1 << 31, (n + 1,), dtype=torch.int64).int().view(torch.float32)
        values = patterns[1:] if n % 2 else patterns[:n]
        if root:
            values = values.abs()
        state, scale = torch.zeros(n, dtype=dtype), torch.zeros(scale_count(n))
        on_gpu, gpu_scale = state.to(GPU), scale.to(GPU)
        kernels.encode(values, state, scale=scale, root=root)
        kernels.encode(values.to(GPU), on_gpu, scale=gpu_scale, root=root)
        assert_equal_bits(on_gpu, state)
        assert_equal_bits(gpu_scale, scale)
        decoded, decoded_on_gpu = torch.empty(n), torch.empty(n, device=GPU)
        kernels.decode(state, decoded, scale=scale, root=root)
        kernels.decode(on_gpu, decoded_on_gpu, scale=gpu_scale, root=root)
        assert_equal_bits(decoded_on_gpu, decoded)


@pytest.mark.parametrize("root", [False, True], ids=["values", "roots"])
@pytest.mark.parametrize("exponent", [-60, -10, 0, 20])
def test_every_payload_decodes_as_on_the_cpu(exponent, root):
    for dtype, patterns in (
        (torch.float16, torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)),
        (torch.uint8, torch.arange(256, dtype=torch.uint8)),
    ):
        scale = torch.full((scale_count(patterns.numel()),), 2.0**exponent)
        decoded, on_gpu = torch.empty(patterns.numel()), torch.empty(patterns.numel(), device=GPU)
        kernels.decode(patterns, decoded, scale=scale, root=root)
        kernels.decode(patterns.to(GPU), on_gpu, scale=scale.to(GPU), root=root)
        assert_equal_bits(on_gpu, decoded, str(dtype))


@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", [torch.float32, torch.float16])
def test_masters_of_any_parameter_refresh_as_on_the_cpu(param, master):
    random = torch.Generator().manual_seed(6)
    for n in (1, 9, 256, 700, 70001):
        weights = torch.randn(n, generator=random).to(param)
        masters, scale = weights.to(master), torch.ones(scale_count(n))
        weights[256::3] += 1
        masters[5::11] *= 1.5
        got, got_scale = masters.to(GPU), scale.to(GPU)
        scales = ({"scale": scale}, {"scale": got_scale}) if master is torch.float16 else ({}, {})
        kernels.refresh_master(weights, masters, **scales[0])
        kernels.refresh_master(weights.to(GPU), got, **scales[1])
        assert_equal_bits(got, masters)
        assert_equal_bits(got_scale, scale)


def test_every_bfloat16_decodes_and_refreshes_as_on_the_cpu():
    weights = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    masters = torch.randint(-(1 << 31), 1 << 31, weights.shape, dtype=torch.int64).int().view(torch.float32)
    masters[::3] = weights[::3].float() * (1 + 2.0**-10)
    got = masters.to(GPU)
    kernels.refresh_master(weights, masters)
    kernels.refresh_master(weights.to(GPU), got)
    assert_equal_bits(got, masters)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_another_device_than_the_current_one():
    other = torch.device("cuda", 1)
    want = Tensors.random(ALL_BF16, LENGTHS, seed=1)
    got = want.to(other)
    with torch.cuda.device(0):
        torch.zeros(1, device="cuda:0")  # has a context
        step(got)
        assert torch.cuda.current_device() == 0
    step(want)
    assert_same_bits(got, want)


def test_a_tensor_may_have_more_than_two_to_the_31_elements():
    n = (1 << 31) + 8192 * 3 + 11
    if torch.cuda.mem_get_info()[0] < 4 * 2 * n + (1 << 30):
        pytest.skip(f"needs {(8 * n >> 30) + 1} GiB of free GPU memory")
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    big = {name: torch.zeros(n, dtype=torch.bfloat16, device=GPU) for name in names}
    windows = [slice(0, 5000), slice((1 << 31) - 3000, (1 << 31) + 3000), slice(n - 5000, n)]
    random = torch.Generator().manual_seed(5)
    for window in windows:
        for name in names:
            values = torch.randn(window.stop - window.start, generator=random).abs()
            big[name][window] = values.to(GPU, torch.bfloat16)
    small = [Tensors(ALL_BF16, [[big[name][w].cpu()] for name in names], [torch.tensor(0.0)]) for w in windows]
    step(Tensors(ALL_BF16, [[big[name]] for name in names], [torch.tensor(0.0)]))
    for window, want in zip(windows, small, strict=True):
        step(want)
        assert_same_bits(Tensors(ALL_BF16, [[big[name][window]] for name in names], want.steps), want)
    between = big["param"][1 << 20 : (1 << 20) + 100000]
    assert not between.any()  # zero weights with zero gradients
