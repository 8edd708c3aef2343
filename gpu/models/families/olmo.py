"""OLMo 2 and 3: norms behind mixers and feed-forwards, and over the whole width of q and k. OLMoE."""

from ramify.gpu.models.definition import Definition, LayerSettings
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
from ramify.gpu.models.rope import rope, ropes
from ramify.gpu.ops.experts import RouterSettings
from ramify.gpu.ops.rotary import RopeSettings

_COMMON = COMMON | {
    "rms_norm_eps": 1e-5,
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 50279,
}
_MOE = _COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def define_2(fields: Fields) -> Definition:
    return _define(fields, [(None, rope(fields))] * layer_count(fields))


def define_3(fields: Fields) -> Definition:
    theta = fields.get("rope_theta") or 500_000.0
    everywhere, local = ropes(fields, theta, theta)
    found = windows(fields, lambda index: (index + 1) % 4 > 0)
    return _define(fields, [(window, everywhere if window is None else local) for window in found])


def define_moe(fields: Fields) -> Definition:
    """Define OLMoE: norms before mixers and experts, as Llama has them."""
    bias = fields.flag("attention_bias")
    layer = LayerSettings(
        attention(fields, rope(fields), qk_norm="width", qkv_bias=bias, output_bias=bias),
        experts(
            fields, RouterSettings(renormalise=fields.flag("norm_topk_prob")), size="intermediate_size"
        ),
    )
    return decoder(fields, [layer] * layer_count(fields))


def _define(fields: Fields, mixers: list[tuple[int | None, RopeSettings]]) -> Definition:
    bias, feed_forward = fields.flag("attention_bias"), dense(fields)
    layers = [
        LayerSettings(
            attention(
                fields, positions, window=window, qk_norm="width", qkv_bias=bias, output_bias=bias
            ),
            feed_forward,
            norms="after",
        )
        for window, positions in mixers
    ]  # fmt: skip
    return decoder(fields, layers)


FAMILIES = (
    Family("Olmo2ForCausalLM", "olmo2", _COMMON, define_2),
    Family("OlmoeForCausalLM", "olmoe", _MOE, define_moe),
    Family("Olmo3ForCausalLM", "olmo3", _COMMON | {"sliding_window": 4096}, define_3),
)
