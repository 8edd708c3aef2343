"""Seed-OSS: Llama's layers, with biases on q, k and v and on the output apart."""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count
from ramify.gpu.models.rope import rope

DEFAULTS = COMMON | {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "eos_token_id": 2,
}


def define(fields: Fields) -> Definition:
    bias, output_bias = fields.flag("attention_bias"), fields.flag("attention_out_bias")
    layer = LayerSettings(
        attention(fields, rope(fields), qkv_bias=bias, output_bias=output_bias),
        dense(fields, bias=fields.flag("mlp_bias")),
    )
    return decoder(fields, [layer] * layer_count(fields))


FAMILIES = (Family("SeedOssForCausalLM", "seed_oss", DEFAULTS, define),)
