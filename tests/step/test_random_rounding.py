"""stochastic_rounding of FusedAdam: what it rounds, by which bits, and what they hang on."""

import copy
import math
import pickle

import pytest
import torch
from distributed.test_sharding import world
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import BF16, FP8, FP16, FP32
from helpers.stored import decoded
from statestream import FusedAdam, kernels
from statestream.tensors.global_index import runs_of
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

ALL = ("exp_avg", "exp_avg_sq", "param")


def parameter(shape=(40, 30), dtype=BF16, seed=0):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def gradient(param, step, seed=0):
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * step + seed))
    return torch.empty_like(param, requires_grad=False).copy_(values)


def train(optimizer, steps=3):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = gradient(param, step, i)
        optimizer.step()


def run(param, **arguments):
    optimizer = FusedAdam([param], lr=0.01, **{"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, **arguments})
    train(optimizer)
    return {"param": param.detach(), **{k: v for k, v in optimizer.state[param].items() if k != "step"}}


def unlike(a, b):
    return {name for name in a if not same_bits(a[name], b[name])}


# ---- what is rounded ----


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (False, set()),
        ([], set()),
        (True, set(ALL)),
        (ALL, set(ALL)),
        (["exp_avg"], {"exp_avg", "param"}),  # a weight takes another way once its moments have
        (["exp_avg_sq"], {"exp_avg_sq", "param"}),
        (["param"], {"param"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_what_is_named_is_rounded_by_random_bits(asked, changes):
    assert unlike(run(parameter()), run(parameter(), stochastic_rounding=asked)) == changes


def test_everything_is_all_that_loses_bits():
    masters = {"master_weights": True, "master_weight_dtype": FP32}
    nearest = run(parameter(), **masters, exp_avg_sq_dtype=FP32)
    found = run(parameter(), **masters, exp_avg_sq_dtype=FP32, stochastic_rounding=True)
    assert "exp_avg" in unlike(nearest, found)
    # The master and the FP32 moment hold every bit of their values: the same as those of a run of exact moments, but
    # for what a rounded exp_avg brings in.
    for name in ("exp_avg_sq",):
        assert same_bits(nearest[name], found[name])
    exact = {"exp_avg_dtype": FP32, "exp_avg_sq_dtype": FP32}
    assert (
        unlike(run(parameter(dtype=FP32), **exact), run(parameter(dtype=FP32), **exact, stochastic_rounding=True))
        == set()
    )
    assert (
        unlike(run(parameter(), **exact, **masters), run(parameter(), **exact, **masters, stochastic_rounding=True))
        == set()
    )
    half = parameter(dtype=FP16)
    assert "param" not in unlike(run(half, **exact), run(parameter(dtype=FP16), **exact, stochastic_rounding=True))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP8], ids=str)
def test_a_rounded_value_is_one_of_its_two_neighbours_and_the_mean_is_the_value(dtype):
    n = 200_000
    param = torch.nn.Parameter(torch.zeros(n))
    optimizer = FusedAdam([param], lr=0.0, betas=(0.9, 0.999), exp_avg_dtype=dtype, stochastic_rounding=["exp_avg"])
    param.grad = torch.full((n,), 0.123456)
    param.grad[0::256] = 1.0  # every block has the same scale
    optimizer.step()
    # from zero: (1 - beta1) * g, in FP32
    value = torch.tensor(0.1) * torch.tensor(0.123456)
    found = decoded(optimizer, param, "exp_avg").view(-1)
    found = found[torch.arange(n) % 256 != 0].double()
    low, high = found.unique().tolist()
    assert low < value.item() < high
    up = (value.item() - low) / (high - low)
    share = (found == high).double().mean().item()
    assert abs(share - up) < 4 * math.sqrt(up * (1 - up) / found.numel()) + 2.0**-16


def test_two_thousand_small_steps_keep_a_second_moment_that_nearest_rounding_loses():
    values = {}
    for asked in (False, True):
        param = torch.nn.Parameter(torch.zeros(4096))
        optimizer = FusedAdam([param], lr=1e-5, exp_avg_sq_dtype=BF16, stochastic_rounding=asked and ["exp_avg_sq"])
        param.grad = torch.full((4096,), 1e-4)
        for _ in range(2000):
            optimizer.step()
        values[asked] = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    truth = 1e-8 * (1 - 0.999**2000)
    assert abs(values[True] - truth) < 0.01 * truth
    assert values[False] < 0.6 * truth


@pytest.mark.parametrize("dtype", [FP16, FP8], ids=str)
def test_a_scaled_second_moment_is_kept_without_asking(dtype):
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = FusedAdam([param], lr=1e-5, exp_avg_sq_dtype=dtype)
    param.grad = torch.full((4096,), 1e-4)
    for _ in range(2000):
        optimizer.step()
    # It is the root that is kept on average; its square comes out higher by the root's variance.
    truth = math.sqrt(1e-8 * (1 - 0.999**2000))
    assert abs(decoded(optimizer, param, "exp_avg_sq").double().sqrt().mean().item() - truth) < 0.01 * truth


# ---- what the bits hang on ----


@pytest.mark.parametrize("moments", [BF16, FP8], ids=str)
def test_the_seed_decides_and_is_zero_by_default(moments):
    arguments = {"stochastic_rounding": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    default = run(parameter(), **arguments)
    assert unlike(default, run(parameter(), **arguments, seed=0)) == set()
    assert unlike(default, run(parameter(), **arguments, seed=1)) == {"exp_avg", "exp_avg_sq", "param"}
    assert unlike(default, run(parameter(), **arguments, seed=2**64 - 1)) == {"exp_avg", "exp_avg_sq", "param"}


def test_equal_parameters_are_rounded_by_bits_of_their_own():
    a, b = parameter(), parameter()
    optimizer = FusedAdam([a, b], lr=0.01, stochastic_rounding=["param"])
    a.grad, b.grad = gradient(a, 0), gradient(b, 0)
    optimizer.step()
    assert not same_bits(a, b)


@pytest.mark.parametrize("exp_avg_sq", [BF16, FP8], ids=str)
def test_how_parameters_are_grouped_changes_no_bit(exp_avg_sq):
    def trained(cuts):
        params = [parameter(seed=i) for i in range(4)]
        groups = [{"params": params[i:j]} for i, j in zip((0, *cuts), (*cuts, 4), strict=True)]
        formats = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": exp_avg_sq}
        optimizer = FusedAdam(groups, lr=0.01, **formats, stochastic_rounding=True)
        train(optimizer)
        return params

    whole = trained(())
    for cuts in ((1,), (2,), (1, 2, 3), (0, 4)):
        assert all(same_bits(a, b) for a, b in zip(whole, trained(cuts), strict=True)), cuts


def test_a_parameter_without_gradient_changes_no_others_bits():
    def trained(missing):
        params = [parameter(seed=i) for i in range(3)]
        optimizer = FusedAdam(params, lr=0.01, exp_avg_dtype=BF16, stochastic_rounding=True)
        for param in params[missing:]:
            param.grad = gradient(param, 0, 5)
        optimizer.step()
        return params

    assert all(same_bits(a, b) for a, b in zip(trained(0)[1:], trained(1)[1:], strict=True))


LAYOUTS = {
    "transposed": ((40, 30), lambda p: p.t().contiguous().t()),
    "channels_last": ((4, 6, 5, 7), lambda p: p.to(memory_format=torch.channels_last)),
    "permuted": ((4, 6, 5, 7), lambda p: p.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)),
    "five dimensions": ((3, 4, 2, 5, 3), lambda p: p.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)),
    "at an odd offset": ((40, 30), lambda p: torch.cat([torch.zeros(1, dtype=p.dtype), p.flatten()])[1:].view(40, 30)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_elements_bits_are_those_of_its_index_wherever_it_lies_in_memory(layout):
    shape, laid_out = LAYOUTS[layout]
    arguments = {"stochastic_rounding": True}
    plain = run(parameter(shape), **arguments)
    moved = run(torch.nn.Parameter(laid_out(parameter(shape).detach())), **arguments)
    assert moved["param"].stride() != plain["param"].stride() or moved["param"].storage_offset()
    assert unlike(plain, moved) == set()


@pytest.mark.parametrize("moments", [BF16, FP8], ids=str)
def test_capturable_and_tensors_for_lr_change_no_bit(moments):
    arguments = {"stochastic_rounding": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    plain = run(parameter(), **arguments)
    assert unlike(plain, run(parameter(), **arguments, capturable=True)) == set()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("moments", [BF16, FP8], ids=str)
def test_a_copy_goes_on_with_the_same_bits(how, moments):
    params = [parameter(seed=i) for i in range(2)]
    optimizer = FusedAdam(
        params, lr=0.01, exp_avg_dtype=moments, exp_avg_sq_dtype=moments, stochastic_rounding=True, seed=7
    )
    train(optimizer)
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert differences(snapshot(optimizer), snapshot(twin)) == []
    train(optimizer)
    train(twin)
    assert differences(snapshot(optimizer), snapshot(twin)) == []
    assert not same_bits(params[0], parameter())


def test_neither_seed_nor_scales_are_in_a_state_dict():
    param = parameter()
    optimizer = FusedAdam([param], exp_avg_dtype=FP8, exp_avg_sq_dtype=FP16, stochastic_rounding=True, seed=7)
    train(optimizer)
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"} == set(optimizer.state[param])
    assert all(value.dtype is FP32 for value in saved["state"][0].values())
    plain = FusedAdam([parameter()])
    assert set(saved["param_groups"][0]) == set(plain.state_dict()["param_groups"][0])


def test_control_a_wrong_index_is_seen(monkeypatch):
    from statestream.adam import state_backend
    from statestream.tensors.global_index import WHOLE, Run

    monkeypatch.setattr(state_backend, "runs_of", lambda param: (Run(0, param.numel(), WHOLE),))
    with pytest.raises(AssertionError):
        test_an_elements_bits_are_those_of_its_index_wherever_it_lies_in_memory("transposed")


def test_a_later_parameter_of_a_later_group_keeps_its_bits_where_it_is_looked_at_by_itself():
    """Strides that leave holes are brought in order in Python."""

    def trained(with_holes):
        params = [parameter(seed=i) for i in range(3)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = FusedAdam(groups, lr=0.01, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16, stochastic_rounding=True)
        for i, param in enumerate(params):
            param.grad = gradient(param, 0, i)
        last = params[-1]
        if with_holes:
            last.grad = torch.stack([last.grad, last.grad], -1)[..., 0]
        optimizer.step()
        return [last.detach(), *(optimizer.state[last][name] for name in ("exp_avg", "exp_avg_sq"))]

    assert all(same_bits(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_a_shard_of_several_runs_is_not_counted_where_the_kernel_fails(monkeypatch):
    """Its counter is advanced beside the kernel, which takes it as several rows."""
    with world(0, (2, 2)) as mesh:
        # Rows 0, 1, 2, 5 and 6 of 9, and two columns: steps that differ.
        whole = {"shape": torch.Size((9, 4)), "stride": (4, 1), "run_check": False}
        local = DTensor.from_local(
            parameter((5, 2)).detach(), mesh, (_StridedShard(0, split_factor=2), Shard(1)), **whole
        )
        param = torch.nn.Parameter(local)
        assert len(runs_of(param)) == 2
        optimizer = FusedAdam([param], exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16, stochastic_rounding=True)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.state[param]["step"] == 1

        def fails(*_, **__):
            raise RuntimeError("no kernel")

        monkeypatch.setattr(kernels, "adam", fails)
        with pytest.raises(RuntimeError, match="no kernel"):
            optimizer.step()
        assert optimizer.state[param]["step"] == 1


def test_a_gradient_that_is_laid_out_otherwise_than_its_parameter_gives_the_same_bits():
    def trained(laid_out):
        param = torch.nn.Parameter(parameter().detach().t().contiguous().t())
        optimizer = FusedAdam([param], lr=0.01, exp_avg_dtype=BF16, stochastic_rounding=True)
        param.grad = laid_out(gradient(param, 0))
        optimizer.step()
        return param.detach()

    assert same_bits(trained(lambda grad: grad), trained(torch.Tensor.contiguous))
