"""Qwen 2, 2.5 and 3: biases on q, k and v, or norms of each head of q and k; dense, or with experts."""

from ramify.gpu.models.definition import Definition, FeedForwardSettings, LayerSettings
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import (
    COMMON,
    Family,
    attention,
    decoder,
    dense,
    experts,
    layer_count,
    windows,
)
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import RouterSettings

_COMMON = COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MOE_2 = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_MOE_3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def _windows(fields: Fields) -> list[int | None]:
    if not fields.flag("use_sliding_window"):
        return [None] * layer_count(fields)
    first = int(fields.get("max_window_layers") or 0)
    return windows(fields, lambda index: index >= first)


def define_2(fields: Fields) -> Definition:
    return _biased(fields, [dense(fields)] * layer_count(fields))


def define_2_moe(fields: Fields) -> Definition:
    shared = fields.integer("shared_expert_intermediate_size")
    return _biased(fields, sparse_layers(fields, shared))


def _biased(fields: Fields, feed_forwards: list[FeedForwardSettings]) -> Definition:
    positions, bias = rope(fields), fields.get("qkv_bias") is not False
    mixers = [attention(fields, positions, window=window, qkv_bias=bias) for window in _windows(fields)]
    return decoder(fields, list(map(LayerSettings, mixers, feed_forwards)))


def define_3(fields: Fields) -> Definition:
    return _normed(fields, [dense(fields)] * layer_count(fields))


def define_3_moe(fields: Fields) -> Definition:
    return _normed(fields, sparse_layers(fields))


def _normed(fields: Fields, feed_forwards: list[FeedForwardSettings]) -> Definition:
    positions, bias = rope(fields), fields.flag("attention_bias")
    mixers = [
        attention(fields, positions, window=window, qk_norm="head", qkv_bias=bias, output_bias=bias)
        for window in _windows(fields)
    ]
    return decoder(fields, list(map(LayerSettings, mixers, feed_forwards)))


def sparse_layers(fields: Fields, shared: int | None = None) -> list[FeedForwardSettings]:
    """List each layer's feed-forward. `shared`: the size of the expert that all tokens go through."""
    dense_ones, layers = fields.get("mlp_only_layers") or [], layer_count(fields)
    if not isinstance(dense_ones, list) or not set(map(str, dense_ones)) <= set(map(str, range(layers))):
        raise fields.refused(f"mlp_only_layers must be a list of layers, from 0 to {layers - 1}")
    every = fields.integer("decoder_sparse_step", 1)
    router = RouterSettings(renormalise=fields.flag("norm_topk_prob"))
    sparse = experts(fields, router, shared=shared, shared_gated=shared is not None)
    return [
        dense(fields) if index in dense_ones or (index + 1) % every else sparse
        for index in range(layers)
    ]


FAMILIES = (
    Family("Qwen2ForCausalLM", "qwen2", _COMMON, define_2),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", _COMMON | _MOE_2, define_2_moe),
    Family("Qwen3ForCausalLM", "qwen3", _COMMON | {"head_dim": 128}, define_3),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", _COMMON | _MOE_3, define_3_moe),
)
