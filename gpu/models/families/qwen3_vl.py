"""Qwen3-VL: the decoder of Qwen3 with three positions a token, and a vision tower beside it."""

from ramify.gpu.models.definition import (
    Definition,
    ExpertNames,
    FeedForwardSettings,
    LayerSettings,
    TensorNames,
)
from ramify.gpu.models.families.qwen import sparse_layers
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count
from ramify.gpu.models.rope import sectioned_rope
from ramify.gpu.models.towers import qwen_vision
from ramify.gpu.vision.tower import Vision

_DEFAULTS = COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
}
_MOE = _DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
_THETA = 500_000.0
_IDS = {
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def define(fields: Fields) -> Definition:
    return _normed(fields, [dense(fields)] * layer_count(fields))


def define_moe(fields: Fields) -> Definition:
    """Define the model with experts, in published checkpoints inputs first, in later ones outputs."""
    names = TensorNames(experts=ExpertNames(inputs=fields.integer("hidden_size")))
    return _normed(fields, sparse_layers(fields), names)


def _normed(
    fields: Fields,
    feed_forwards: list[FeedForwardSettings],
    names: TensorNames = TensorNames(),  # noqa: B008
) -> Definition:
    bias = fields.flag("attention_bias")
    mixer = attention(
        fields, sectioned_rope(fields, (24, 20, 20), _THETA), qk_norm="head", qkv_bias=bias,
        output_bias=bias,
    )  # fmt: skip
    return decoder(fields, [LayerSettings(mixer, each) for each in feed_forwards], names=names)


def _vision(whole: Fields, hidden: int) -> Vision:
    return qwen_vision(whole, hidden, _IDS, deep=(8, 16, 24))


FAMILIES = (
    Family(
        "Qwen3VLForConditionalGeneration", "qwen3_vl", _DEFAULTS, define, text="qwen3_vl_text",
        vision=_vision,
    ),
    Family(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", _MOE, define_moe,
        text="qwen3_vl_moe_text", vision=_vision,
    ),
)  # fmt: skip
