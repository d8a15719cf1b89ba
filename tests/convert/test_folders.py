"""Folders of torch.distributed.checkpoint, converted and loaded by the other optimizer."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.bits import differences, same_bits, snapshot
from helpers.engine import LAYOUT
from helpers.memory import peak_extra_bytes
from helpers.models import Net, grouped, train_model
from statestream import FusedAdam
from statestream.convert import convert_checkpoint, convert_state_dict
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FP32, BF16 = torch.float32, torch.bfloat16
MASTERS = {"master_weights": True, "exp_avg_dtype": BF16}
REMAINDERS = {**MASTERS, "store_param_remainders": True}

either_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


def run(cls, steps=(), dtype=FP32, seed=0, **arguments):
    torch.manual_seed(seed)
    model = Net(dtype)
    model.unused.requires_grad_(False)  # of which torch saves no state, and asks for some in a nested load
    optimizer = cls(grouped(model), **arguments)
    train_model(model, optimizer, steps)
    return model, optimizer


def parts(model, optimizer, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": state, "extra": {"epoch": 3, "noise": torch.arange(5)}}


def save(folder, model, optimizer, flat):
    dcp.save(copy.deepcopy(parts(model, optimizer, flat)), checkpoint_id=folder)
    return folder


def load(folder, model, optimizer, flat):
    """As anyone loads a checkpoint of the optimizer itself."""
    state = parts(model, optimizer, flat)
    state["extra"] = {"epoch": 0, "noise": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    assert state["extra"]["epoch"] == 3 and torch.equal(state["extra"]["noise"], torch.arange(5))
    optimizer.zero_grad()
    return model, optimizer


def trained(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def keys_of(folder):
    return FileSystemReader(folder).read_metadata().state_dict_metadata


@either_form
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_torchs_checkpoint_goes_on_here_and_comes_back(cls, flat, tmp_path):
    model, reference = run(cls, range(3))
    convert_checkpoint(save(tmp_path / "torch", model, reference, flat), tmp_path / "ours", "statestream")
    new_model, new = load(tmp_path / "ours", *run(FusedAdam, seed=5, adam_w_mode=cls is torch.optim.AdamW), flat)
    direct_model, direct = run(FusedAdam, seed=6, adam_w_mode=cls is torch.optim.AdamW)
    direct_model.load_state_dict(model.state_dict())
    direct.load_state_dict(copy.deepcopy(reference.state_dict()))
    for m, o in ((new_model, new), (direct_model, direct)):
        train_model(m, o, range(3, 6))
        o.state_dict()
    # Of the calls, which torch does not count, the checkpoint says what parameters say.
    assert differences(snapshot(direct), snapshot(new), ignoring=("step",)) == []
    assert [new.state[p]["step"].item() for p in trained(new)] == [6.0] * len(trained(new))
    assert [group["step"] for group in new.param_groups] == [6, 6, 6]

    convert_checkpoint(save(tmp_path / "back", new_model, new, flat), tmp_path / "there", "torch")
    _, last = load(tmp_path / "there", *run(cls, seed=7), flat)
    for a, b in zip(trained(new), trained(last), strict=True):
        assert same_bits(a, b)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert same_bits(new.state[a][name], last.state[b][name])
    for here, there in zip(new.param_groups, last.param_groups, strict=True):
        assert {key: here[key] for key in ("lr", "betas", "initial_lr")} == {
            key: there[key] for key in ("lr", "betas", "initial_lr")
        }


@either_form
@pytest.mark.parametrize("arguments", [MASTERS, REMAINDERS], ids=["masters", "remainders"])
def test_a_checkpoint_in_the_peers_form_and_back_resumes_bit_equal(arguments, flat, tmp_path):
    model, optimizer = run(FusedAdam, range(3), BF16, **arguments)
    convert_checkpoint(save(tmp_path / "ours", model, optimizer, flat), tmp_path / "te", "transformer_engine")
    kept = keys_of(tmp_path / "te")
    names = {key.rpartition(".")[2] for key in kept if key.startswith("optim.state.")}
    assert names == {"exp_avg", "exp_avg_sq", "master_param"}
    groups = {key.rpartition(".")[2] for key in kept if key.startswith("optim.param_groups.")}
    assert groups == set(LAYOUT["group after a step"]) - ({"params"} if flat else set()) | {"initial_lr"}
    convert_checkpoint(tmp_path / "te", tmp_path / "back", "statestream")
    new_model, new = load(tmp_path / "back", *run(FusedAdam, dtype=BF16, seed=5, **arguments), flat)
    for m, o in ((model, optimizer), (new_model, new)):
        train_model(m, o, range(3, 6))
    assert differences(snapshot(optimizer), snapshot(new)) == []


@either_form
@pytest.mark.parametrize("arguments", [MASTERS, REMAINDERS], ids=["masters", "remainders"])
def test_masters_become_the_weights_of_a_float32_model(arguments, flat, tmp_path):
    model, optimizer = run(FusedAdam, range(3), BF16, **arguments)
    folder = save(tmp_path / "ours", model, optimizer, flat)
    convert_checkpoint(folder, tmp_path / "torch", "torch", masters="weights")
    _, new = load(tmp_path / "torch", *run(torch.optim.AdamW, seed=5), flat)
    # A run whose masters are FP32 has the same masters whether it keeps them whole or in halves.
    _, whole = run(FusedAdam, range(3), BF16, **MASTERS)
    for a, b in zip(trained(whole), trained(new), strict=True):
        assert same_bits(whole.state[a]["master_param"], b.detach())
        assert same_bits(whole.state[a]["exp_avg"].float(), new.state[b]["exp_avg"])
    with pytest.raises(ValueError, match=r"master_param of '.*masters='weights'"):
        convert_checkpoint(folder, tmp_path / "refused", "torch")
    assert not (tmp_path / "refused").exists()


@either_form
def test_masters_are_made_of_the_checkpoints_weights_so_that_a_plain_load_finds_all_its_keys(flat, tmp_path):
    model, reference = run(torch.optim.AdamW, range(3), BF16)
    folder = save(tmp_path / "torch", model, reference, flat)
    convert_checkpoint(folder, tmp_path / "ours", "statestream", masters="float32")
    new_model, new = load(tmp_path / "ours", *run(FusedAdam, dtype=BF16, seed=5, **MASTERS), flat)
    for param in trained(new):
        assert same_bits(new.state[param]["master_param"], param.detach().float())
    convert_checkpoint(folder, tmp_path / "halves", "statestream", masters="remainders")
    new_model, new = load(tmp_path / "halves", *run(FusedAdam, dtype=BF16, seed=6, **REMAINDERS), flat)
    assert all(not new.state[param]["master_param"].any() for param in trained(new))
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), new_model.parameters(), strict=True))


def test_remainders_become_masters_by_way_of_their_weights(tmp_path):
    model, optimizer = run(FusedAdam, range(3), BF16, **REMAINDERS)
    convert_checkpoint(save(tmp_path / "a", model, optimizer, True), tmp_path / "b", "statestream", masters="float32")
    _, new = load(tmp_path / "b", *run(FusedAdam, dtype=BF16, seed=5, **MASTERS), True)
    _, whole = run(FusedAdam, range(3), BF16, **MASTERS)
    for a, b in zip(trained(whole), trained(new), strict=True):
        assert same_bits(whole.state[a]["master_param"], new.state[b]["master_param"])


def test_the_optimizer_alone_saved_as_it_is_numbered(tmp_path):
    _, optimizer = run(torch.optim.AdamW, range(3))
    dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path / "torch")
    convert_checkpoint(tmp_path / "torch", tmp_path / "ours", "statestream")
    _, new = run(FusedAdam, seed=5)
    state = new.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    for a, b in zip(trained(optimizer), trained(new), strict=True):
        assert same_bits(optimizer.state[a]["exp_avg"], new.state[b]["exp_avg"])
    assert [group["step"] for group in state["param_groups"]] == [3, 3, 3]


def test_a_converted_folder_is_what_a_converted_dict_saves(tmp_path):
    model, optimizer = run(FusedAdam, range(3), BF16, **MASTERS)
    state = copy.deepcopy(parts(model, optimizer, True))
    dcp.save(state, checkpoint_id=tmp_path / "a")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "transformer_engine")
    state["optim"] = convert_state_dict(state["optim"], "transformer_engine")
    dcp.save(state, checkpoint_id=tmp_path / "c")
    first, second = (FileSystemReader(tmp_path / name).read_metadata() for name in "bc")
    assert first.state_dict_metadata == second.state_dict_metadata
    assert first.planner_data == second.planner_data


# ---- several optimizers, several models, what is refused ----


@pytest.mark.parametrize(
    "own", [torch.ones(2), 3, {"of": torch.ones(2), "seen": 1}, [torch.ones(2), 1]], ids=lambda own: type(own).__name__
)
def test_a_state_that_no_adam_has_is_left_behind_where_it_may_be(own, tmp_path):
    _, optimizer = run(torch.optim.AdamW, range(2))
    for param in trained(optimizer):
        optimizer.state[param]["ema"] = own
    dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path / "a")
    with pytest.raises(ValueError, match=r"has a state 'ema'.*drop=\['ema'\]"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream")
    assert not (tmp_path / "b").exists()
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream", drop=["ema"])
    assert any("ema" in key for key in keys_of(tmp_path / "a")) and not any("ema" in k for k in keys_of(tmp_path / "b"))


def test_what_is_kept_beside_the_parameters_states_is_kept(tmp_path):
    model, optimizer = run(torch.optim.AdamW, range(2), dtype=BF16)
    saved = parts(model, optimizer, flat=False)
    averages = {name: torch.full_like(weight, 2) for name, weight in saved["model"].items()}  # named as the weights are
    saved["optim"]["state"] |= {"averages": averages, "notes": {"of": {"epoch": 4}}, "seen": 5}
    dcp.save(saved, checkpoint_id=tmp_path / "a")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream", masters="float32")
    empty = {name: torch.zeros_like(average) for name, average in averages.items()}
    found = {"optim": {"state": {"averages": empty, "notes": {"of": {"epoch": 0}}, "seen": 0}}}
    dcp.load(found, checkpoint_id=tmp_path / "b")
    state = found["optim"]["state"]
    assert all(same_bits(state["averages"][name], average) for name, average in averages.items())
    assert (state["notes"], state["seen"]) == ({"of": {"epoch": 4}}, 5)


@pytest.mark.parametrize("name", [77, "gone.weight"])
def test_state_of_a_parameter_that_no_group_lists_is_refused(name, tmp_path):
    _, optimizer = run(torch.optim.AdamW, range(2))
    saved = optimizer.state_dict()
    saved["state"][name] = dict(saved["state"][0])
    dcp.save(saved, checkpoint_id=tmp_path / "a")
    with pytest.raises(ValueError, match=f"state of parameter '{name}', which none of its groups lists"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream")
    assert not (tmp_path / "b").exists()


def test_of_two_optimizers_the_one_that_is_named(tmp_path):
    model, optimizer = run(torch.optim.AdamW, range(2))
    state = copy.deepcopy(parts(model, optimizer, True))
    state["second"] = copy.deepcopy(state["optim"])
    dcp.save(state, checkpoint_id=tmp_path / "a")
    with pytest.raises(ValueError, match="several optimizers; give optimizer= one of 'optim', 'second'"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream")
    with pytest.raises(ValueError, match="optimizer: 'third' has no param_groups"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream", optimizer="third")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream", optimizer="second")
    kept = keys_of(tmp_path / "b")
    assert "second.param_groups.first.weight.format_version" in kept
    assert "optim.param_groups.first.weight.format_version" not in kept
    assert {key for key in kept if key.startswith("optim.")} == {
        key for key in keys_of(tmp_path / "a") if key.startswith("optim.")
    }


def test_of_two_models_the_one_that_is_named(tmp_path):
    model, optimizer = run(FusedAdam, range(2), BF16, **REMAINDERS)
    state = copy.deepcopy(parts(model, optimizer, True))
    state["average"] = {name: value.float() for name, value in state["model"].items()}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    with pytest.raises(ValueError, match=r"several models .*give model= one of 'average', 'model'"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream", masters="float32")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "statestream", masters="float32", model="model")
    assert keys_of(tmp_path / "b")["optim.state.first.weight.master_param"].properties.dtype is FP32


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path):
    model, optimizer = run(torch.optim.AdamW, range(2), amsgrad=True)
    folder = save(tmp_path / "a", model, optimizer, True)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "no optimizer")
    dcp.save(
        {"optim": parts(*run(FusedAdam, range(2), BF16, **REMAINDERS), True)["optim"]}, checkpoint_id=tmp_path / "alone"
    )
    (tmp_path / "empty").mkdir()
    for source, arguments, named in (
        (folder, {"to": "statestream"}, "amsgrad=True"),
        (tmp_path / "no optimizer", {"to": "statestream"}, "has no optimizer"),
        (tmp_path / "alone", {"to": "statestream", "masters": "float32"}, "which is not there"),
        (tmp_path / "alone", {"to": "torch", "masters": "weights"}, "cannot become its weight"),
        (tmp_path / "empty", {"to": "torch"}, "holds no checkpoint"),
        (tmp_path / "nowhere", {"to": "torch"}, "holds no checkpoint"),
        (folder, {"to": "torch", "part_bytes": 0}, "part_bytes: 0"),
    ):
        with pytest.raises(ValueError, match=named):
            convert_checkpoint(source, tmp_path / "target", **arguments)
        assert not (tmp_path / "target").exists()
    with pytest.raises(ValueError, match="is there already"):
        convert_checkpoint(folder, tmp_path / "alone", "torch")


def test_a_conversion_that_stops_half_way_leaves_nothing(tmp_path):
    model, optimizer = run(torch.optim.AdamW, range(2))
    folder = save(tmp_path / "a", model, optimizer, True)

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(folder, tmp_path / "b", "statestream", progress=stop, part_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (tmp_path / "b").mkdir()  # an empty folder will do
    convert_checkpoint(folder, tmp_path / "b", "statestream")
    load(tmp_path / "b", *run(FusedAdam, seed=5), True)


# ---- memory and progress ----


def test_a_conversion_takes_the_memory_of_a_part_and_says_how_far_it_is(tmp_path):
    layers, rows = 24, 512
    model = torch.nn.Sequential(*(torch.nn.Linear(rows, rows, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    tensor = rows * rows * 4
    folder = save(tmp_path / "a", model, optimizer, True)
    small = save(tmp_path / "small", *run(torch.optim.AdamW, range(1)), True)
    convert_checkpoint(small, tmp_path / "warm", "statestream", masters="float32")
    seen = []
    part = 4 * tensor

    def convert():
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        seen.clear()
        convert_checkpoint(folder, tmp_path / "b", "statestream", part_bytes=part, progress=lambda *at: seen.append(at))

    extra = peak_extra_bytes(convert)
    total, bound = 3 * layers * tensor, 2 * part + 6 * tensor
    assert extra < bound < total / 5, f"{extra / 2**20:.0f} MiB"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] >= total
    sizes = [file.stat().st_size for file in Path(tmp_path / "b").glob("*.distcp")]
    assert max(sizes) < part + tensor
