"""FusedAdam is a torch.optim.Optimizer in all that training loops ask of one."""

import copy
import inspect

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import FORMS, Mode
from helpers.training import build, train
from statestream import FusedAdam
from statestream.state.lazy_state import peek
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

BF16, FP32 = torch.bfloat16, torch.float32


def params(n=2, dtype=FP32):
    return [torch.nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(i)).to(dtype)) for i in range(n)]


def test_it_is_an_optimizer_with_the_attributes_that_trainers_read():
    optimizer = FusedAdam(params())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer.state, dict) and isinstance(optimizer.defaults, dict)
    assert list(inspect.signature(optimizer.step).parameters) == ["closure", "legacy"]
    reference = set(torch.optim.AdamW(params()).param_groups[0])
    assert set(optimizer.param_groups[0]) == reference | {"step", "bias_correction", "format_version"}
    assert "FusedAdam" in repr(optimizer) and "lr: 0.001" in repr(optimizer)


def test_group_keys_are_the_same_whatever_the_options():
    keys = {frozenset(group) for form in FORMS for group in build(form).param_groups}
    keys |= {frozenset(group) for group in build(Mode(FP32), capturable=True, maximize=True).param_groups}
    assert len(keys) == 1


def test_construction_makes_no_state():
    optimizer = build(Mode(BF16, master="fp32"))
    assert len(optimizer.state) == 0 and bool(optimizer.state)
    assert peek(optimizer.state, optimizer.param_groups[0]["params"][0]) is None


@pytest.mark.parametrize("looks", [dict.__contains__, dict.get])
def test_whoever_looks_for_a_members_state_finds_it_complete(looks):
    """torchtitan looks by `in` and by `get`: where there was none it would step, counted, or load nothing."""
    optimizer = build(Mode(BF16, master="fp32"))
    param = optimizer.param_groups[0]["params"][0]
    assert getattr(optimizer.state, looks.__name__)(param)
    assert set(peek(optimizer.state, param)) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert len(optimizer.state) == 1


def test_looking_for_what_is_no_trained_member_makes_nothing():
    optimizer = build(Mode(BF16, master="fp32"))
    param = optimizer.param_groups[0]["params"][0].requires_grad_(False)
    for key in (param, torch.zeros(3, requires_grad=True), "a name"):
        assert key not in optimizer.state and optimizer.state.get(key, "none") == "none"
    assert len(optimizer.state) == 0


# ---- hooks ----


def test_step_hooks_run_once_a_step_in_torchs_order():
    optimizer = FusedAdam(params(), lr=0.1)
    seen = []
    handles = [
        optimizer.register_step_pre_hook(
            lambda o, args, kwargs: seen.append(("pre", float(o.param_groups[0]["step"])))
        ),
        optimizer.register_step_post_hook(
            lambda o, args, kwargs: seen.append(("post", float(o.param_groups[0]["step"])))
        ),
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append("global pre")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("global post")),
    ]
    try:
        train(optimizer, range(2))
    finally:
        for handle in handles:
            handle.remove()
    reference = torch.optim.AdamW(params())
    order = []
    handles = [
        reference.register_step_pre_hook(lambda o, args, kwargs: order.append("pre")),
        reference.register_step_post_hook(lambda o, args, kwargs: order.append("post")),
        register_optimizer_step_pre_hook(lambda o, args, kwargs: order.append("global pre")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: order.append("global post")),
    ]
    try:
        train(reference, range(2))
    finally:
        for handle in handles:
            handle.remove()
    assert [s if isinstance(s, str) else s[0] for s in seen] == order
    assert [s for s in seen if not isinstance(s, str)] == [("pre", 0.0), ("post", 1.0), ("pre", 1.0), ("post", 2.0)]


@pytest.mark.parametrize("offload", [False, True])
def test_state_dict_hooks_see_converted_moments_and_may_replace_the_dict(offload):
    optimizer = FusedAdam(params(), exp_avg_dtype=BF16, state_dict_cpu_offload=offload)
    train(optimizer, range(1))
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, sd: seen.append(sd["state"][0]["exp_avg"].dtype))
    optimizer.register_state_dict_post_hook(lambda o, sd: {**sd, "extra": 1})
    optimizer.register_state_dict_post_hook(lambda o, sd: seen.append(sd["extra"]), prepend=False)
    assert optimizer.state_dict()["extra"] == 1
    assert seen == ["pre", FP32, 1]


def test_load_hooks_see_the_dict_as_saved_and_may_replace_it():
    source, optimizer = FusedAdam(params(), lr=0.5), FusedAdam(params())
    train(source, range(1))
    saved = copy.deepcopy(source.state_dict())
    seen = []

    def double(o, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["exp_avg"] *= 2
        return state_dict

    optimizer.register_load_state_dict_pre_hook(lambda o, sd: seen.append(sd["state"][0]["exp_avg"].dtype))
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert seen == [FP32, 0.5]
    first = optimizer.param_groups[0]["params"][0]
    assert torch.equal(optimizer.state[first]["exp_avg"], saved["state"][0]["exp_avg"] * 2)


def test_a_load_hook_may_add_keys_without_touching_the_callers_dict():
    source, optimizer = FusedAdam(params()), FusedAdam(params())
    saved = source.state_dict()
    keys = set(saved)
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: sd.update(more=1))
    optimizer.load_state_dict(saved)
    assert set(saved) == keys


# ---- schedulers and live edits ----

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[3],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, cycle_momentum=True),
}


def advance(scheduler):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=["number", "0-dim", "shape (1,)"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_schedulers_drive_it_as_they_drive_torchs_adamw(name, capturable, lr):
    ours, theirs = params(), params()
    optimizer = FusedAdam(ours, lr=copy.deepcopy(lr), capturable=capturable, weight_decay=0.01)
    # A tensor where ours is one: torch before 2.10 ties lr and initial_lr together in SequentialLR.
    tensor = capturable or isinstance(lr, torch.Tensor)
    reference = torch.optim.AdamW(theirs, lr=torch.tensor(0.1) if tensor else 0.1)
    schedulers = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    for step in range(8):
        train(optimizer, [step])
        train(reference, [step])
        for scheduler in schedulers:
            advance(scheduler)
        for key in ("lr", "betas"):
            a, b = optimizer.param_groups[0][key], reference.param_groups[0][key]
            torch.testing.assert_close(torch.as_tensor(a).double().reshape(-1), torch.as_tensor(b).double().reshape(-1))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    "kind",
    [float, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64)],
    ids=["number", "tensor", "float64 tensor"],
)
def test_settings_edited_in_a_group_hold_from_the_next_step(capturable, loaded, kind):
    results = []
    for first in (0.1, 0.01):
        members = params()
        optimizer = FusedAdam(members, lr=first, weight_decay=first, capturable=capturable)
        for param in members:
            param.grad = torch.zeros(5)
        if loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = kind(0.25)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        before = [param.detach().clone() for param in members]
        optimizer.step()
        assert all(torch.equal(b * (1 - 0.25 * 0.5), a) for a, b in zip(members, before, strict=True))
        optimizer.state_dict()
        results.append(snapshot(optimizer))
    assert differences(*results, ignoring=("initial_lr",)) == []


# ---- groups and names ----


def test_named_parameters_are_kept_and_saved():
    a, b, c = params(3)
    optimizer = FusedAdam([("a", a), ("b", b)], lr=0.1)
    optimizer.add_param_group({"params": [("c", c)], "lr": 0.2})
    assert [group["param_names"] for group in optimizer.param_groups] == [["a", "b"], ["c"]]
    train(optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    assert [group["param_names"] for group in saved["param_groups"]] == [["a", "b"], ["c"]]
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2]]
    unnamed = FusedAdam(params())
    unnamed.add_param_group({"params": params(3)[2:]})
    unnamed.load_state_dict(saved)
    assert [group["lr"] for group in unnamed.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("form", [form for form in FORMS if not form.is_random], ids=str)
def test_a_group_added_in_mid_run_trains_from_its_own_first_step(form):
    dtype = form.param_dtypes[0]
    a, b = params(2, dtype)
    optimizer = FusedAdam([a], lr=0.1, **form.arguments)
    train(optimizer, range(3))
    optimizer.add_param_group({"params": b, "lr": 0.2})  # a bare tensor, as torch takes it
    alone_b = params(2, dtype)[1]
    alone = FusedAdam([alone_b], lr=0.2, **form.arguments)
    for step in range(3, 5):
        a.grad, b.grad, alone_b.grad = torch.ones_like(a), torch.ones_like(b) * step, torch.ones_like(b) * step
        optimizer.step()
        alone.step()
    assert [optimizer.state[p]["step"].item() for p in (a, b)] == [5, 2]
    assert same_bits(b, alone_b)
    assert all(same_bits(v, alone.state[alone_b][k]) for k, v in optimizer.state[b].items())


def test_groups_and_parameters_may_be_generators():
    members = params(3)
    optimizer = FusedAdam(iter([{"params": (p for p in members[:2])}, {"params": iter(members[2:])}]), lr=0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    train(optimizer, range(1))
    optimizer = FusedAdam((p for p in params()), lr=0.1)
    train(optimizer, range(1))


def test_the_callers_group_dicts_are_not_changed():
    group = {"params": params(), "lr": 0.3}
    FusedAdam([group])
    assert set(group) == {"params", "lr"}


def test_groups_that_were_given_one_tensor_lr_have_one_each():
    lr = torch.tensor(0.125)
    optimizer = FusedAdam([{"params": [param]} for param in params()], lr=lr)
    optimizer.param_groups[0]["lr"].mul_(2)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125] and lr == 0.125


def test_a_group_whose_settings_cannot_be_taken_leaves_no_trace(monkeypatch):
    optimizer = FusedAdam(params())

    def fails(*_):
        raise MemoryError("no room for a counter")

    monkeypatch.setattr(optimizer, "_take_settings", fails)
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": params(1)})
    assert len(optimizer.param_groups) == 1


def test_a_step_that_is_skipped_counts_in_no_group():
    optimizer = FusedAdam([{"params": [param]} for param in params()])
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(5)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]


def test_random_bits_hang_on_the_place_among_all_parameters():
    def stepped(groups):
        optimizer = FusedAdam(groups, lr=0.1, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16, stochastic_rounding=True)
        members = [param for group in optimizer.param_groups for param in group["params"]]
        for param in members:
            param.grad = torch.full((300,), 0.3)
        optimizer.step()
        return [optimizer.state[param]["exp_avg"] for param in members]

    a, b, c, d = (torch.nn.Parameter(torch.ones(300)) for _ in range(4))
    first, second = stepped([{"params": [a]}, {"params": [b]}])
    assert not same_bits(first, second)
    assert all(map(same_bits, stepped([{"params": [c, d]}]), (first, second)))
