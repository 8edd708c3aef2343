"""Granite 3, dense: Llama's layers with factors on embeddings, residual, scores and logits."""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.families import llama
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family, attention, decoder, dense, layer_count
from ramify.gpu.models.rope import rope

_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
DEFAULTS = llama.DEFAULTS | dict.fromkeys(_FACTORS, 1.0)


def define(fields: Fields) -> Definition:
    """What a layer adds counts `residual` times: the stream is kept divided by it instead.

    A norm does not see that, but for what it adds to the mean square.
    """
    embedding, residual, scores, logits = (_factor(fields, name) for name in _FACTORS)
    bias = fields.flag("attention_bias")
    layer = LayerSettings(
        attention(fields, rope(fields), scale=scores, qkv_bias=bias, output_bias=bias),
        dense(fields, bias=fields.flag("mlp_bias")),
    )
    return decoder(
        fields, [layer] * layer_count(fields), embedding_scale=embedding / residual,
        rms_eps=fields.number("rms_norm_eps") / residual**2, logit_scale=1 / logits,
    )  # fmt: skip


def _factor(fields: Fields, name: str) -> float:
    value = fields.optional(name)
    return 1.0 if value is None else value


FAMILIES = (Family("GraniteForCausalLM", "granite", DEFAULTS, define),)
