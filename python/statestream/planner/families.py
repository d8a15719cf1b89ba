"""Parameter shapes of common language models out of their Hugging Face config.json, by arithmetic.

Each family is a function from a config to (name, shape) pairs, as transformers builds the causal language model;
stacked experts are one tensor. tests/planner compares the sums with published counts, tests/integrations the shapes
with transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from statestream.planner.quantities import BadOption

__all__ = ["FAMILIES", "Config", "shapes_of"]

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]

MOST = 10**9
"""Of any size in a config: more is no model."""
MOST_LAYERS = 10_000


class Config:
    """A config.json, whose numbers are checked as they are read. BadOption, naming the key, for what is no size."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def size(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """The first of the keys that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise BadOption("source", f"{key} is {value!r} in the config; it must be a number from 0 to {most}")
            return value
        if default is None:
            raise BadOption("source", f"the config has no {keys[0]!r}")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is not None and value not in (0, 1):  # which False and True are
            raise BadOption("source", f"{key} is {value!r} in the config; it must be true or false")
        return default if value is None else bool(value)

    def numbers(self, key: str) -> frozenset[int]:
        """A list of layers, empty where it is not there."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is int for item in value)):
            raise BadOption("source", f"{key} is {value!r} in the config; it must be a list of numbers")
        return frozenset(value or ())

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key and value heads, and the elements of a head."""
        heads = self.size("num_attention_heads")
        groups = self.size("num_key_value_heads", default=heads)
        if not heads:
            raise BadOption("source", "num_attention_heads is 0 in the config")
        return heads, groups, self.size("head_dim", default=self.size("hidden_size") // heads)


def _linear(name: str, out: int, into: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _attention(c: Config, bias: bool, out_bias: bool) -> Shapes:
    hidden, (heads, groups, size) = c.size("hidden_size"), c.heads()
    yield from _linear("self_attn.q_proj", heads * size, hidden, bias)
    yield from _linear("self_attn.k_proj", groups * size, hidden, bias)
    yield from _linear("self_attn.v_proj", groups * size, hidden, bias)
    yield from _linear("self_attn.o_proj", hidden, heads * size, out_bias)


def _head_norms(c: Config) -> Shapes:
    _, _, size = c.heads()
    yield "self_attn.q_norm.weight", (size,)
    yield "self_attn.k_norm.weight", (size,)


def _gated(hidden: int, inner: int, name: str = "mlp", bias: bool = False) -> Shapes:
    yield from _linear(f"{name}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias)


def _experts(hidden: int, inner: int, experts: int, router: str = "mlp.gate") -> Shapes:
    yield f"{router}.weight", (experts, hidden)
    yield "mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, inner)


def _norms(hidden: int, *names: str) -> Shapes:
    for name in names:
        yield f"{name}.weight", (hidden,)


_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _decoder(c: Config, layer: Callable[[int], Shapes], tied: bool) -> Shapes:
    """Embedding, layers, the last norm, and the head unless it is the embedding."""
    hidden, vocabulary = c.size("hidden_size"), c.size("vocab_size")
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(c.size("num_hidden_layers", most=MOST_LAYERS)):
        for name, shape in layer(i):
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not c.flag("tie_word_embeddings", tied):
        yield "lm_head.weight", (vocabulary, hidden)


def _llama(
    c: Config,
    qkv_bias: bool | None = None,
    tied: bool = False,
    norms: tuple[str, ...] = _TWO_NORMS,
    head_norms: bool = False,
) -> Shapes:
    """Llama and its kin. `qkv_bias` None: as the config says, and of the output projection too."""
    hidden, bias = c.size("hidden_size"), c.flag("attention_bias")

    def layer(_: int) -> Shapes:
        yield from _attention(c, bias if qkv_bias is None else qkv_bias, bias if qkv_bias is None else False)
        if head_norms:
            yield from _head_norms(c)
        yield from _gated(hidden, c.size("intermediate_size"), bias=c.flag("mlp_bias"))
        yield from _norms(hidden, *norms)

    return _decoder(c, layer, tied)


def _olmo2(c: Config) -> Shapes:
    """Norms of all heads together, and norms after attention and feed-forward instead of before."""
    hidden, (heads, groups, size) = c.size("hidden_size"), c.heads()

    def layer(_: int) -> Shapes:
        yield from _attention(c, c.flag("attention_bias"), c.flag("attention_bias"))
        yield "self_attn.q_norm.weight", (heads * size,)
        yield "self_attn.k_norm.weight", (groups * size,)
        yield from _gated(hidden, c.size("intermediate_size"))
        yield from _norms(hidden, "post_attention_layernorm", "post_feedforward_layernorm")

    return _decoder(c, layer, tied=False)


def _phi3(c: Config) -> Shapes:
    """Fused projections."""
    hidden, inner, (heads, groups, size) = c.size("hidden_size"), c.size("intermediate_size"), c.heads()

    def layer(_: int) -> Shapes:
        yield from _linear("self_attn.qkv_proj", (heads + 2 * groups) * size, hidden)
        yield from _linear("self_attn.o_proj", hidden, heads * size)
        yield from _linear("mlp.gate_up_proj", 2 * inner, hidden)
        yield from _linear("mlp.down_proj", hidden, inner)
        yield from _norms(hidden, *_TWO_NORMS)

    return _decoder(c, layer, tied=False)


def _mixtral(c: Config) -> Shapes:
    hidden = c.size("hidden_size")

    def layer(_: int) -> Shapes:
        yield from _attention(c, False, False)
        yield from _experts(hidden, c.size("intermediate_size"), c.size("num_local_experts", "num_experts"))
        yield from _norms(hidden, *_TWO_NORMS)

    return _decoder(c, layer, tied=False)


def _qwen3_moe(c: Config) -> Shapes:
    hidden, experts = c.size("hidden_size"), c.size("num_experts", "num_local_experts")
    dense = c.numbers("mlp_only_layers")
    every = max(1, c.size("decoder_sparse_step", default=1))

    def layer(i: int) -> Shapes:
        yield from _attention(c, c.flag("attention_bias"), c.flag("attention_bias"))
        yield from _head_norms(c)
        if i in dense or (i + 1) % every or not experts:
            yield from _gated(hidden, c.size("intermediate_size"))
        else:
            yield from _experts(hidden, c.size("moe_intermediate_size"), experts)
        yield from _norms(hidden, *_TWO_NORMS)

    return _decoder(c, layer, tied=False)


def _deepseek(c: Config) -> Shapes:
    """Multi-head latent attention; the first layers dense, then routed and shared experts (without the layers that
    predict further tokens, which transformers leaves out)."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    nope, rope, value = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim"), c.size("v_head_dim")
    rank, query_rank = c.size("kv_lora_rank"), c.values.get("q_lora_rank")
    bias = c.flag("attention_bias")

    def attention() -> Shapes:
        if query_rank is None:
            yield from _linear("self_attn.q_proj", heads * (nope + rope), hidden)
        else:
            yield from _linear("self_attn.q_a_proj", c.size("q_lora_rank"), hidden, bias)
            yield "self_attn.q_a_layernorm.weight", (c.size("q_lora_rank"),)
            yield from _linear("self_attn.q_b_proj", heads * (nope + rope), c.size("q_lora_rank"))
        yield from _linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias)
        yield "self_attn.kv_a_layernorm.weight", (rank,)
        yield from _linear("self_attn.kv_b_proj", heads * (nope + value), rank)
        yield from _linear("self_attn.o_proj", hidden, heads * value, bias)

    def layer(i: int) -> Shapes:
        yield from attention()
        if i < c.size("first_k_dense_replace", default=0):
            yield from _gated(hidden, c.size("intermediate_size"))
        else:
            inner = c.size("moe_intermediate_size")
            yield from _experts(hidden, inner, c.size("n_routed_experts", "num_local_experts"))
            yield from _gated(hidden, inner * c.size("n_shared_experts"), "mlp.shared_experts")
        yield from _norms(hidden, *_TWO_NORMS)

    return _decoder(c, layer, tied=False)


def _gpt2(c: Config) -> Shapes:
    hidden, inner = c.size("n_embd"), c.size("n_inner", default=4 * c.size("n_embd"))
    yield "transformer.wte.weight", (c.size("vocab_size"), hidden)
    yield "transformer.wpe.weight", (c.size("n_positions"), hidden)
    for i in range(c.size("n_layer", most=MOST_LAYERS)):
        at = f"transformer.h.{i}"
        for norm in ("ln_1", "ln_2"):
            yield f"{at}.{norm}.weight", (hidden,)
            yield f"{at}.{norm}.bias", (hidden,)
        # Its weights are stored the other way round.
        for name, into, out in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, inner),
            ("mlp.c_proj", inner, hidden),
        ):
            yield f"{at}.{name}.weight", (into, out)
            yield f"{at}.{name}.bias", (out,)
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)
    if not c.flag("tie_word_embeddings", True):
        yield "lm_head.weight", (c.size("vocab_size"), hidden)


FAMILIES: dict[str, Callable[[Config], Shapes]] = {
    "llama": _llama,
    "mistral": lambda c: _llama(c, qkv_bias=False),
    "qwen2": lambda c: _llama(c, qkv_bias=True),
    "qwen3": lambda c: _llama(c, head_norms=True),
    "gemma": lambda c: _llama(c, tied=True),
    "gemma2": lambda c: _llama(c, tied=True, norms=_FOUR_NORMS),
    "gemma3_text": lambda c: _llama(c, tied=True, norms=_FOUR_NORMS, head_norms=True),
    "olmo2": _olmo2,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
}
"""By the config's `model_type`."""


def shapes_of(values: Mapping[str, Any]) -> list[tuple[str, Shape]] | None:
    """None for a `model_type` that is in no family here. BadOption where a size that it takes is missing or absurd."""
    family = FAMILIES.get(str(values.get("model_type")))
    return None if family is None else list(family(Config(values)))
