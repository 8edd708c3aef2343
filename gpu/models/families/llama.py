"""Llama 2 and 3."""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count
from ramify.gpu.models.rope import rope

DEFAULTS = COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


def define(fields: Fields) -> Definition:
    bias = fields.flag("attention_bias")
    layer = LayerSettings(
        attention(fields, rope(fields), qkv_bias=bias, output_bias=bias),
        dense(fields, bias=fields.flag("mlp_bias")),
    )
    return decoder(fields, [layer] * layer_count(fields))


FAMILIES = (Family("LlamaForCausalLM", "llama", DEFAULTS, define),)
