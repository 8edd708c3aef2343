"""Granite 4: Mamba-2, some layers attention; Granite 3's factors; one expert, alone or beside others."""

from dataclasses import replace

from ramify.gpu.models.definition import (
    Definition,
    FeedForwardSettings,
    LayerSettings,
    MixerSettings,
    TensorNames,
)
from ramify.gpu.models.families import granite
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family, attention, dense, experts, layer_count, layer_kinds, mamba
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import RouterSettings

_DEFAULTS = granite.DEFAULTS | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_NAMES = TensorNames(feed_forward="shared_mlp", gate_up=("input_linear",), down="output_linear")


def define(fields: Fields) -> Definition:
    placed = rope(fields) if fields.get("position_embedding_type") == "rope" else None
    bias, scale = fields.flag("attention_bias"), granite.factor(fields, "attention_multiplier")
    full = attention(fields, placed, scale=scale, qkv_bias=bias, output_bias=bias)
    mixers: dict[str, MixerSettings] = {"attention": full, "full_attention": full}
    mixers |= dict.fromkeys(("mamba", "linear_attention"), mamba(fields))
    kinds = layer_kinds(fields, mixers, lambda index: "mamba")
    shared = fields.integer("shared_intermediate_size")
    feed_forward: FeedForwardSettings = dense(fields, size=shared)
    names = _NAMES
    if fields.get("num_local_experts"):
        names, feed_forward = _with_experts(layer_count(fields)), _experts(fields, shared)
    return granite.scaled(fields, [LayerSettings(mixers[kind], feed_forward) for kind in kinds], names)


def _experts(fields: Fields, shared: int) -> FeedForwardSettings:
    router = RouterSettings()
    return experts(fields, router, count="num_local_experts", size="intermediate_size", shared=shared)


def _with_experts(layers: int) -> TensorNames:
    """Name the tensors of so many layers, whose shared expert is outside of the experts' part."""
    each = [f"model.layers.{index}." for index in range(layers)]
    moved = tuple((f"{layer}shared_mlp.", f"{layer}block_sparse_moe.shared_mlp.") for layer in each)
    named = replace(granite.STACKED, shared="shared_mlp")
    return replace(_NAMES, feed_forward="block_sparse_moe", experts=named, renamed=moved)


FAMILIES = (Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", _DEFAULTS, define),)
