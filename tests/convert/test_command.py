"""`statestream convert`: files and folders that the other optimizer loads, and bad input in one line."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.bits import differences, same_bits, snapshot
from helpers.command_line import command
from helpers.models import Net, grouped, train_model
from statestream import FusedAdam
from torch.distributed.checkpoint.state_dict import get_state_dict

__all__ = ["command"]

BF16, FP32 = torch.bfloat16, torch.float32
MASTERS = {"master_weights": True, "exp_avg_dtype": "bf16"}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(cls, dtype=FP32, steps=3, **arguments):
    torch.manual_seed(0)
    model = Net(dtype)
    model.unused.requires_grad_(False)  # torch saves no state of it
    optimizer = cls(grouped(model), **arguments)
    train_model(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: {"optimizer_states": [o], "epoch": 3}], ids=["bare", "within"])
def test_a_file_of_torchs_adamw_goes_on_here(command, tmp_path, wrap):
    model, adamw = run(torch.optim.AdamW)
    torch.save(wrap(adamw.state_dict()), tmp_path / "torch.pt")
    ran = command("convert", tmp_path / "torch.pt", tmp_path / "ours.pt", "--to", "statestream")
    assert (ran.status, ran.err) == (0, "") and ran.out == f"{tmp_path / 'ours.pt'} written\n"
    content = torch.load(tmp_path / "ours.pt", weights_only=True)
    loaded, expected = (FusedAdam(grouped(m)) for m in (copy.deepcopy(model), copy.deepcopy(model)))
    loaded.load_state_dict(content["optimizer_states"][0] if "epoch" in content else content)
    expected.load_state_dict(adamw.state_dict())
    assert [name for name in differences(snapshot(loaded), snapshot(expected)) if " param " in name] == []
    assert [group["step"] for group in loaded.param_groups] == [3, 3, 3]  # torch's dict has no count of a group
    assert content.get("epoch", 3) == 3


def test_the_masters_of_a_file_become_its_weights(command, tmp_path):
    torch.manual_seed(0)
    model = Net(BF16)
    ours = FusedAdam(reversed(list(model.named_parameters())), lr=0.1, **MASTERS)  # in another order than the weights
    train_model(model, ours, range(3))
    saved = {"model": model.state_dict(), "optim": ours.state_dict(), "step": 7}
    torch.save(saved, tmp_path / "ours.pt")
    ran = command("convert", tmp_path / "ours.pt", tmp_path / "torch.pt", "--to", "torch", "--masters", "weights")
    assert ran.status == 0, ran.err
    content = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert content["step"] == 7
    torch.optim.AdamW(reversed(list(Net(FP32).named_parameters()))).load_state_dict(content["optim"])
    assert content["model"].keys() == saved["model"].keys()
    for name, param in model.named_parameters():
        assert same_bits(content["model"][name], ours.state[param]["master_param"])


def test_weights_are_not_guessed_by_their_number(command, tmp_path):
    model, ours = run(FusedAdam, BF16, **MASTERS)
    torch.save({"model": model.state_dict(), "optim": ours.state_dict()}, tmp_path / "ours.pt")
    ran = command("convert", tmp_path / "ours.pt", tmp_path / "torch.pt", "--to", "torch", "--masters", "weights")
    assert ran.status == 2 and "named_parameters()" in ran.err and not (tmp_path / "torch.pt").exists()


def test_a_folder_is_converted_and_comes_back(command, tmp_path):
    model, ours = run(FusedAdam, BF16, **MASTERS)
    weights, state = get_state_dict(model, ours)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "ours", no_dist=True)
    there = command("convert", tmp_path / "ours", tmp_path / "peers", "--to", "transformer_engine")
    back = command("convert", tmp_path / "peers", tmp_path / "back", "--to", "statestream", "--adamw")
    assert (there.status, back.status) == (0, 0), there.err + back.err
    loaded, again = run(FusedAdam, BF16, steps=1, **MASTERS)
    weights, state = get_state_dict(loaded, again)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "back", no_dist=True)
    loaded.load_state_dict(weights)
    assert len(state["state"]) > 5
    for name, held in state["state"].items():
        for kind, value in ours.state[model.get_parameter(name)].items():
            assert same_bits(held[kind], value.float()), (name, kind)


REFUSED = [
    ([], "Missing argument"),
    (["ours.pt"], "Missing argument"),
    (["ours.pt", "new.pt"], "Missing option '--to'"),
    (["no-such.pt", "new.pt", "--to", "torch"], "'no-such.pt' does not exist"),
    (["text", "new.pt", "--to", "torch"], "text is no file of torch.save"),
    (["folder", "new", "--to", "torch"], "'folder' holds no checkpoint: it has no .metadata"),
    (["damaged", "new", "--to", "torch"], "is no metadata of torch.distributed.checkpoint"),
    (["weights.pt", "new.pt", "--to", "torch"], "no optimizer's state dict"),
    (["ours.pt", "text", "--to", "torch"], "text is there already"),
    (["ours.pt", "no/folder/new.pt", "--to", "statestream"], "no/folder is no folder"),
    (["ours.pt", "new.pt", "--to", "peer"], "to: 'peer' is not known; use"),
    (["ours.pt", "new.pt", "--to", "torch", "--from", "peer"], "source: 'peer' is not known; use"),
    (["ours.pt", "new.pt", "--to", "torch", "--masters", "float8"], "masters: 'float8' is not known"),
    (["ours.pt", "new.pt", "--to", "torch", "--drop", "ema"], "drop: 'ema' is no state here"),
    (["ours.pt", "new.pt", "--to", "torch", "--drop", "exp_avg"], "drop: 'exp_avg' is not one that may be lost"),
    (["ours.pt", "new.pt", "--to", "torch"], "master_param"),
    (["ours.pt", "new.pt", "--to", "torch", "--optimizer", "nowhere"], "no optimizer's state dict at 'nowhere'"),
    (["ours.pt", "new.pt", "--to", "statestream", "--model", "nowhere"], "at 'nowhere'"),
    (["ours.pt", "new.pt", "--to", "torch", "--frobnicate"], "--frobnicate"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    _, ours = run(FusedAdam, BF16, steps=1, **MASTERS)
    torch.save({"optim": ours.state_dict()}, tmp_path / "ours.pt")
    torch.save({"a": torch.zeros(3)}, tmp_path / "weights.pt")
    (tmp_path / "text").write_text("no checkpoint")
    for name in ("folder", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / ".metadata").write_bytes(b"no pickle")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("args", "said"), REFUSED, ids=[" ".join(args) for args, _ in REFUSED])
def test_bad_input_is_one_line_and_status_2(command, folder, args, said):
    before = sorted(folder.rglob("*"))
    ran = command("convert", *args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("statestream: ") and ran.err.count("\n") == 1
    assert said in ran.err
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_lost_its_data_is_one_line(command, tmp_path):
    model, ours = run(FusedAdam)
    _, state = get_state_dict(model, ours)
    dcp.save({"optim": state}, checkpoint_id=tmp_path / "ours", no_dist=True)
    data = next((tmp_path / "ours").glob("*.distcp"))
    os.truncate(data, data.stat().st_size // 3)
    ran = command("convert", tmp_path / "ours", tmp_path / "new", "--to", "transformer_engine")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err
    assert not (tmp_path / "new" / ".metadata").exists()


def test_of_several_optimizers_one_has_to_be_named(command, tmp_path):
    _, ours = run(FusedAdam, BF16, steps=1)
    torch.save({"a": ours.state_dict(), "b": ours.state_dict()}, tmp_path / "ours.pt")
    ran = command("convert", tmp_path / "ours.pt", tmp_path / "new.pt", "--to", "torch")
    assert ran.status == 2 and "several optimizers; give optimizer= one of 'a', 'b'" in ran.err
    ran = command("convert", tmp_path / "ours.pt", tmp_path / "new.pt", "--to", "torch", "--optimizer", "b")
    content = torch.load(tmp_path / "new.pt", weights_only=True)
    assert ran.status == 0 and "format_version" in content["a"]["param_groups"][0]
    assert "format_version" not in content["b"]["param_groups"][0]
