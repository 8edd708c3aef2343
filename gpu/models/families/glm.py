"""GLM 4.5 to 4.7 with experts: the first layers dense, sigmoid routers, one shared expert."""

from dataclasses import replace
from typing import Literal

from ramify.gpu.models.definition import (
    Definition,
    ExpertNames,
    FeedForwardSettings,
    LayerSettings,
    TensorNames,
)
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, experts, layer_count
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import RouterSettings

_DEFAULTS = COMMON | {
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
_NAMES = replace(TensorNames(), experts=ExpertNames(shared="shared_experts"))


def define(fields: Fields) -> Definition:
    positions = rope(fields, partial=True)
    qk_norm: Literal["head"] | None = "head" if fields.flag("use_qk_norm") else None
    bias, layers = fields.flag("attention_bias"), layer_count(fields)
    mixer = attention(fields, positions, qk_norm=qk_norm, qkv_bias=bias)
    router = RouterSettings(
        score="sigmoid",
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=fields.integer("n_group"),
        top_groups=fields.integer("topk_group"),
        corrected=True,
    )
    shared = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", most=64)
    sparse = experts(fields, router, count="n_routed_experts", shared=shared)
    first = fields.get("first_k_dense_replace")
    if not isinstance(first, int) or first < 0:
        raise fields.refused(f"first_k_dense_replace is {first!r}: must be a number of layers")
    feed_forwards: list[FeedForwardSettings] = [
        dense(fields) if index < first else sparse for index in range(layers)
    ]
    extra = f"model.layers.{layers}."  # of the layer that predicts further tokens
    return decoder(
        fields,
        [LayerSettings(mixer, each) for each in feed_forwards],
        names=replace(_NAMES, skipped=(extra,)),
    )


FAMILIES = (Family("Glm4MoeForCausalLM", "glm4_moe", _DEFAULTS, define),)
