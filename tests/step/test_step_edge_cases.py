"""Inputs to a step that have broken other optimizers."""

import time

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import FORMS, Mode
from helpers.stored import decoded
from helpers.training import gradient, train
from statestream import FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32

every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def with_capturable(forms):
    """Each form without and with capturable=True, which refuses remainders by name."""
    return [
        (form, capturable)
        for form in forms
        for capturable in (False, True)
        if not (capturable and form.master == "remainders")
    ]


def parameter(shape, dtype=FP32, seed=0):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


# ---- empty tensors and groups, gradients that come and go ----


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("position", range(40))
def test_an_empty_tensor_among_forty_changes_nothing(position, dtype):
    full = [parameter(3 + i, dtype, seed=i) for i in range(39)]
    same = [parameter(3 + i, dtype, seed=i) for i in range(39)]
    alone = FusedAdam(full, lr=0.1)
    mixed = FusedAdam([*same[:position], parameter(0, dtype), *same[position:]], lr=0.1)
    for step in range(2):
        for i, (a, b) in enumerate(zip(full, same, strict=True)):
            a.grad, b.grad = gradient(a, i, step), gradient(b, i, step)
        mixed.param_groups[0]["params"][position].grad = torch.zeros(0, dtype=dtype)
        alone.step()
        mixed.step()
    assert all(same_bits(a, b) for a, b in zip(full, same, strict=True))
    assert mixed.state[mixed.param_groups[0]["params"][position]]["step"].item() == 2


@every_form
def test_an_empty_tensor_alone_is_a_step_that_does_nothing(form):
    params = [parameter(0, dtype) for dtype in form.param_dtypes]
    optimizer = FusedAdam(params, **form.arguments)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert [optimizer.state[param]["step"].item() for param in params] == [1.0] * len(params)


def test_the_counter_of_an_empty_group_runs_with_the_others_and_is_saved():
    def make():
        return FusedAdam([{"params": [parameter(4)]}, {"params": [], "lr": 0.5}], lr=0.1)

    optimizer = make()
    train(optimizer, range(5))
    assert [group["step"] for group in optimizer.param_groups] == [5, 5]
    loaded = make()
    loaded.load_state_dict(optimizer.state_dict())
    assert [group["step"] for group in loaded.param_groups] == [5, 5]
    train(optimizer, range(5, 7))
    train(loaded, range(5, 7))
    assert [group["step"] for group in loaded.param_groups] == [7, 7]


@pytest.mark.parametrize("exp_avg_dtype", [FP32, BF16], ids=str)
def test_a_parameter_without_gradient_on_odd_steps_is_counted_as_torch_counts_it(exp_avg_dtype):
    def run(chosen, steps=7):
        params = [parameter(9, (FP32, BF16, BF16)[i], seed=i) for i in range(3)]
        optimizer = FusedAdam([params[i] for i in chosen], lr=0.1, exp_avg_dtype=exp_avg_dtype, master_weights=True)
        for step in range(steps):
            for i in chosen:
                params[i].grad = None if i == 1 and step % 2 else gradient(params[i], i, step)
            optimizer.step()
        return optimizer, [params[i] for i in chosen]

    together, params = run([0, 1, 2])
    assert [together.state[p]["step"].item() for p in params] == [7, 4, 7]
    assert together.param_groups[0]["step"] == 7
    reference = torch.optim.AdamW([parameter(9)])
    assert reference.param_groups[0].get("step") is None  # torch counts by parameter alone
    for i in range(3):
        alone, (param,) = run([i])
        assert same_bits(param, params[i])
        for name, value in alone.state[param].items():
            assert same_bits(value, together.state[params[i]][name]), name


# ---- where a vector begins and ends ----

LENGTHS = [*range(1, 131), 4095, 4096, 4097]
OFFSETS = range(18)


@pytest.mark.parametrize(
    "form", [f for f in FORMS if f.param is not None and not (f.has_scales or f.is_random)], ids=str
)
def test_every_length_at_every_offset_has_the_bits_of_one_long_tensor(form):
    dtype, longest = form.param, LENGTHS[-1]
    values = torch.randn(longest, generator=torch.Generator().manual_seed(1)).to(dtype)
    guard = 31.0

    def run(places):
        bases = [torch.full((longest + 40,), guard, dtype=dtype) for _ in places]
        params = []
        for base, (offset, length) in zip(bases, places, strict=True):
            base[offset : offset + length] = values[:length]
            params.append(torch.nn.Parameter(base[offset : offset + length]))
        optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1, **form.arguments)
        for step in range(2):
            whole = gradient(values, 0, step)
            for param, (offset, length) in zip(params, places, strict=True):
                storage = torch.zeros(length + 40, dtype=dtype)
                storage[offset + 1 : offset + 1 + length] = whole[:length]
                param.grad = storage[offset + 1 : offset + 1 + length]
            optimizer.step()
        return bases, params, optimizer

    _, (whole,), reference = run([(0, longest)])
    assert not torch.equal(whole, values)
    places = [(offset, length) for length in LENGTHS for offset in OFFSETS if length < 4095 or offset % 6 < 2]
    for chunk in range(0, len(places), 200):
        chosen = places[chunk : chunk + 200]
        bases, params, optimizer = run(chosen)
        for base, param, (offset, length) in zip(bases, params, chosen, strict=True):
            assert same_bits(param, whole[:length]), (offset, length)
            for name, value in reference.state[whole].items():
                if name != "step":
                    assert same_bits(optimizer.state[param][name], value[:length]), (name, offset, length)
            untouched = torch.cat([base[:offset], base[offset + length :]])
            assert torch.all(untouched == guard), (offset, length)


# ---- the closed form of one step ----


@pytest.mark.parametrize("form, capturable", with_capturable(FORMS), ids=str)
@pytest.mark.parametrize("decoupled_grad", [False, True])
def test_weight_decay_comes_before_the_update(form, capturable, decoupled_grad):
    for dtype in form.param_dtypes:
        param = torch.nn.Parameter(torch.ones(100, dtype=dtype))
        optimizer = FusedAdam(
            [param],
            lr=0.1,
            weight_decay=0.5,
            capturable=capturable,
            use_decoupled_grad=decoupled_grad,
            **form.arguments,
        )
        setattr(param, "decoupled_grad" if decoupled_grad else "grad", torch.full((100,), 3.0, dtype=dtype))
        optimizer.step()
        # 1 * (1 - lr * wd) - lr * 1: the first step of Adam is the sign of the gradient.
        by_random_bits = dtype is BF16 and form.by_random_bits("param")
        tolerance = 2e-7 if dtype is FP32 else 2.0**-8 if by_random_bits else 2.0**-9
        assert (param.float() - 0.85).abs().max() <= tolerance
        assert by_random_bits or torch.all(param == param[0])


# ---- layouts ----


def two_alike(make):
    """The same parameter in an odd layout and contiguous."""
    odd = torch.nn.Parameter(make())
    plain = torch.nn.Parameter(odd.detach().clone(memory_format=torch.contiguous_format))
    return odd, plain


LAYOUTS = {
    "transposed": lambda: torch.randn(6, 5).t(),
    "channels_last": lambda: torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "size-1 dims of odd stride": lambda: torch.randn(12).as_strided((1, 4, 1, 3), (77, 3, 5, 1)),
    "size-1 dim of stride 0": lambda: torch.randn(7).as_strided((7, 1), (1, 0)),
}
GRADIENTS = {
    "as the parameter": lambda p, g: torch.empty_like(p).copy_(g),
    "contiguous": lambda p, g: g.contiguous(),
    "every other element": lambda p, g: torch.zeros(*g.shape, 2)[..., 0].copy_(g),
    "transposed": lambda p, g: g.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.mark.parametrize("grad", GRADIENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("master", [None, "fp32", "remainders"])
def test_elements_of_any_dense_layout_keep_their_places(layout, grad, master):
    torch.manual_seed(0)
    dtype = FP32 if master is None else BF16
    odd, plain = two_alike(lambda: LAYOUTS[layout]().to(dtype))
    arguments = {"lr": 0.1, "weight_decay": 0.1, **Mode(dtype, BF16, FP32, master).arguments}
    first, second = FusedAdam([odd], **arguments), FusedAdam([plain], **arguments)
    for step in range(3):
        g = torch.randn(odd.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        odd.grad, plain.grad = GRADIENTS[grad](odd, g).to(dtype), g.clone()
        first.step()
        second.step()
    assert same_bits(odd, plain)
    for name in first.state[odd]:
        assert same_bits(first.state[odd][name], second.state[plain][name]), name


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_an_expanded_gradient_counts_for_every_element(dtype):
    first, second = parameter((5, 4), dtype), parameter((5, 4), dtype)
    first.grad, second.grad = torch.tensor([[2.0]], dtype=dtype).expand(5, 4), torch.full((5, 4), 2.0, dtype=dtype)
    for param in (first, second):
        FusedAdam([param], lr=0.1).step()
    assert same_bits(first, second)


HOLED = {
    "every other column": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "overlapping": lambda: torch.randn(6).as_strided((4, 3), (1, 1)),
}


@pytest.mark.parametrize("layout", HOLED)
def test_a_parameter_with_holes_or_overlaps_is_one_error_and_nothing_changes(layout):
    good, bad = parameter(4), torch.nn.Parameter(HOLED[layout]())
    optimizer = FusedAdam([("fine", good), ("holed", bad)], lr=0.1)
    good.grad, bad.grad = torch.ones(4), torch.ones(bad.shape)
    before = good.detach().clone(), bad.detach().clone()
    with pytest.raises(ValueError, match=r"'holed'.*stride"):
        optimizer.step()
    assert same_bits(good, before[0]) and same_bits(bad, before[1])
    assert optimizer.param_groups[0]["step"] == 0 and optimizer.state[good]["step"].item() == 0
    bad.grad = None
    optimizer.step()
    assert not torch.equal(good, before[0]) and same_bits(bad, before[1])


# ---- dtypes of parameter and gradient ----


@pytest.mark.parametrize("grad_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mode, capturable", with_capturable([f for f in FORMS if f.param is not None]), ids=str)
def test_any_gradient_dtype_is_taken_on_every_path(mode, capturable, grad_dtype):
    dtype = mode.param
    ours, same = parameter(37, dtype), parameter(37, dtype)
    value = torch.randn(37, generator=torch.Generator().manual_seed(5)).to(BF16)  # exact in both dtypes
    results = []
    for param, form in ((ours, grad_dtype), (same, dtype)):
        optimizer = FusedAdam([param], lr=0.1, use_decoupled_grad=True, capturable=capturable, **mode.arguments)
        for _ in range(2):
            param.decoupled_grad = value.to(form)
            optimizer.step()
        results.append(optimizer.state[param])
    assert same_bits(ours, same)
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])


def test_a_decoupled_gradient_is_the_one_that_is_read():
    param, other = parameter(5), parameter(5)
    param.grad, param.decoupled_grad = torch.ones(5), -torch.ones(5, dtype=BF16)
    FusedAdam([param], lr=0.1, use_decoupled_grad=True).step()
    other.grad = -torch.ones(5)
    FusedAdam([other], lr=0.1).step()
    assert same_bits(param, other)


# ---- values ----


@every_form
def test_rows_that_were_never_touched_only_decay(form):
    for dtype in form.param_dtypes:
        param = parameter((64, 16), dtype)
        before = param.detach().clone()
        optimizer = FusedAdam([param], lr=0.25, weight_decay=0.5, **form.arguments)
        grad = torch.zeros(64, 16, dtype=dtype)
        grad[7] = 1.0
        param.grad = grad
        optimizer.step()
        state, untouched = optimizer.state[param], [i for i in range(64) if i != 7]
        assert torch.all(state["exp_avg"][untouched] == 0) and torch.all(state["exp_avg_sq"][untouched] == 0)
        expected = before[untouched].float() * (1 - 0.25 * 0.5)  # one FP32 multiplication
        assert torch.isfinite(param).all() and torch.all(state["exp_avg"][7] != 0)
        if form.by_random_bits("param") and dtype is BF16:
            assert torch.all((param[untouched].float() - expected).abs() <= expected.abs() * 2.0**-7)
        elif form.master == "remainders" and dtype is BF16:
            rounded = (expected.view(torch.int32) + 0x8000) >> 16
            assert torch.equal(param[untouched].view(torch.int16).int() & 0xFFFF, rounded & 0xFFFF)
        else:
            assert same_bits(param[untouched], expected.to(dtype))


@pytest.mark.parametrize("what", ["weights", "second moments", "everything"])
@pytest.mark.parametrize("exp_avg_sq", [FP32, BF16], ids=str)
def test_zeros_are_not_slow(what, exp_avg_sq, monkeypatch):
    """Embedding rows that are never touched: zero moments under zero gradients take no slow path."""
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", "1")
    n = 1 << 19

    def seconds(zero):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(n) if zero and what != "second moments" else torch.randn(n))
        optimizer = FusedAdam([param], lr=1e-3, weight_decay=0.1, exp_avg_sq_dtype=exp_avg_sq)
        param.grad = torch.zeros(n) if zero and what != "weights" else torch.randn(n)
        times = []
        for _ in range(9):
            begin = time.process_time()
            optimizer.step()
            times.append(time.process_time() - begin)
        return min(times)

    assert seconds(zero=True) < 2 * seconds(zero=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@every_form
def test_a_gradient_that_is_no_number_propagates(form, value):
    for dtype in form.param_dtypes:
        param = parameter(50, dtype)
        param.grad = torch.ones(50, dtype=dtype)
        param.grad[17] = value
        optimizer = FusedAdam([param], lr=0.1, **form.arguments)
        optimizer.step()
        bad = torch.isnan(param)
        assert bad[17] and bad.sum() == 1  # inf / sqrt(inf) is no number either
        assert not torch.isfinite(decoded(optimizer, param, "exp_avg")[17])
        assert not torch.isfinite(decoded(optimizer, param, "exp_avg_sq")[17])
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.isfinite(decoded(optimizer, param, name)[18:]).all()


def test_constant_tiny_gradients_show_what_bfloat16_moments_lose():
    second_moment = {}
    for dtype in (FP32, BF16):
        param = torch.nn.Parameter(torch.zeros(8))
        optimizer = FusedAdam([param], lr=1e-5, exp_avg_sq_dtype=dtype)
        param.grad = torch.full((8,), 1e-4)
        for _ in range(2000):
            optimizer.step()
        second_moment[dtype] = optimizer.state[param]["exp_avg_sq"].double()
    truth = 1e-8 * (1 - 0.999**2000)
    assert torch.allclose(second_moment[FP32], torch.full((8,), truth, dtype=torch.double), rtol=1e-5)
    # (1 - beta2) * (g^2 - v) falls below half a unit in the last place of v, and v stands still.
    assert torch.all(second_moment[BF16] < 0.6 * truth)


# ---- learning rates that are tensors ----


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_tensor_lr_is_never_shared(shape, capturable):
    lr = torch.full(shape, 0.5)
    a, b = parameter(3), parameter(3)
    groups = [{"params": [a], "lr": lr}, {"params": [b], "lr": lr}]
    optimizer = FusedAdam(groups, lr=lr, capturable=capturable)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5**e, lambda e: 1.0])
    for _ in range(3):
        a.grad, b.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
        scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5 * 0.125, 0.5]
    assert lr.item() == 0.5
    optimizer.param_groups[0]["lr"].fill_(9.0)
    assert float(optimizer.param_groups[1]["lr"]) == 0.5 and lr.item() == 0.5


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_tensor_lr_steps_as_the_number_does(shape, capturable):
    results = []
    for lr in (0.1, torch.full(shape, 0.1)):
        param = parameter(20)
        optimizer = FusedAdam([param], lr=lr, weight_decay=0.3, capturable=capturable)
        train(optimizer, range(3))
        results.append(snapshot(optimizer))
    assert differences(*results, ignoring=("lr", "step")) == []
