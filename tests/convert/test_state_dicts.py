"""State dicts of one Adam as another's, through the optimizers themselves."""

import copy

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.engine import LAYOUT, engine_dict
from helpers.models import Net, grouped, train_model
from helpers.modes import Mode
from helpers.training import build, make_params, train
from statestream import FusedAdam
from statestream.convert import convert_state_dict, fp32_weights
from statestream.convert.rules import Group, Param, Request, convert
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

FP32, BF16 = torch.float32, torch.bfloat16
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
PARAMS = tuple(map(str, range(7)))


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def same_values(a, b):
    """Whether two nested values are equal, tensors by bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_values, a, b))
    return type(a) is type(b) and a == b


def adamw(steps=3, cls=torch.optim.AdamW, **options):
    params = make_params(Mode(FP32))
    groups = [{"params": params[:3], "initial_lr": 0.5}, {"params": params[3:], "lr": 3e-3, "eps": 1e-7}]
    optimizer = cls(groups, **{**SETTINGS, **options})
    train(optimizer, range(steps))
    return optimizer


def twin(optimizer, cls, **arguments):
    """A fresh optimizer over copies of another's parameters."""
    groups = [
        {"params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return cls(groups, **arguments)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_torchs_dict_comes_back_as_it_was(cls, options):
    saved = adamw(cls=cls, **options).state_dict()
    before = copy.deepcopy(saved)
    there = convert_state_dict(saved, "statestream")
    assert same_values(saved, before)
    assert same_values(convert_state_dict(there, "torch"), before)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_torchs_run_goes_on_here_and_there_as_if_it_had_never_moved(cls):
    reference = adamw(cls=cls)
    there = twin(reference, FusedAdam, adam_w_mode=cls is torch.optim.AdamW)
    there.load_state_dict(convert_state_dict(reference.state_dict(), "statestream"))
    assert [group["step"] for group in there.param_groups] == [3, 3]
    assert there.param_groups[0]["initial_lr"] == 0.5
    train(there, range(3, 6))
    back = twin(there, cls)
    back.load_state_dict(convert_state_dict(there.state_dict(), "torch"))
    train(back, range(6, 9))
    train(reference, range(3, 9))
    for a, b in zip(params_of(reference), params_of(back), strict=True):
        assert back.state[b]["step"].item() == 9
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_run_of_ours_goes_through_torchs_optimizer_without_a_changed_bit():
    optimizer = build(Mode(FP32))
    train(optimizer, range(3))
    other = twin(optimizer, torch.optim.AdamW)
    other.load_state_dict(convert_state_dict(optimizer.state_dict(), "torch"))
    back = build(Mode(FP32), seed=3)
    back.load_state_dict(convert_state_dict(other.state_dict(), "statestream"))
    assert differences(snapshot(optimizer), snapshot(back), ignoring=PARAMS) == []


@pytest.mark.parametrize(
    "mode", [Mode(FP32), Mode(BF16, BF16, FP32, "fp32"), Mode(BF16, BF16, FP32, "remainders")], ids=str
)
def test_a_run_of_ours_takes_the_peers_form_and_comes_back(mode):
    optimizer = build(mode)
    train(optimizer, range(3))
    there = convert_state_dict(optimizer.state_dict(), "transformer_engine", weights=params_of(optimizer))
    assert [set(group) for group in there["param_groups"]] == [set(LAYOUT["group after a step"])] * 2
    assert all(set(state) == set(mode.stored(params_of(optimizer)[0])) for state in there["state"].values())
    back = build(mode, seed=3)
    back.load_state_dict(convert_state_dict(there, "statestream"))
    assert differences(snapshot(optimizer), snapshot(back), ignoring=PARAMS) == []


@pytest.mark.parametrize("step", [3, torch.tensor([3], dtype=torch.int32)], ids=str)
def test_the_peers_count_of_a_group_becomes_that_of_its_parameters(step):
    part = build(Mode(None, FP32, FP32, "fp32"))
    train(part, range(3))
    peer = engine_dict(part.state_dict(), params_of(part), step)
    converted = convert_state_dict(peer, "statestream", weights=params_of(part))
    assert same_values(
        {k: {n: s[n] for n in sorted(s)} for k, s in converted["state"].items()},
        {k: {n: s[n] for n in sorted(s)} for k, s in part.state_dict()["state"].items()},
    )
    assert [group["step"] for group in converted["param_groups"]] == [3, 3]
    as_torch = convert_state_dict(peer, "torch", drop=["master_param"])
    assert all(state["step"].item() == 3 and "master_param" not in state for state in as_torch["state"].values())


def test_the_peer_gets_a_master_of_every_parameter_where_weights_are_given():
    optimizer = build(Mode(None, FP32, FP32, "fp32"))
    train(optimizer, range(2))
    params = params_of(optimizer)
    converted = convert_state_dict(optimizer.state_dict(), "transformer_engine", weights=params)
    for index, param in enumerate(params):
        master = converted["state"][index]["master_param"]
        assert same_bits(master, param.detach()) if param.dtype is FP32 else master is not None


def test_a_master_that_the_peer_never_updates_is_not_taken_for_a_weight():
    part = build(Mode(FP32))
    train(part, range(3))
    params = params_of(part)
    peer = engine_dict(part.state_dict(), make_params(Mode(FP32)), 3)  # masters as they were at the start
    converted = convert_state_dict(peer, "torch", weights=params)  # with weights there is no doubt, nothing to drop
    assert all("master_param" not in state for state in converted["state"].values())
    for (_, value), param in zip(fp32_weights(peer, params), params, strict=True):
        assert same_bits(value, param.detach())


def test_calls_that_updated_nothing_are_counted_by_the_group_alone():
    optimizer = build(Mode(FP32))
    train(optimizer, range(3))
    optimizer.zero_grad()
    optimizer.step()
    converted = convert_state_dict(optimizer.state_dict(), "statestream")
    assert [group["step"] for group in converted["param_groups"]] == [4, 4]
    assert {state["step"].item() for state in converted["state"].values()} == {3.0}


def test_betas_of_a_configuration_file_become_the_pair_that_torch_saves():
    saved = adamw().state_dict()
    saved["param_groups"][0]["betas"] = [0.8, 0.95]
    assert convert_state_dict(saved, "statestream")["param_groups"][0]["betas"] == (0.8, 0.95)


# ---- masters ----


def test_remainders_with_their_weights_are_the_masters_of_a_run_that_kept_them():
    whole, halves = build(Mode(BF16, FP32, FP32, "fp32")), build(Mode(BF16, FP32, FP32, "remainders"))
    train(whole, range(4))
    train(halves, range(4))
    converted = convert_state_dict(halves.state_dict(), "statestream", masters="float32", weights=params_of(halves))
    for index, param in enumerate(params_of(whole)):
        assert same_bits(converted["state"][index]["master_param"], whole.state[param]["master_param"])
    for (_, value), param in zip(fp32_weights(halves.state_dict(), params_of(halves)), params_of(whole), strict=True):
        assert same_bits(value, whole.state[param]["master_param"])


def test_a_float16_parameter_has_an_fp32_master_where_others_have_remainders():
    weights = [torch.nn.Parameter(torch.randn(5).to(dtype)) for dtype in (torch.float16, BF16, FP32)]
    optimizer = FusedAdam(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = convert_state_dict(optimizer.state_dict(), "statestream", masters="remainders", weights=weights)["state"]
    assert same_bits(state[0]["master_param"], weights[0].detach().float())
    assert same_bits(state[1]["master_param"], torch.zeros(5, dtype=torch.int16))
    assert "master_param" not in state[2]


@pytest.mark.parametrize(
    ("mode", "arguments", "number"),
    [
        (Mode(BF16), {}, 200),
        (Mode(BF16), {"masters": "float32"}, 201),
        (Mode(BF16), {"masters": "remainders"}, 202),
        (Mode(BF16, master="fp32"), {}, 201),
        (Mode(BF16, master="remainders"), {}, 202),
        (Mode(BF16, master="remainders"), {"masters": "float32"}, 201),
        (Mode(BF16, master="remainders"), {"drop": ["master_param"]}, 200),
        (Mode(torch.float16, master="remainders"), {}, 201),
        (Mode(None, master="remainders"), {}, 202),
    ],
    ids=str,
)
def test_a_conversion_says_what_masters_it_holds(mode, arguments, number):
    optimizer = build(mode)
    train(optimizer, range(1))
    for settings in (optimizer.state_dict(), convert_state_dict(optimizer.state_dict(), "transformer_engine")):
        converted = convert_state_dict(settings, "statestream", weights=params_of(optimizer), **arguments)
        assert [group["format_version"] for group in converted["param_groups"]] == [number] * 2


@pytest.mark.parametrize(("held", "read_as"), [("remainders", FP32), ("fp32", torch.int16)])
def test_masters_that_were_cast_since_they_were_saved_are_refused(held, read_as):
    optimizer = build(Mode(BF16, master=held))
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["master_param"] = state["master_param"].to(read_as)
    for refused in (
        lambda: convert_state_dict(saved, "transformer_engine"),
        lambda: list(fp32_weights(saved, params_of(optimizer))),
    ):
        with pytest.raises(ValueError, match=r"master_param of parameter 0: the checkpoint holds .*store_param_remain"):
            refused()


def test_a_number_of_a_later_version_is_not_converted():
    saved = build(Mode(FP32)).state_dict()
    saved["param_groups"][1]["format_version"] = 300
    with pytest.raises(ValueError, match=r"group 1: the checkpoint has format_version 300.*update statestream"):
        convert_state_dict(saved, "torch")


@pytest.mark.parametrize("masters, kept", [("float32", "fp32"), ("remainders", "remainders")])
def test_masters_that_are_missing_start_at_the_weights(masters, kept):
    optimizer = build(Mode(BF16))
    train(optimizer, range(2))
    converted = convert_state_dict(optimizer.state_dict(), "statestream", masters=masters, weights=params_of(optimizer))
    new = build(Mode(BF16, FP32, FP32, kept))
    new.load_state_dict(optimizer.state_dict())  # makes them from its own weights
    with torch.no_grad():
        for target, source in zip(params_of(new), params_of(optimizer), strict=True):
            target.copy_(source)
    new.load_state_dict(optimizer.state_dict())
    for index, param in enumerate(params_of(new)):
        assert same_bits(converted["state"][index]["master_param"], new.state[param]["master_param"])


def test_a_float32_model_goes_on_in_torch_from_the_masters():
    optimizer = build(Mode(BF16, FP32, FP32, "remainders", offload=True))  # or torch would load live tensors
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    weights = dict(fp32_weights(saved, params_of(optimizer)))
    groups = [{"params": [torch.nn.Parameter(weights[i]) for i in g["params"]]} for g in saved["param_groups"]]
    reference = torch.optim.AdamW(groups)
    reference.load_state_dict(convert_state_dict(saved, "torch", drop=["master_param"]))
    train(optimizer, range(3, 6))
    train(reference, range(3, 6))
    for (_, value), param in zip(
        fp32_weights(optimizer.state_dict(), params_of(optimizer)), params_of(reference), strict=True
    ):
        # gradients are rounded to the BF16 parameter's dtype in the one
        torch.testing.assert_close(value, param.detach(), rtol=1e-2, atol=1e-3)


# ---- torch.distributed.checkpoint's dicts ----


@pytest.mark.parametrize("flat", [False, True])
def test_dicts_by_parameter_name_nested_and_flat(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def run(cls, steps, **arguments):
        torch.manual_seed(0)
        model = Net()
        model.unused.requires_grad_(False)  # of which torch saves no state, and asks for some in a nested load
        optimizer = cls(grouped(model), **arguments)
        train_model(model, optimizer, steps)
        return model, optimizer

    model, optimizer = run(torch.optim.AdamW, range(3))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    new_model, new = run(FusedAdam, range(0))
    new_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(new_model, new, convert_state_dict(saved, "statestream"), options=options)
    direct_model, direct = run(FusedAdam, range(0))
    direct_model.load_state_dict(model.state_dict())
    direct.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((new_model, new), (direct_model, direct)):
        train_model(m, o, range(3, 6))
        o.state_dict()
    # A frozen group's count is of calls; torch's own dict has none to read.
    assert differences(snapshot(direct), snapshot(new), ignoring=("step",)) == []
    there = get_optimizer_state_dict(new_model, new, options=options)
    back_model, back = run(torch.optim.AdamW, range(0))
    set_optimizer_state_dict(back_model, back, convert_state_dict(there, "torch"), options=options)
    for a, b in zip(params_of(new), params_of(back), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            if a.requires_grad:
                assert same_bits(new.state[a][name], back.state[b][name])


# ---- what cannot be kept ----


def ours(mode=Mode(FP32), steps=2, **arguments):  # noqa: B008
    optimizer = build(mode, **arguments)
    train(optimizer, range(steps))
    return optimizer.state_dict()


def uneven():
    optimizer = build(Mode(FP32))
    train(optimizer, range(2))
    optimizer.param_groups[0]["params"][0].grad = None
    for param in params_of(optimizer)[1:]:
        param.grad = torch.ones_like(param)
    params_of(optimizer)[0].grad = None
    optimizer.step()
    return optimizer.state_dict()


def flattened(saved):
    names = [f"w{i}" for i in range(7)]
    flat = {f"state.{names[i]}.{key}": value for i, state in saved["state"].items() for key, value in state.items()}
    for group in saved["param_groups"]:
        for i in group["params"]:
            flat |= {f"param_groups.{names[i]}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def damaged(change, saved=None):
    saved = ours() if saved is None else saved
    change(saved)
    return saved


REMAINDERS = Mode(BF16, FP32, FP32, "remainders")
MASTERS = Mode(BF16, FP32, FP32, "fp32")
REFUSED = {
    "amsgrad, ours": (
        lambda: adamw(amsgrad=True).state_dict(),
        "statestream",
        {},
        r"group 0 has amsgrad=True.*drop=\['max",
    ),
    "amsgrad, the peer": (
        lambda: adamw(amsgrad=True).state_dict(),
        "transformer_engine",
        {},
        "group 0 has amsgrad=True",
    ),
    "no bias correction": (lambda: ours(bias_correction=False), "torch", {}, "group 0 has bias_correction=False"),
    "maximize": (lambda: ours(maximize=True), "transformer_engine", {}, "group 0 has maximize=True"),
    "L2": (
        lambda: ours(adam_w_mode=False),
        "transformer_engine",
        {},
        "decoupled_weight_decay=False.*adam_w_mode=False",
    ),
    "L2 said for AdamW": (ours, "transformer_engine", {"adam_w_mode": False}, "decoupled_weight_decay=True"),
    "counts": (
        uneven,
        "transformer_engine",
        {},
        r"parameter 0 was updated 2 times and parameter 1 3 times.*drop=\['step'\]",
    ),
    "counts, flat": (lambda: flattened(uneven()), "transformer_engine", {}, "flat and does not say"),
    "masters": (
        lambda: ours(MASTERS),
        "torch",
        {},
        r"master_param of parameter 0: .*masters='weights'.*drop=\['master_param'\]",
    ),
    "remainders": (lambda: ours(REMAINDERS), "torch", {}, "master_param of parameter 0"),
    "remainders alone": (
        lambda: ours(REMAINDERS),
        "statestream",
        {"masters": "float32"},
        "parameter 0 is 16 bits.*not there",
    ),
    "remainders of another dtype": (
        lambda: ours(REMAINDERS),
        "statestream",
        {"masters": "float32", "weights": [torch.zeros(7, 5, dtype=torch.float16)]},
        r"bfloat16 weight, not the torch.float16",
    ),
    "a negative count of a group": (
        lambda: damaged(lambda saved: saved["param_groups"][0].update(step=-1)),
        "torch",
        {},
        "step of group 0: -1 is not a count",
    ),
    "no weight": (
        lambda: ours(Mode(BF16)),
        "statestream",
        {"masters": "float32"},
        "parameter 0 is made from its weight",
    ),
    "no weight for remainders": (lambda: ours(Mode(BF16)), "statestream", {"masters": "remainders"}, "need the weight"),
    "masters to remainders": (
        lambda: ours(MASTERS),
        "statestream",
        {"masters": "remainders"},
        "only by changing the weight",
    ),
    "weights in memory": (lambda: ours(MASTERS), "torch", {"masters": "weights"}, "fp32_weights"),
    "masters in torch": (lambda: ours(MASTERS), "torch", {"masters": "float32"}, "keeps no masters"),
    "masters as weights here": (lambda: ours(MASTERS), "statestream", {"masters": "weights"}, "masters='weights'"),
    "another optimizer's": (lambda: build_sgd(), "statestream", {}, "not the settings of an Adam"),
    "another state": (
        lambda: damaged(lambda s: s["state"][2].update(momentum=torch.zeros(3))),
        "torch",
        {},
        "parameter 2 has a state 'momentum'",
    ),
    "a moment missing": (
        lambda: damaged(lambda s: s["state"][1].pop("exp_avg")),
        "torch",
        {},
        "exp_avg of parameter 1 is missing",
    ),
    "a count missing": (
        lambda: damaged(lambda s: s["state"][1].pop("step")),
        "torch",
        {},
        "step of parameter 1 is missing",
    ),
    "the peer's count missing": (
        lambda: damaged(lambda s: s["param_groups"][1].pop("step"), engine_dict(ours(), [], 2, masters=False)),
        "statestream",
        {},
        "step of group 1 is missing",
    ),
    "a setting missing": (
        lambda: damaged(lambda s: s["param_groups"][1].pop("eps")),
        "torch",
        {},
        "group 1 has no eps",
    ),
    "no state dict": (lambda: {"model": {}}, "torch", {}, "param_groups"),
    "no state": (lambda: {"param_groups": []}, "torch", {}, "no 'state'"),
    "state without settings": (
        lambda: {"state.a.step": 1, "param_groups.b.lr": 1},
        "torch",
        {},
        "'a' has state and no settings",
    ),
    "to": (ours, "adamw", {}, "to: 'adamw' is not known; use 'torch', 'statestream', 'transformer_engine'"),
    "source": (ours, "torch", {"source": "apex"}, "source: 'apex'"),
    "masters as": (ours, "statestream", {"masters": "bf16"}, "masters: 'bf16'"),
    "drop": (ours, "torch", {"drop": ["exp_avg"]}, "drop: 'exp_avg'"),
    "a state of one's own": (
        lambda: damaged(lambda s: s["state"][1].update(ema=torch.ones(3))),
        "torch",
        {},
        r"parameter 1 has a state 'ema', which is none of Adam's; drop=\['ema'\] goes on without it",
    ),
    "one that is no tensor": (
        lambda: damaged(lambda s: s["state"][1].update(ema=torch.ones(3), seen=[1])),
        "torch",
        {"drop": ["ema"]},
        r"parameter 1 has a state 'seen'.*drop=\['seen'\]",
    ),
    "drop of no state": (ours, "torch", {"drop": ["ema"]}, "drop: 'ema' is no state here; choose from 'max_exp"),
    "drop as a string": (ours, "torch", {"drop": "step"}, "drop: 'step'"),
    "drop of no names": (ours, "torch", {"drop": {1, "step"}}, "drop: 1 is not"),
    "drop that can be read once": (ours, "torch", {"drop": iter(["step"])}, "drop: <list_iterator.*collection"),
    "drop of none": (ours, "torch", {"drop": None}, "drop: None"),
}


def build_sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9).state_dict()


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_kept_is_refused_by_name(case):
    saved, to, arguments, named = case
    with pytest.raises(ValueError, match=named):
        convert_state_dict(saved(), to, **arguments)


def test_a_moment_of_a_folder_that_is_stored_as_integers_is_refused_by_name():
    """Of a dict the values are looked at first, of a folder their dtypes alone."""
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    param = Param("parameter 0", {"exp_avg": torch.int16, "exp_avg_sq": FP32}, step=1.0, weight=FP32)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is stored as torch\.int16"):
        convert([Group("group 0", settings, [param])], Request(to="torch"))


def test_what_may_be_lost_is_lost_when_it_is_said():
    saved = adamw(amsgrad=True).state_dict()
    converted = convert_state_dict(saved, "statestream", drop=["max_exp_avg_sq"])
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in converted["state"].values())
    assert [group["amsgrad"] for group in converted["param_groups"]] == [False, False]
    assert same_values(convert_state_dict(saved, "torch"), saved)

    converted = convert_state_dict(uneven(), "transformer_engine", drop=["step"])
    assert [group["step"] for group in converted["param_groups"]] == [3, 3]

    converted = convert_state_dict(ours(adam_w_mode=False), "transformer_engine", adam_w_mode=False)
    assert "decoupled_weight_decay" not in converted["param_groups"][0]
    back = convert_state_dict(converted, "statestream", adam_w_mode=False)
    assert back["param_groups"][0]["decoupled_weight_decay"] is False


def test_a_parameter_without_state_has_none_afterwards():
    params = make_params(Mode(FP32))
    reference = torch.optim.AdamW(params, **SETTINGS)
    params[0].grad = torch.ones_like(params[0])
    reference.step()
    for to in ("statestream", "transformer_engine"):
        assert list(convert_state_dict(reference.state_dict(), to)["state"]) == [0]


def test_control_a_converted_dict_that_lost_its_counts_is_noticed():
    reference = adamw()
    converted = convert_state_dict(reference.state_dict(), "statestream")
    for state in converted["state"].values():
        state["step"] = torch.zeros(())
    there = twin(reference, FusedAdam)
    there.load_state_dict(converted)
    train(there, range(3, 6))
    train(reference, range(3, 6))
    with pytest.raises(AssertionError):
        for a, b in zip(params_of(reference), params_of(there), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
def test_states_that_no_adam_has_may_be_left_behind(flat):
    optimizer = build(Mode(FP32))
    train(optimizer, range(2))
    bare = convert_state_dict(optimizer.state_dict(), "torch")
    for param in params_of(optimizer)[::2]:
        optimizer.state[param].update(ema=torch.ones(3), seen=[1])
    saved = optimizer.state_dict()
    if flat:
        names = {i: f"layer.{i}" for i in range(len(params_of(optimizer)))}
        saved = {f"state.{names[i]}.{key}": v for i, state in saved["state"].items() for key, v in state.items()}
        for group in optimizer.state_dict()["param_groups"]:
            for i in group["params"]:
                saved |= {f"param_groups.{names[i]}.{key}": v for key, v in group.items() if key != "params"}
    converted = convert_state_dict(saved, "torch", drop=["ema", "seen"])
    if flat:
        found = {key.removeprefix("state.") for key in converted if key.startswith("state.")}
        assert found == {f"{names[i]}.{key}" for i, state in bare["state"].items() for key in state}
    else:
        assert {i: set(state) for i, state in converted["state"].items()} == {
            i: set(state) for i, state in bare["state"].items()
        }
