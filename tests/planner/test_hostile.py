"""Sources that nobody would write on purpose: each is one error that names the file or the key, and no figure is
printed of what is no model."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from statestream.planner.quantities import BadOption
from statestream.planner.sources import read_model

from .files import PUBLISHED, write_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LLAMA, MIXTRAL = PUBLISHED["llama 3 8B"][1], PUBLISHED["mixtral 8x7B"][1]
QWEN = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 9}
QWEN |= {"num_attention_heads": 4, "num_experts": 4, "moe_intermediate_size": 32}

SHAPES = ["[-5, 3]", "[1e400]", "[NaN]", '"123"', "[2.5]", "[true]", "[1" + "0" * 30 + "]", "{}", "null", "7", '["3"]']

CONFIGS = [
    (LLAMA | {"hidden_size": 0, "vocab_size": 0}, "has 0 parameters"),
    (MIXTRAL | {"num_local_experts": 10**9}, "has 5.64e[+]18 parameters"),
    ({key: value for key, value in MIXTRAL.items() if key != "num_local_experts"}, "no 'num_local_experts'"),
    (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    (LLAMA | {"attention_bias": 2}, "attention_bias is 2"),
    (LLAMA | {"torch_dtype": 5}, "torch_dtype is 5"),
    (LLAMA | {"torch_dtype": "int4"}, "'int4' is not supported"),
    (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0"),
    (LLAMA | {"model_type": ["llama"]}, "no model_type"),
    (QWEN | {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
    (QWEN | {"mlp_only_layers": [None]}, "mlp_only_layers"),
    (QWEN | {"mlp_only_layers": {"1": 1}}, "mlp_only_layers"),
    (QWEN | {"decoder_sparse_step": -1}, "decoder_sparse_step is -1"),
]


def header(path: Path, text: str | bytes, length: int | None = None) -> Path:
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content)
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_is_none_is_refused(tmp_path, shape):
    path = header(tmp_path / "a.safetensors", f'{{"w": {{"dtype": "F32", "shape": {shape}}}}}')
    with pytest.raises(BadOption, match=r"says no shape of 'w'|is not JSON"):
        read_model(path)


def test_more_elements_than_a_float_counts_are_refused_in_words(tmp_path):
    path = header(tmp_path / "a.safetensors", json.dumps({"w": {"dtype": "F32", "shape": [2**40] * 30}}))
    with pytest.raises(BadOption, match=r"has more than 1e\+300 parameters"):
        read_model(path)


@pytest.mark.parametrize("dtype", ["F64", "F4", "C64", ["F32"], None, 8])
def test_weights_of_another_dtype_are_named_and_not_left_out(tmp_path, dtype):
    entries = {"w": {"dtype": "F32", "shape": [3]}, "odd": {"dtype": dtype, "shape": [3]}}
    with pytest.raises(BadOption, match=r"'odd' in .* is stored as"):
        read_model(header(tmp_path / "a.safetensors", json.dumps(entries)))


def test_counters_and_masks_are_left_out_and_both_fp8_are_weights(tmp_path):
    dtypes = ["I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2"]
    entries = {dtype: {"dtype": dtype, "shape": [3]} for dtype in dtypes}
    found = read_model(header(tmp_path / "a.safetensors", json.dumps(entries))).parameters
    assert [(p.name, p.dtype) for p in found] == [("F8_E4M3", "fp8"), ("F8_E5M2", "fp8")]


@pytest.mark.parametrize(("values", "said"), CONFIGS, ids=[said for _, said in CONFIGS])
def test_a_config_that_makes_no_sense_is_refused_by_its_key(tmp_path, values, said):
    with pytest.raises(BadOption, match=said):
        read_model(write_json(tmp_path / "config.json", values))


def links(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")


def nested_folders(folder: Path) -> None:
    (folder / "a" / "config.json").mkdir(parents=True)


def folder_for_a_file(folder: Path) -> None:
    (folder / "a" / "x.safetensors").mkdir(parents=True)


def metadata_folder(folder: Path) -> None:
    (folder / "a" / ".metadata").mkdir(parents=True)


def index_to(*targets: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "a").mkdir()
        weights = {f"w{i}": target for i, target in enumerate(targets)}
        write_json(folder / "a" / "model.safetensors.index.json", {"weight_map": weights})

    return make


def checkpoint_without_metadata(folder: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=folder / "a", no_dist=True)
    (folder / "a" / ".metadata").unlink()


PLACES = [
    links,
    nested_folders,
    folder_for_a_file,
    metadata_folder,
    checkpoint_without_metadata,
    index_to("../../../../../../../../etc/passwd"),
    index_to(".", "gone"),
    index_to("y" * 5000),
    index_to("a\0b"),
    index_to(7),
]


@pytest.mark.parametrize("make", PLACES)
def test_a_place_that_holds_no_model_is_one_line(command, tmp_path, monkeypatch, make):
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    ran = command("plan", "a")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err


NAMES = ["модель.json", "\udcff.json", "x" * 300, "/dev/null", "a\nb", "a\0b", "模型/w.safetensors"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_is_said_in_one_line(command, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    ran = command("plan", name)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err


# ---- damage at random ----

JUNK = [None, True, -1, 0, 7, 1e400, float("nan"), 10**30, "", "junk", "\udcff", [], [None], {}, {"a": 1}, [[[]]]]


def spoilt(value: Any, chance: random.Random) -> Any:
    """The JSON value with one part of it another, or gone."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: spoilt(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], spoilt(value[at], chance), *value[at + 1 :]]
    return chance.choice(JUNK)


HEADER = {f"w{i}": {"dtype": "BF16", "shape": [4, 5], "data_offsets": [0, 40]} for i in range(3)}
INDEX = {"metadata": {"total_size": 80}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}


def read_or_refused(path: Path) -> None:
    try:
        assert read_model(path).elements > 0
    except BadOption as error:
        assert str(path.parent) in str(error) or "in the config" in str(error) or "the config has" in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("seed", range(3))
def test_a_spoilt_file_is_read_or_refused(tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(100):
        config = chance.choice([values for _, values in PUBLISHED.values()] + [QWEN])
        read_or_refused(write_json(tmp_path / "config.json", spoilt(config, chance)))
        read_or_refused(header(tmp_path / "a.safetensors", json.dumps(spoilt(HEADER, chance))))
        read_or_refused(write_json(tmp_path / "model.safetensors.index.json", spoilt(INDEX, chance)))


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("checkpoint")
    dcp.save({"model": {"w": torch.zeros(4, 5)}, "step": 3}, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_spoilt_metadata_is_read_or_refused(tmp_path, metadata, seed):
    """Cut short, or a few bytes another."""
    chance = random.Random(seed)
    for _ in range(100):
        content = bytearray(metadata)
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)) + 1 :]
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        (tmp_path / ".metadata").write_bytes(content)
        read_or_refused(tmp_path / ".metadata")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("c").mkdir()
    Path("c/.metadata").write_bytes(pickle.dumps(Bomb()))
    ran = command("plan", "c")
    assert (ran.status, ran.err.count("\n")) == (2, 1) and not Path("ran").exists()


# ---- numbers ----


def test_an_absurd_amount_of_state_fits_nothing_and_is_no_error_of_an_option_that_was_not_given(command):
    ran = command("plan", "--params", "1e15", "--layers", "100", "--gpu-memory", "80GiB")
    assert ran.status == 1 and "nothing fits" in ran.out and ran.err == ""


def test_most_layers_are_planned_in_a_few_seconds(command):
    """Each layer is a parameter of its own, of each way that may be proposed."""
    began = time.process_time()
    ran = command("plan", "--params", "1e12", "--layers", "10000", "--gpu-memory", "80GiB", "--ranks", "64")
    assert ran.status == 0 and "step_chunk_bytes" in ran.out
    assert time.process_time() - began < 15  # about two


@pytest.mark.parametrize("reserve", ["0", "0GiB", "0.0"])
def test_nothing_may_be_kept_of_a_gpu(command, reserve):
    args = ["plan", "--params", "4e9", "--gpu-memory", "64GB", "--reserve", reserve]
    assert "0 B of it kept" in command(*args).out
