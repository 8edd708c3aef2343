"""Qwen3.5 and later: gated delta nets, every fourth layer attention; or with experts."""

from collections.abc import Sequence
from dataclasses import replace

from ramify.gpu.models.definition import (
    Definition,
    DeltaSettings,
    FeedForwardSettings,
    LayerSettings,
    MixerSettings,
)
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import (
    COMMON,
    Family,
    attention,
    decoder,
    dense,
    experts,
    layer_count,
    layer_kinds,
)
from ramify.gpu.models.rope import sectioned_rope
from ramify.gpu.models.towers import qwen_vision
from ramify.gpu.ops.experts import RouterSettings
from ramify.gpu.vision.tower import Vision

_DEFAULTS = COMMON | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
MOE = _DEFAULTS | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

_IDS = {
    "image_token_id": 248056,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def define(fields: Fields) -> Definition:
    return hybrid(fields, [dense(fields)] * layer_count(fields))


def define_moe(fields: Fields) -> Definition:
    shared = fields.integer("shared_expert_intermediate_size")
    feed_forward = experts(fields, RouterSettings(), shared=shared, shared_gated=True)
    return hybrid(fields, [feed_forward] * layer_count(fields))


def hybrid(
    fields: Fields, feed_forwards: Sequence[FeedForwardSettings], fused: bool = False
) -> Definition:
    """Define the hybrid. `feed_forwards`: each layer's. `fused`: see `DeltaSettings`."""
    fields.get("attn_output_gate")  # every checkpoint has the gate
    kind = fields.get("output_gate_type")
    if kind not in (None, "sigmoid"):
        raise fields.refused(f"output_gate_type is {kind!r}: only sigmoid is served")
    positions = sectioned_rope(fields, (11, 11, 10), partial=True)
    bias = fields.flag("attention_bias")
    full = attention(fields, positions, qk_norm="head", qkv_bias=bias, output_bias=bias)
    mixers: dict[str, MixerSettings] = {
        "full_attention": replace(full, gated=True),
        "linear_attention": replace(_delta(fields), fused=fused),
    }
    every = fields.integer("full_attention_interval", 4)
    kinds = layer_kinds(
        fields, mixers, lambda index: "linear_attention" if (index + 1) % every else "full_attention"
    )
    layers = [LayerSettings(mixers[kind], each) for kind, each in zip(kinds, feed_forwards, strict=True)]
    return decoder(fields, layers, norm_offset=1.0, skipped=("mtp.",))


def _delta(fields: Fields) -> DeltaSettings:
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if values % keys:
        raise fields.refused(f"linear_num_value_heads {values} is no multiple of {keys} key heads")
    return DeltaSettings(
        keys, values, fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim", most=64),
    )  # fmt: skip


def _vision(whole: Fields, hidden: int) -> Vision:
    return qwen_vision(whole, hidden, _IDS)


FAMILIES = (
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", _DEFAULTS, define),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", MOE, define_moe),
    Family(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        MOE,
        define_moe,
        text="qwen3_5_moe_text",
        vision=_vision,
    ),
    Family(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        _DEFAULTS,
        define,
        text="qwen3_5_text",
        vision=_vision,
    ),
)
