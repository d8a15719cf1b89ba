"""Files of one mode read by DCP into another: what the file held is known, though DCP casts it without a word."""

import copy
from itertools import permutations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.bits import differences, same_bits, snapshot
from helpers.models import Net, grouped, train_model
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

MASTERS = {
    "none": {},
    "fp32": {"master_weights": True},
    "fp16": {"master_weights": True, "master_weight_dtype": FP16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}
OWNERS = {
    "live": lambda o: o,
    "host": lambda o: o,
    "offloaded": lambda o: CPUOffloadOptimizer(o, 4096),
    "offloaded, live": lambda o: CPUOffloadOptimizer(o, 4096, state_dict_snapshot=False),
}
"""Whose templates a file is read into: "live" ones are the optimizer's own state, where it is stored as exported."""

either_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
every_owner = pytest.mark.parametrize("owner", OWNERS)


def build(masters, owner="live", seed=0, steps=(), model=None):
    torch.manual_seed(seed)
    model = model or Net(BF16)
    arguments = {**MASTERS[masters], "state_dict_cpu_offload": owner == "host"}
    optimizer = OWNERS[owner](FusedAdam(grouped(model), **arguments))
    train_model(model, optimizer, steps)
    return model, optimizer


def save(model, optimizer, folder, flat, change=None):
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    weights, state = get_state_dict(model, optimizer, options=options)
    if change is not None:
        change(state)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def load(model, optimizer, folder, flat, into=None):
    """Through DCP's templates, or `into` those of an earlier load, which are returned."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = into or get_state_dict(model, optimizer, options=options)
    templates = copy.copy(weights), copy.copy(state)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    return templates


def numbered(number):
    """A change that sets `format_version` in every group of a state dict, nested or flat."""

    def change(state):
        for group in state.get("param_groups", []):
            group["format_version"] = number
        state |= {key: number for key in state if key.endswith(".format_version")}

    return change


# ---- the number ----


@every_owner
@pytest.mark.parametrize(("masters", "number"), [("none", 200), ("fp32", 201), ("fp16", 201), ("remainders", 202)])
def test_every_group_says_what_is_exported_the_frozen_one_too(masters, number, owner):
    _, optimizer = build(masters, owner)
    found = [group["format_version"] for group in optimizer.state_dict()["param_groups"]]
    assert found == [number] * 3 and {type(value) for value in found} == {int}


def test_remainders_beside_masters_have_a_number_of_their_own():
    """Float16 parameters have FP32 masters where bfloat16 ones have remainders."""
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (BF16, FP16)]
    optimizer = FusedAdam(params, **MASTERS["remainders"])
    assert optimizer.state_dict()["param_groups"][0]["format_version"] == 203


def test_a_number_in_a_users_group_does_not_count():
    param = torch.nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = FusedAdam([{"params": [param], "format_version": 1}], **MASTERS["fp32"])
    assert optimizer.state_dict()["param_groups"][0]["format_version"] == 201


@pytest.mark.parametrize("number", [0, 2, 199, 204, 210, 300])
def test_numbers_of_other_versions_are_refused(number):
    _, optimizer = build("fp32", steps=range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][2]["format_version"] = number
    with pytest.raises(ValueError, match=f"group 2: the checkpoint has format_version {number}.*update statestream"):
        optimizer.load_state_dict(saved)


# ---- loads across modes ----

CROSSED = [
    *((*modes, owner, flat) for modes in permutations(("fp32", "remainders")) for owner in OWNERS for flat in (0, 1)),
    ("fp16", "remainders", "host", 1),
    ("remainders", "fp16", "live", 1),
]


@pytest.mark.parametrize(("saved_by", "loaded_by", "owner", "flat"), CROSSED)
def test_masters_of_another_kind_are_refused_by_name_and_never_trained_on(saved_by, loaded_by, owner, flat, tmp_path):
    model, optimizer = build(saved_by, steps=range(3))
    save(model, optimizer, tmp_path / "theirs", flat)
    new_model, new = build(loaded_by, owner, seed=5, steps=range(7, 9))
    save(new_model, new, tmp_path / "ours", flat)
    before = snapshot(new)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    templates = get_state_dict(new_model, new, options=options)
    way_out = "store_param_remainders=False" if saved_by != "remainders" else "statestream convert .* float32"
    with pytest.raises(ValueError, match=rf"master_param of 'embed\.weight'.*{way_out}") as refusal:
        load(new_model, new, tmp_path / "theirs", flat, into=templates)
    if "live" not in owner:
        assert "nothing was loaded" in str(refusal.value)
        weights = {f"group {g} param {i}" for g in range(3) for i in range(9)}
        assert set(differences(before, snapshot(new))) <= weights  # DCP loads a model before its optimizer
    else:
        for refused in (new.step, new.state_dict):
            with pytest.raises(RuntimeError, match="load a checkpoint"):
                refused()
    load(new_model, new, tmp_path / "ours", flat, into=templates)
    assert differences(before, snapshot(new)) == []
    train_model(new_model, new, range(9, 10))


@pytest.mark.parametrize("owner", ["live", "offloaded"])
@either_form
def test_groups_without_masters_load_into_either_mode(flat, owner, tmp_path):
    """Float32 parameters have none in any."""
    model, optimizer = build("fp32", model=Net(FP32), steps=range(3))
    save(model, optimizer, tmp_path, flat)
    for masters in MASTERS:
        new_model, new = build(masters, owner, seed=5, model=Net(FP32))
        load(new_model, new, tmp_path, flat)
        train_model(new_model, new, range(3, 4))


def mixed(model):
    """A model of which vectors are float32 and matrices bfloat16."""
    for param in model.parameters():
        param.data = param.data.to(FP32 if param.dim() <= 1 else BF16)
    return model


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("fp32", "remainders"), ("remainders", "fp32")])
def test_groups_that_were_joined_since_still_say_what_they_hold(saved_by, loaded_by, tmp_path):
    """DCP's flat form hands on the settings of a group's first parameter alone: here one without a master."""
    model, optimizer = build(saved_by, model=mixed(Net(BF16)), steps=range(2))
    save(model, optimizer, tmp_path, flat=True)
    new_model = mixed(Net(BF16))
    trained = sorted((p for p in new_model.parameters() if p.requires_grad), key=torch.Tensor.dim)
    new = FusedAdam(trained, **MASTERS[loaded_by])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for group in optimizer.param_groups[:2]:
        group.update({key: optimizer.param_groups[1][key] for key in ("lr", "betas", "weight_decay", "eps")})
    state = get_optimizer_state_dict(new_model, new, options=options)
    state |= {key: 0.5 for key in state if key.endswith("initial_lr")}
    dcp.load({"optim": state}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="master_param of"):
        set_optimizer_state_dict(new_model, new, state, options=options)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [("fp32", "remainders"), ("remainders", "remainders"), ("remainders", "fp32")]
)
def test_float16_parameters_have_the_same_masters_in_both_modes(saved_by, loaded_by, tmp_path):
    model, optimizer = build(saved_by, model=Net(FP16), steps=range(3))
    save(model, optimizer, tmp_path, flat=True)
    new_model, new = build(loaded_by, seed=5, model=Net(FP16))
    load(new_model, new, tmp_path, flat=True)
    for a, b in zip(model.parameters(), new_model.parameters(), strict=True):
        if a.requires_grad:
            assert same_bits(optimizer.state[a]["master_param"], new.state[b]["master_param"])


def test_remainders_of_bfloat16_are_no_masters_of_float16(tmp_path):
    model, optimizer = build("remainders", steps=range(3))
    save(model, optimizer, tmp_path, flat=True)
    new_model, new = build("remainders", model=Net(FP16))
    with pytest.raises(ValueError, match=r"master_param of 'embed\.weight'.*16-bit remainders"):
        load(new_model, new, tmp_path, flat=True)


@either_form
def test_masters_that_a_partial_load_left_alone_are_refused(flat, tmp_path):
    """The file holds none: what is there are masters of the weights from before."""
    model, optimizer = build("none", steps=range(3))
    save(model, optimizer, tmp_path, flat)
    new_model, new = build("fp32", seed=5)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(new_model, new, options=options)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optim": state}, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(ValueError, match=r"master_param of 'embed\.weight'.*holds no masters.*statestream convert"):
        set_optimizer_state_dict(new_model, new, state, options=options)


# ---- files of before ----


@either_form
@pytest.mark.parametrize("masters", MASTERS)
def test_files_of_an_earlier_version_load_and_say_that_they_do_not_tell(masters, flat, tmp_path):
    model, optimizer = build(masters, steps=range(3))
    save(model, optimizer, tmp_path, flat, numbered(1))
    new_model, new = build(masters, seed=5)
    if masters == "none":
        load(new_model, new, tmp_path, flat)
    else:
        with pytest.warns(RuntimeWarning, match=r"master_param of 'embed\.weight'.*earlier statestream"):
            load(new_model, new, tmp_path, flat)
    for each, o in ((model, optimizer), (new_model, new)):
        train_model(each, o, range(3, 5))
        o.state_dict()
    assert differences(snapshot(optimizer), snapshot(new)) == []


@either_form
def test_what_an_earlier_file_cannot_tell_costs_masters_and_no_weights(flat, tmp_path):
    """Remainders read as masters: the next step goes on from the weights."""
    model, optimizer = build("remainders", steps=range(3))
    save(model, optimizer, tmp_path, flat, numbered(1))
    new_model, new = build("fp32", seed=5)
    with pytest.warns(RuntimeWarning, match="earlier statestream"):
        load(new_model, new, tmp_path, flat)
    train_model(new_model, new, range(3, 4))
    train_model(model, optimizer, range(3, 4))
    for a, b in zip(model.parameters(), new_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


# ---- live templates ----


@pytest.mark.parametrize("owner", ["live", "offloaded, live"])
def test_any_refusal_after_a_file_was_read_into_live_state_stops_the_run(owner, tmp_path):
    """Not for masters alone: here the file is of a later version."""
    model, optimizer = build("fp32", steps=range(3))
    save(model, optimizer, tmp_path, True, numbered(300))
    new_model, new = build("fp32", owner, seed=5, steps=range(1))
    with pytest.raises(ValueError, match="format_version 300"):
        load(new_model, new, tmp_path, flat=True)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        train_model(new_model, new, range(1, 2))
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_model(new_model, new, range(1, 2))


@pytest.mark.parametrize("between", ["nothing", "a step", "a load"])
@pytest.mark.parametrize("owner", ["live", "offloaded, live"])
def test_a_refused_dict_of_live_tensors_that_nobody_wrote_changes_nothing(owner, between):
    model, optimizer = build("fp32", owner, steps=range(2))
    saved = optimizer.state_dict()
    if between == "a step":
        train_model(model, optimizer, range(2, 3))
    if between == "a load":
        optimizer.load_state_dict(saved)
    before = snapshot(optimizer)
    saved["param_groups"][1]["lr"] = -1.0
    with pytest.raises(ValueError, match="nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert differences(before, snapshot(optimizer)) == []
    train_model(model, optimizer, range(3, 4))


# ---- what is missing ----


@every_owner
@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("state.norm.bias.", r"'norm\.bias' has no state in the flat state dict.*strict=False"),
        ("state.norm.bias.exp_avg_sq", r"exp_avg_sq of 'norm\.bias' is missing"),
        ("state.norm.bias.step", r"step of 'norm\.bias' is missing"),
    ],
)
def test_a_flat_dict_without_a_parameters_state_is_refused_by_name(missing, named, owner):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build("fp32", owner, steps=range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    saved = {key: value for key, value in saved.items() if not key.startswith(missing)}
    new_model, new = build("fp32", owner, seed=5, steps=range(1))
    new.state_dict()  # torch asks for all state
    before = snapshot(new)
    # torch 2.9 notices a flat dict's missing key itself.
    with pytest.raises((ValueError, KeyError), match=rf"{named}|state\.norm\.bias\."):
        set_optimizer_state_dict(new_model, new, saved, options=options)
    assert differences(before, snapshot(new)) == []


def test_a_nested_load_that_is_not_strict_starts_the_missing_parameter_anew():
    model, optimizer = build("fp32", steps=range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    del saved["state"]["norm.bias"]
    with pytest.raises((RuntimeError, ValueError), match=r"norm\.bias"):
        set_optimizer_state_dict(model, optimizer, saved)
    set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(strict=False))
    assert optimizer.state[model.norm.bias]["step"] == 0 and optimizer.state[model.norm.weight]["step"] == 2


@either_form
def test_torch_keeps_back_the_state_of_a_parameter_that_is_frozen_now(flat):
    """As docs/checkpoints.md says. The optimizer's own dict has it, and loads it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build("fp32", steps=range(2))
    model.norm.bias.requires_grad_(False)
    saved, own = copy.deepcopy((get_optimizer_state_dict(model, optimizer, options=options), optimizer.state_dict()))
    assert "norm.bias" in (saved["state"] if not flat else {key[6:-8]: 0 for key in saved if key.endswith(".exp_avg")})
    new_model, new = build("fp32", seed=5)
    new_model.norm.bias.requires_grad_(False)
    set_optimizer_state_dict(new_model, new, saved, options=options)
    assert new_model.norm.bias not in new.state
    new.load_state_dict(own)
    assert new.state[new_model.norm.bias]["step"] == 2
