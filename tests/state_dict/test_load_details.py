"""What a load leaves of the checkpoint's form: nothing. Places, dtypes and addresses are the optimizer's own."""

import copy

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import MODES, Mode
from helpers.training import build, train
from statestream import CPUOffloadOptimizer, FusedAdam

FP32, BF16 = torch.float32, torch.bfloat16
EXACT = Mode(None, BF16, FP32, "fp32")


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def saved_run(mode=EXACT, steps=3, **arguments):
    optimizer = build(mode, **arguments)
    train(optimizer, range(steps))
    return optimizer, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_load_writes_into_the_tensors_that_are_there(mode):
    _, saved = saved_run(mode)
    optimizer = build(mode, seed=4)
    train(optimizer, range(10, 11))
    before = {k: v for param in params_of(optimizer) for k, v in optimizer.state[param].items()}
    addresses = {id(v): v.data_ptr() for v in before.values()}
    optimizer.load_state_dict(saved)
    after = {k: v for param in params_of(optimizer) for k, v in optimizer.state[param].items()}
    assert addresses == {id(v): v.data_ptr() for v in after.values()}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_loading_an_export_ties_nothing_together(mode):
    a, b = build(mode), build(mode, seed=8)
    train(a, range(2))
    b.load_state_dict(a.state_dict())
    before = snapshot(b)
    train(a, range(2, 4))
    assert differences(before, snapshot(b)) == []


@pytest.mark.parametrize("saved_capturable, loaded_capturable", [(True, False), (False, True), (True, True)])
def test_capturable_on_either_side_alone(saved_capturable, loaded_capturable):
    whole = build(EXACT)
    train(whole, range(6))
    part, saved = saved_run(capturable=saved_capturable)
    new = build(EXACT, capturable=loaded_capturable)
    with torch.no_grad():
        for target, source in zip(params_of(new), params_of(part), strict=True):
            target.copy_(source)
    tensors = [(group["lr"], group["step"]) for group in new.param_groups]
    new.load_state_dict(saved)
    kind = torch.Tensor if loaded_capturable else (int, float)
    for group, (lr, step) in zip(new.param_groups, tensors, strict=True):
        assert isinstance(group["lr"], kind) and isinstance(group["step"], kind)
        assert group["capturable"] is loaded_capturable
        if loaded_capturable:
            assert group["lr"] is lr and group["step"] is step, "a CUDA graph holds these tensors"
    train(new, range(3, 6))
    ignored = ("lr", "capturable") if loaded_capturable or saved_capturable else ()
    found = differences(snapshot(whole), snapshot(new), ignoring=ignored)
    assert [name for name in found if name not in ("group 0 step", "group 1 step")] == []
    assert [float(group["step"]) for group in new.param_groups] == [6.0, 6.0]
    if not loaded_capturable:  # what a float32 tensor held
        assert [group["lr"] for group in new.param_groups] == [float(torch.tensor(lr)) for lr in (1e-2, 3e-3)]


STEPS = {
    "int": 3,
    "float": 3.0,
    "0-dim": torch.tensor(3.0),
    "0-dim int64": torch.tensor(3),
    "shape (1,)": torch.tensor([3.0]),
    "shape (1, 1) float64": torch.tensor([[3.0]], dtype=torch.float64),
    "bfloat16": torch.tensor(3.0, dtype=BF16),
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("spelling", STEPS)
def test_every_spelling_of_a_step_is_read(spelling, capturable):
    _, saved = saved_run(capturable=capturable)
    for state in saved["state"].values():
        state["step"] = copy.deepcopy(STEPS[spelling])
    for group in saved["param_groups"]:
        group["step"] = copy.deepcopy(STEPS[spelling])
    new = build(EXACT, capturable=capturable)
    new.load_state_dict(saved)
    for param in params_of(new):
        step = new.state[param]["step"]
        assert step.dtype is FP32 and step.shape == () and step.device.type == "cpu" and step.item() == 3
    assert [float(group["step"]) for group in new.param_groups] == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, BF16, FP32], ids=str)
@pytest.mark.parametrize("exp_avg", [FP32, BF16], ids=str)
def test_moments_saved_in_another_dtype_are_rounded_once(dtype, exp_avg):
    optimizer = build(Mode(FP32, exp_avg))
    _, saved = saved_run(Mode(FP32))
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].to(dtype)
    optimizer.load_state_dict(saved)
    for index, param in enumerate(params_of(optimizer)):
        assert same_bits(optimizer.state[param]["exp_avg"], saved["state"][index]["exp_avg"].float().to(exp_avg))


@pytest.mark.parametrize("exp_avg", [FP32, BF16], ids=str)
def test_values_of_another_layout_find_their_places(exp_avg):
    original, saved = saved_run(Mode(FP32, exp_avg))
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            value = state[name]
            state[name] = torch.zeros(*value.shape, 2)[..., 1].copy_(value)  # strided, as a slice of a file may be
    new = build(Mode(FP32, exp_avg))
    new.load_state_dict(saved)
    for a, b in zip(params_of(original), params_of(new), strict=True):
        assert all(same_bits(original.state[a][name], new.state[b][name]) for name in original.state[a])


def test_a_layer_that_was_never_used_has_state_and_loads_everywhere():
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = FusedAdam([used, unused])
    used.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"]) == {0, 1} and set(saved["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["state"][1]["step"].item() == 0 and not saved["state"][1]["exp_avg"].any()
    for cls in (FusedAdam, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        other = cls(params)
        other.load_state_dict(copy.deepcopy(saved))
        assert [other.state[param]["step"].item() for param in params] == [1, 0]
        params[1].grad = torch.ones(3)
        other.step()
        assert [other.state[param]["step"].item() for param in params] == [1, 1]


def test_a_key_that_a_later_version_adds_is_filled_from_the_defaults_when_old_checkpoints_load():
    _, saved = saved_run()
    for group in saved["param_groups"]:
        for key in ("format_version", "bias_correction", "step", "decoupled_weight_decay"):
            del group[key]
    new = build(EXACT, bias_correction=False)
    keys = [set(group) for group in new.param_groups]
    new.load_state_dict(saved)
    assert [set(group) for group in new.param_groups] == keys
    assert all(group["bias_correction"] is False and group["format_version"] == 201 for group in new.param_groups)


def test_state_dicts_carry_a_format_version():
    optimizer = build(EXACT)
    assert [group["format_version"] for group in optimizer.state_dict()["param_groups"]] == [201, 201]


# ---- inputs that alias what is written ----


@pytest.mark.parametrize("offload", [False, True])
def test_loading_ones_own_state_dict_changes_nothing(offload):
    optimizer = build(Mode(FP32, offload=offload))
    train(optimizer, range(2))
    before = snapshot(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert differences(before, snapshot(optimizer)) == []


@pytest.mark.parametrize("moments", [FP32, BF16], ids=str)
def test_live_state_in_another_order_is_not_overwritten_while_it_is_read(moments):
    params = [torch.nn.Parameter(torch.randn(9)) for _ in range(4)]
    optimizer = FusedAdam(params, exp_avg_dtype=moments)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    order = [1, 2, 3, 0]
    moved = {i: saved["state"][order[i]] for i in range(4)}
    wanted = [copy.deepcopy(moved[i]) for i in range(4)]
    optimizer.load_state_dict({"state": moved, "param_groups": saved["param_groups"]})
    for i, param in enumerate(params):
        for name, value in wanted[i].items():
            assert torch.equal(optimizer.state[param][name].float(), value), (i, name)


def test_moments_that_change_places_do_not_meet():
    param = torch.nn.Parameter(torch.randn(9))
    optimizer = FusedAdam([param])
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    state = saved["state"][0]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]
    wanted = copy.deepcopy(state)
    optimizer.load_state_dict(saved)
    assert all(torch.equal(optimizer.state[param][name], value) for name, value in wanted.items())


def test_live_group_tensors_in_another_order_are_not_overwritten_while_they_are_read():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = FusedAdam(
        [{"params": [p], "lr": lr} for p, lr in zip(params, (0.25, 0.5), strict=True)], capturable=True
    )
    saved = optimizer.state_dict()
    first, second = saved["param_groups"]
    first["lr"], second["lr"] = second["lr"], first["lr"]
    optimizer.load_state_dict(saved)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]


def test_a_lazily_negated_moment_is_read_with_its_sign():
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([param], exp_avg_dtype=BF16)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.tensor([1 + 2j]).conj().imag
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["exp_avg"].item() == -2.0


def test_state_under_a_name_of_ones_own_is_passed_on():
    optimizer = build(EXACT)
    optimizer.state["run"] = {"tokens": 12}
    train(optimizer, range(1))
    new = build(EXACT)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert new.state["run"] == {"tokens": 12}
    reference = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups])
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert reference.state["run"] == {"tokens": 12}


def test_a_group_tensor_of_another_shape_is_refused_before_anything_is_written():
    optimizer, saved = saved_run()
    optimizer.param_groups[1]["scales"] = torch.zeros(2)
    saved["param_groups"][1]["scales"] = torch.ones(3)
    saved["param_groups"][0]["lr"] = 7.0
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="scales of group 1"):
        optimizer.load_state_dict(saved)
    assert differences(before, snapshot(optimizer)) == []


# ---- remainders ----

HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
WEIGHTS = (0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.3895e38, -3.3895e38, 1.17549435e-38, 9.18e-41)


def test_remainders_of_every_kind_survive_a_checkpoint(tmp_path):
    weights = torch.tensor([w for w in WEIGHTS for _ in HALVES]).to(BF16)
    lows = torch.tensor([h - 0x10000 if h >= 0x8000 else h for _ in WEIGHTS for h in HALVES], dtype=torch.int16)
    mode = Mode(BF16, BF16, BF16, "remainders", offload=True)
    param = torch.nn.Parameter(weights.clone())
    optimizer = FusedAdam([param], **mode.arguments)
    optimizer.set_scaled_state(param, "master_param", lows)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same_bits(saved["state"][0]["master_param"], lows)
    other = torch.nn.Parameter(weights.clone())
    loaded = FusedAdam([other], **mode.arguments)
    loaded.load_state_dict(saved)
    assert same_bits(loaded.state[other]["master_param"], lows)
    for each, holder in ((param, optimizer), (other, loaded)):
        each.grad = torch.zeros_like(each)  # a step of nothing splits what it joined
        holder.step()
    assert same_bits(param, other) and same_bits(
        optimizer.state[param]["master_param"], loaded.state[other]["master_param"]
    )
    possible = ~((weights.float() == 0) & (lows < 0))
    assert same_bits(param[possible], weights[possible])
    assert same_bits(optimizer.state[param]["master_param"][possible], lows[possible])


def test_values_of_a_mapped_file_are_copied_out_of_it(tmp_path):
    original, saved = saved_run()
    torch.save(saved, tmp_path / "state.pt")
    mapped = torch.load(tmp_path / "state.pt", mmap=True, weights_only=True)
    new = build(EXACT)
    new.load_state_dict(mapped)
    (tmp_path / "state.pt").write_bytes(b"0" * (tmp_path / "state.pt").stat().st_size)
    for a, b in zip(params_of(original), params_of(new), strict=True):
        assert all(same_bits(original.state[a][name], new.state[b][name]) for name in original.state[a])


def two_params():
    params = [torch.nn.Parameter(torch.randn(300, generator=torch.Generator().manual_seed(i))) for i in range(2)]
    for param in params:
        param.grad = param.detach() / 2
    return params


def test_live_views_of_one_block_of_memory_may_come_back_in_another_order():
    params = two_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 1 << 20, state_dict_snapshot=False)
    optimizer.step()
    live = optimizer.state_dict()
    wanted = [copy.deepcopy(live["state"][i]) for i in (1, 0)]
    live["state"] = {0: live["state"][1], 1: live["state"][0]}
    optimizer.load_state_dict(live)
    for param, state in zip(params, wanted, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(optimizer.state[param][name], state[name])


def test_live_tensor_settings_may_come_back_in_another_order():
    a, b = two_params()
    groups = [{"params": [a], "lr": torch.tensor(0.125)}, {"params": [b], "lr": torch.tensor(0.25)}]
    optimizer = FusedAdam(groups)
    optimizer.step()
    live, held = optimizer.state_dict(), [group["lr"] for group in optimizer.param_groups]
    first, second = live["param_groups"]
    first["lr"], second["lr"] = second["lr"], first["lr"]
    optimizer.load_state_dict(live)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125]
    assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, held, strict=True))


def test_a_parameter_without_an_update_of_its_own_does_not_take_its_groups_count():
    a, b = two_params()
    b.grad = None
    optimizer = FusedAdam([a, b], lr=0.1)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [float(optimizer.state[p]["step"]) for p in (a, b)] == [1.0, 0.0]


@pytest.mark.parametrize("exp_avg_sq_dtype", ["bf16", "fp16"])
def test_a_load_for_which_there_is_no_staging_changes_nothing(exp_avg_sq_dtype, monkeypatch):
    params = two_params()
    optimizer = FusedAdam(params, lr=0.1, exp_avg_sq_dtype=exp_avg_sq_dtype)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()
    optimizer.step()
    before = snapshot(optimizer)

    def refused(*_):
        raise MemoryError("no staging")

    with monkeypatch.context() as patch:
        patch.setattr("statestream.checkpoint.transfer._Staging", refused)
        with pytest.raises(MemoryError, match="no staging"):
            optimizer.load_state_dict(saved)
    assert differences(before, snapshot(optimizer)) == []
    optimizer.step()


def test_a_snapshot_is_apart_from_what_a_user_keeps_under_names():
    optimizer = FusedAdam(two_params(), state_dict_cpu_offload=True)
    optimizer.state["run"] = {"losses": [1.0]}
    saved = optimizer.state_dict()
    optimizer.state["run"]["losses"].append(2.0)
    assert saved["state"]["run"] == {"losses": [1.0]}


def test_a_load_without_a_parameters_state_drops_its_scales_too():
    a, b = two_params()
    optimizer = FusedAdam([a, b], lr=0.1, exp_avg_dtype="fp8")
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert set(optimizer.backend.scales) == {a}


def test_a_users_tensor_is_apart_from_the_dict_after_a_load():
    (param, _) = two_params()
    optimizer = FusedAdam([param])
    optimizer.step()
    optimizer.state[param]["mine"] = torch.zeros(3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["mine"].fill_(1.0)
    optimizer.load_state_dict(saved)
    saved["state"][0]["mine"].fill_(2.0)
    assert optimizer.state[param]["mine"].tolist() == [1.0] * 3
