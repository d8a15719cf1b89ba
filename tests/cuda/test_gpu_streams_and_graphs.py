"""Kernels run on the caller's stream, and inside CUDA graphs."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import ALL_BF16, ALL_FORMATS, GPU, OPTIONS, SCALED_BF16, Tensors, assert_same_bits, name_of, step
from statestream import FusedAdam, kernels
from statestream.kernels import DeviceScalars

LENGTHS = [1, 7, 8, 1000, 70001]


def busy(milliseconds: int) -> None:
    """Keeps the current stream from what is queued after it."""
    torch.cuda._sleep(milliseconds * 2_000_000)


def test_a_side_stream_orders_the_step_after_its_own_work():
    want = Tensors.random(ALL_BF16, LENGTHS, seed=1)
    got = want.to(GPU)
    gradients = [g.clone() for g in got.roles[1]]
    for g in got.roles[1]:
        g.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy(100)
        for g, late in zip(got.roles[1], gradients, strict=True):
            g.copy_(late)
        step(got)
    torch.cuda.synchronize()
    step(want)
    assert_same_bits(got, want)


def test_a_step_on_another_stream_does_not_wait():
    """The control of the test above: without the order it sees the old gradients."""
    want = Tensors.random(ALL_BF16, LENGTHS, seed=1)
    got = want.to(GPU)
    late = [g.clone() for g in got.roles[1]]
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        busy(200)
        for g, new in zip(got.roles[1], late, strict=True):
            g.copy_(new.neg())
    with torch.cuda.stream(second):
        step(got)
    second.synchronize()
    step(want)
    assert_same_bits(Tensors(got.dtypes, [got.roles[0]], []), Tensors(want.dtypes, [want.roles[0]], []))


def test_a_call_does_not_synchronise():
    got = Tensors.random(ALL_BF16, LENGTHS, seed=1).to(GPU)
    step(got)
    torch.cuda.synchronize()
    busy(300)
    step(got)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtypes", [ALL_FORMATS[0], ALL_BF16, ALL_FORMATS[-1], SCALED_BF16], ids=name_of)
def test_a_graph_replays_with_the_values_of_its_scalars(dtypes):
    """Steps are counted, lr, grad_scale and found_inf are read, and random bits are of the step, at each replay."""
    want = Tensors.random(dtypes, [*LENGTHS, *range(1, 700)], seed=2)
    got = want.to(GPU, steps_on_device=True)
    lr, scale, found_inf = (torch.zeros((), device=GPU) for _ in range(3))
    scalars = DeviceScalars(lr, scale, found_inf)
    warm = Tensors.random(dtypes, LENGTHS, seed=3).to(GPU, steps_on_device=True)
    step(warm, scalars=DeviceScalars())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(got, scalars=scalars)
    junk = [torch.full((1 << 16,), float("nan"), device=GPU) for _ in range(64)]  # over what the capture freed
    assert_same_bits(got, want)  # capturing runs nothing
    for k in range(6):
        lr.fill_(1e-3 * (k + 1))
        scale.fill_(2.0**k)
        found_inf.fill_(float(k == 3))
        graph.replay()
        if k != 3:
            step(want, replace(OPTIONS, lr=lr.item()), grad_scale=2.0**k)
        for tensors in (got, want):
            torch._foreach_mul_(tensors.roles[1], -0.5)
    del junk
    assert_same_bits(got, want)


def test_a_step_that_is_not_capturable_is_refused_by_no_one_but_counts_on_the_host():
    """Host counters are baked into a graph: each replay repeats the captured step's number."""
    got = Tensors.random(ALL_BF16, LENGTHS, seed=1).to(GPU)
    step(got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(got)
    graph.replay()
    graph.replay()
    assert got.steps[0].item() == 2.0


@pytest.mark.parametrize("master", [False, True])
def test_fused_adam_in_a_graph_is_fused_adam_outside(master):
    def optimizer(capturable):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(n, device=GPU, dtype=torch.bfloat16)) for n in (5, 1000, 70001)]
        for p in params:
            p.grad = torch.randn_like(p)
        options = {"lr": 1e-2, "weight_decay": 0.1, "master_weights": master, "exp_avg_dtype": "bf16"}
        return params, FusedAdam(params, capturable=capturable, **options)

    eager_params, eager = optimizer(False)
    graph_params, captured = optimizer(True)
    eager.step()
    captured.step()  # makes the state, before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for k in range(5):
        for group in (*eager.param_groups, *captured.param_groups):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(1e-2 / (k + 1))
            else:
                group["lr"] = torch.tensor(1e-2 / (k + 1)).item()
        graph.replay()
        eager.step()
        for ours, theirs in zip(graph_params, eager_params, strict=True):
            ours.grad.mul_(-0.9)
            theirs.grad.mul_(-0.9)
    for ours, theirs in zip(graph_params, eager_params, strict=True):
        assert torch.equal(ours, theirs)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(captured.state[ours][name], eager.state[theirs][name])
        assert captured.state[ours]["step"].item() == eager.state[theirs]["step"].item() == 6
    assert captured.param_groups[0]["step"].item() == eager.param_groups[0]["step"] == 6


def test_scalars_on_another_device_are_refused():
    got = Tensors.random(ALL_BF16, LENGTHS, seed=1).to(GPU, steps_on_device=True)
    with pytest.raises(ValueError, match=r"expected a torch\.float32 scalar on cuda:0, found torch\.float32 on cpu"):
        step(got, scalars=DeviceScalars(lr=torch.tensor(1.0)))
    with pytest.raises(ValueError, match="found_inf: found torch"):
        DeviceScalars(found_inf=torch.tensor(1, device=GPU, dtype=torch.int32))
    assert kernels.has_adam(GPU, got.formats)
