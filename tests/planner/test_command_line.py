"""`statestream plan`: what it prints, and that bad input is one clear line and exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from .files import PUBLISHED, write_json, write_safetensors

SIZE = ["--params", "8e9", "--layers", "32"]

REFUSED = [
    ([], "--params: no model is given"),
    (["no-such-file.json"], "'no-such-file.json' does not exist"),
    (["."], "has no config.json, no safetensors files and no .metadata"),
    (["config.json", *SIZE], "--params: the model is given twice"),
    (["config.json", "--layers", "3"], "--layers: it goes with --params"),
    (["--params", "many"], "--params: 'many' is not a count"),
    (["--params", "-8e9"], "--params: '-8e9' is not a count"),
    (["--params", "0"], "--params: '0' is out of range"),
    (["--params", "1e99"], "--params: '1e99' is out of range"),
    (["--params", "1e9999"], "--params: '1e9999' is not a count"),
    (["--params", "nan"], "--params: 'nan' is not a count"),
    (["--params", "8e9", "--layers", "0"], "--layers: 0 is out of range"),
    (["--params", "8e9", "--layers", "-3"], "--layers: -3 is out of range"),
    (["--params", "10", "--layers", "11"], "--layers: 11 is out of range"),
    ([*SIZE, "--ranks", "0"], "--ranks: 0 is out of range"),
    ([*SIZE, "--ranks", "-8"], "--ranks: -8 is out of range"),
    ([*SIZE, "--ranks", "99999999999"], "--ranks: 99999999999 is out of range"),
    ([*SIZE, "--ranks", "eight"], "--ranks"),
    ([*SIZE, "--mesh", "8x8"], "--mesh: '8x8' is not understood; write it as replicate=2,shard=8,tensor=4"),
    ([*SIZE, "--mesh", "shard=0"], "--mesh: 0 is out of range"),
    ([*SIZE, "--mesh", "shard=8,shard=8"], "--mesh"),
    ([*SIZE, "--mesh", "shard=\N{SUPERSCRIPT TWO}"], "--mesh"),
    ([*SIZE, "--mesh", "shard=8", "--ranks", "4"], "--ranks: 4 is not the product of the mesh, 8"),
    ([*SIZE, "--weights", "int4"], "--weights: 'int4' is not supported; use fp32, bf16, fp16, fp8"),
    ([*SIZE, "--grads", ""], "--grads: '' is not supported"),
    ([*SIZE, "--moments", "fp12"], "--moments: 'fp12' is not supported"),
    ([*SIZE, "--moments", "bf16,bf16,bf16"], "--moments: 'bf16,bf16,bf16' names 3 formats"),
    ([*SIZE, "--masters", "bf16"], "--masters: 'bf16' is not supported; use none, fp32, fp16, remainders"),
    ([*SIZE, "--masters", "remainders", "--weights", "fp16"], "--masters: remainders are the bits"),
    ([*SIZE, "--chunk", "0"], "--chunk: '0' is out of range"),
    ([*SIZE, "--chunk", "1"], "--chunk: 1 bytes are too few"),
    ([*SIZE, "--chunk", "1 parsec"], "--chunk: '1 parsec' is not a size"),
    ([*SIZE, "--export", "disk"], "--export: 'disk' is not supported; use device, host"),
    ([*SIZE, "--staging", "1KiB"], "--staging: '1KiB' is too small"),
    ([*SIZE, "--gpu-memory", "80 gigs"], "--gpu-memory: '80 gigs' is not a size; write it as 80GiB"),
    ([*SIZE, "--gpu-memory", "80"], "--gpu-memory: '80' is out of range; it must be from 1048576"),
    ([*SIZE, "--gpu-memory", "80GiB", "--reserve", "90GiB"], "--reserve: '90GiB' is more than the GPU's memory"),
    ([*SIZE, "--reserve", "9GiB"], "--reserve: it is part of a GPU's memory; give --gpu-memory too"),
    ([*SIZE, "--link", "fast"], "--link: 'fast' is not a bandwidth"),
    ([*SIZE, "--device-bandwidth", "4TB/h"], "--device-bandwidth: '4TB/h' is not a bandwidth"),
    ([*SIZE, "--disk", "0"], "--disk: '0' is out of range"),
    ([*SIZE, "--disk", "0GB/s"], "--disk: '0GB/s' is out of range"),
    ([*SIZE, "--png", "plan.txt"], "--png: 'plan.txt' does not end in .png"),
    ([*SIZE, "--png", "no/such/folder/plan.png"], "--png: 'no/such/folder/plan.png' cannot be written"),
    ([*SIZE, "--frobnicate"], "--frobnicate"),
    (["config.json", "extra"], "extra"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the command runs: a config.json is there."""
    (tmp_path / "here").mkdir()
    write_json(tmp_path / "config.json", PUBLISHED["llama 3 8B"][1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("args", "said"), REFUSED, ids=[" ".join(args) for args, _ in REFUSED])
def test_bad_input_is_one_line_and_status_2(command, folder, monkeypatch, args, said):
    if args == ["."]:
        monkeypatch.chdir(folder / "here")
    before = sorted(folder.rglob("*"))
    ran = command("plan", *args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("statestream: ") and ran.err.count("\n") == 1
    assert said in ran.err
    assert sorted(folder.rglob("*")) == before


def test_a_file_that_cannot_be_read_is_one_line(command, folder):
    (folder / "config.json").write_bytes(b"\x00\x01")
    ran = command("plan", "config.json")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "'config.json' is no JSON file" in ran.err


def test_a_process_of_its_own_prints_one_line_and_no_traceback(folder):
    """As a user's shell sees it, warnings and all."""
    args = [sys.executable, "-m", "statestream", "plan", "config.json", "--moments", "fp12"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("statestream: --moments: ")


def test_a_plan_of_files_needs_no_torch(folder):
    code = (
        "import sys\nfrom statestream.cli import main\n"
        "try: main(['plan', 'config.json', '--ranks', '8'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "8,030,261,248 parameters on 8 ranks" in done.stdout


def test_the_table_has_every_kind_and_the_proposal(command, folder):
    ran = command("plan", "config.json", "--ranks", "8", "--gpu-memory", "12GiB", "--link", "55GB/s", "--disk", "2GB/s")
    assert (ran.status, ran.err) == (0, "")
    for said in ("weights", "gradients", "exp_avg", "exp_avg_sq", "masters", "on disk", "save 7.03 s"):
        assert said in ran.out
    # 1,003,782,656 elements a rank: 2 bytes of weights, 4 of a moment
    assert "1.87 GiB" in ran.out and "3.74 GiB" in ran.out
    assert 'exp_avg_dtype="bf16"' in ran.out


def test_json_is_all_of_stdout(command, folder):
    ran = command("plan", "config.json", "--mesh", "replicate=2,shard=4", "--json", "--gpu-memory", "80GiB")
    made = json.loads(ran.out)
    assert made["parameters"] == 8_030_261_248 and made["ranks"] == 8
    assert made["device"]["exp_avg"] == pytest.approx(made["parameters"], rel=0.001)
    assert made["proposal"] == "FusedAdam(params, master_weights=True)"


def test_nothing_fits_is_status_1(command):
    ran = command("plan", "--params", "70B", "--layers", "80", "--gpu-memory", "24GiB")
    assert ran.status == 1
    assert "nothing fits: weights and gradients alone take 132.06 GiB" in ran.out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_kind_of_source(command, folder):
    weights = {"a": torch.zeros(1000, 64, dtype=torch.bfloat16), "b": torch.zeros(64)}
    dcp.save(weights, checkpoint_id=folder / "checkpoint", no_dist=True)
    write_safetensors(folder / "here" / "model.safetensors", {"a": ("BF16", [1000, 64]), "b": ("F32", [64])})
    for source in ("checkpoint", "here", "here/model.safetensors"):
        made = json.loads(command("plan", source, "--json").out)
        assert (made["parameters"], made["device"]["weights"]) == (64064, 128000 + 512), source


def test_the_picture_is_drawn(command, folder):
    ran = command("plan", "config.json", "--gpu-memory", "24GiB", "--ranks", "4", "--png", "plan.png")
    assert ran.status == 0 and "plan.png written" in ran.out
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
