"""The planner's model shapes, against the models that transformers builds and the files that it writes."""

from __future__ import annotations

import json

import pytest
import torch
from statestream.planner.families import FAMILIES, shapes_of
from statestream.planner.sources import read_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 128,
    "pad_token_id": 0,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MORE = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32},
}
VARIANTS = [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"attention_bias": True}]


def config_of(family: str, **changes):
    return transformers.AutoConfig.for_model(family, **SMALL | MORE.get(family, {}) | changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_name_and_shape_is_that_of_the_model(family, changes):
    config = config_of(family, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert dict(shapes_of(json.loads(config.to_json_string()))) == built


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_folder_that_transformers_wrote_gives_the_models_number_of_parameters(tmp_path, family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    count = sum(p.numel() for p in model.parameters())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = read_model(tmp_path)
    assert (whole.elements, whole.dtype) == (count, "bf16")
    assert read_model(tmp_path / "config.json").elements == count
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "config.json").unlink()
    assert read_model(tmp_path).elements == count  # by the bytes that the index states


def test_a_family_that_is_not_known_is_built_by_transformers(tmp_path):
    config = config_of("gpt_neox")
    assert config.model_type not in FAMILIES
    (tmp_path / "config.json").write_text(config.to_json_string())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = read_model(tmp_path)
    assert found.elements == sum(p.numel() for p in model.parameters())
    assert "from transformers" in found.remarks[0]


def test_a_config_that_transformers_does_not_take_is_one_line(tmp_path):
    from statestream.planner.quantities import BadOption

    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox", "hidden_size": "wide"}')
    with pytest.raises(BadOption, match="transformers builds no 'gpt_neox'") as raised:
        read_model(tmp_path)
    assert "\n" not in str(raised.value)
