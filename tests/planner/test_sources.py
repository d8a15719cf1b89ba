"""Shapes out of files: published counts of public models, files as their formats say, checkpoints that DCP wrote."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from statestream import FusedAdam
from statestream.planner.families import FAMILIES, shapes_of
from statestream.planner.quantities import BadOption
from statestream.planner.sources import read_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from .files import PUBLISHED, write_json, write_safetensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_gives_the_published_number_of_parameters(tmp_path, name):
    count, values = PUBLISHED[name]
    model = read_model(write_json(tmp_path / "config.json", values))
    assert model.elements == count
    assert len({p.name for p in model.parameters}) == len(model.parameters)


def test_the_dtype_is_the_configs(tmp_path):
    _, values = PUBLISHED["gpt2"]
    for stated, dtype in [("float32", "fp32"), ("bfloat16", "bf16"), (None, None)]:
        assert read_model(write_json(tmp_path / "config.json", {**values, "torch_dtype": stated})).dtype == dtype


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", [None, -1, "many", 10**12, 10**9 + 1, True, 1.5])
def test_a_size_that_is_missing_or_absurd_is_named(tmp_path, key, value):
    _, values = PUBLISHED["llama 3 8B"]
    with pytest.raises(BadOption, match=key):
        read_model(write_json(tmp_path / "config.json", {**values, key: value}))


def test_safetensors_files_say_their_shapes(tmp_path):
    write_safetensors(tmp_path / "model-1.safetensors", {"a": ("BF16", [8, 16]), "ids": ("I64", [100])})
    write_safetensors(tmp_path / "model-2.safetensors", {"b": ("F32", [7])})
    index = {"metadata": {"total_size": 284}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    expected = [("a", (8, 16), "bf16"), ("b", (7,), "fp32")]
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert [(p.name, p.shape, p.dtype) for p in read_model(path).parameters] == expected
    alone = read_model(tmp_path / "model-1.safetensors")
    assert [(p.name, p.shape) for p in alone.parameters] == [("a", (8, 16))]


def test_an_index_without_its_files_gives_the_number_that_it_states(tmp_path):
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {f"w{i}": "x.safetensors" for i in range(291)}}
    model = read_model(write_json(tmp_path / "model.safetensors.index.json", index))
    assert model.elements == 8_030_261_248
    assert model.dtype == "bf16" and "not known" in model.remarks[0]


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.BatchNorm1d(16)).to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("weights", [True, False], ids=["with weights", "state alone"])
def test_a_checkpoint_gives_the_shapes_of_its_weights(tmp_path, flat, weights):
    model = small_model()
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = {"optim": get_optimizer_state_dict(model, optimizer, options=options), "step": 3}
    saved["random"] = torch.get_rng_state()
    if weights:
        saved["model"] = get_model_state_dict(model)
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    found = read_model(tmp_path)
    shapes = {p.name.removeprefix("model."): p.shape for p in found.parameters}
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    buffers = {name: tuple(b.shape) for name, b in model.named_buffers() if b.is_floating_point()}
    assert shapes == (expected | buffers if weights else expected)
    assert found.dtype == ("bf16" if weights else None)


class Bomb:
    def __reduce__(self):
        return (print, ("the checkpoint's own code ran",))


def test_looking_at_a_checkpoint_runs_nothing_of_it(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Bomb()}))
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert "own code ran" in capsys.readouterr().out  # the bomb is a live one
    with pytest.raises(BadOption, match="no metadata"):
        read_model(tmp_path)
    assert capsys.readouterr().out == ""


DAMAGED = {
    "config.json": [b"", b"[1, 2]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"hidden_size": 8}', b'{"model_type": 7}'],
    "model.safetensors": [b"", b"\xff" * 64, (40).to_bytes(8, "little") + b"x" * 40, (2).to_bytes(8, "little") + b"{}"],
    "model.safetensors.index.json": [b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {"a": "b"}}'],
    ".metadata": [b"", b"not a pickle", pickle.dumps([1]), pickle.dumps({})],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, cs in DAMAGED.items() for c in cs])
def test_a_damaged_file_is_one_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadOption) as raised:
        read_model(tmp_path / name)
    assert name in str(raised.value) or str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_header_with_absurd_shapes_is_refused(tmp_path):
    text = json.dumps({"a": {"dtype": "F32", "shape": ["wide"]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BadOption, match="'a'"):
        read_model(tmp_path)


def test_an_unknown_family_says_what_is_known(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(BadOption, match="transformers is installed") as raised:
        read_model(write_json(tmp_path / "config.json", {"model_type": "perceiver"}))
    assert all(name in str(raised.value) for name in FAMILIES)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 3,
    "moe_intermediate_size": 32,
}


def small(**more):
    return dict(shapes_of({**SMALL, **more}))


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_a_head_that_is_tied_by_default_is_no_parameter(family):
    assert "lm_head.weight" not in small(model_type=family)
    assert "lm_head.weight" in small(model_type=family, tie_word_embeddings=False)


def test_every_second_layer_has_experts_where_the_step_is_two():
    found = small(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=32, decoder_sparse_step=2)
    assert {name.split(".")[2] for name in found if "experts" in name} == {"1", "3"}


def test_biases_of_latent_attention_are_those_of_the_two_projections_down_and_of_the_output():
    found = small(**LATENT, attention_bias=True)
    with_bias = {name.split(".")[-2] for name in found if name.endswith("bias")}
    assert with_bias == {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}


def test_shared_experts_are_one_feed_forward_as_wide_as_all_of_them():
    assert small(**LATENT)["model.layers.0.mlp.shared_experts.up_proj.weight"] == (3 * 32, 64)


def test_biases_of_a_feed_forward_are_the_configs():
    found = small(model_type="llama", mlp_bias=True)
    assert {name.split(".")[-2] for name in found if name.endswith("bias")} == {"gate_proj", "up_proj", "down_proj"}
