"""Granite 3: Llama's layers with factors on embeddings, residual, scores and logits; or with experts."""

from dataclasses import replace

from ramify.gpu.models.definition import (
    Definition,
    ExpertNames,
    FeedForwardSettings,
    LayerSettings,
    TensorNames,
)
from ramify.gpu.models.families import llama
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family, attention, decoder, dense, experts, layer_count
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import RouterSettings

_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
DEFAULTS = llama.DEFAULTS | dict.fromkeys(_FACTORS, 1.0)
_MOE = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}
STACKED = ExpertNames(router="router.layer", stacked=("input_linear.weight", "output_linear.weight"))
_NAMES = replace(TensorNames(), feed_forward="block_sparse_moe", experts=STACKED)


def define(fields: Fields) -> Definition:
    return _define(fields, dense(fields, bias=fields.flag("mlp_bias")), TensorNames())


def define_moe(fields: Fields) -> Definition:
    feed_forward = experts(fields, RouterSettings(), count="num_local_experts", size="intermediate_size")
    return _define(fields, feed_forward, _NAMES)


def _define(fields: Fields, feed_forward: FeedForwardSettings, names: TensorNames) -> Definition:
    scale, bias = factor(fields, "attention_multiplier"), fields.flag("attention_bias")
    mixer = attention(fields, rope(fields), scale=scale, qkv_bias=bias, output_bias=bias)
    return scaled(fields, [LayerSettings(mixer, feed_forward)] * layer_count(fields), names)


def scaled(fields: Fields, layers: list[LayerSettings], names: TensorNames) -> Definition:
    """Make a decoder whose layers' terms count `residual` times: the stream is divided by it instead.

    A norm sees that in its epsilon alone.
    """
    residual = factor(fields, "residual_multiplier")
    return decoder(
        fields, layers, names=names,
        embedding_scale=factor(fields, "embedding_multiplier") / residual,
        rms_eps=fields.number("rms_norm_eps") / residual**2,
        logit_scale=1 / factor(fields, "logits_scaling"),
    )  # fmt: skip


def factor(fields: Fields, name: str) -> float:
    value = fields.optional(name)
    return 1.0 if value is None else value


FAMILIES = (
    Family("GraniteForCausalLM", "granite", DEFAULTS, define),
    Family("GraniteMoeForCausalLM", "granitemoe", _MOE, define_moe),
)
