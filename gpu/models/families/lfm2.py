"""LFM2, dense: short convolutions between gates, some layers attention."""

from ramify.gpu.models.definition import (
    ConvSettings,
    Definition,
    LayerSettings,
    MixerSettings,
    TensorNames,
)
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_kinds
from ramify.gpu.models.rope import rope

_DEFAULTS = COMMON | {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_NAMES = TensorNames(
    before=("operator_norm", "ffn_norm"), output="out_proj", qk_norms=("q_layernorm", "k_layernorm"),
    feed_forward="feed_forward", gate_up=("w1", "w3"), down="w2", last_norm="embedding_norm",
)  # fmt: skip


def define(fields: Fields) -> Definition:
    feed_forward = dense(fields, size=_size(fields))
    mixers: dict[str, MixerSettings] = {
        "full_attention": attention(fields, rope(fields, 1_000_000.0), qk_norm="head"),
        "conv": ConvSettings(fields.integer("conv_L_cache", most=64), fields.flag("conv_bias")),
    }
    full = fields.get("full_attn_idxs")
    kinds = layer_kinds(
        fields, mixers, lambda index: "full_attention" if full is None or index in full else "conv"
    )
    tied = fields.get("tie_embedding")  # its name in published files
    return decoder(
        fields, [LayerSettings(mixers[kind], feed_forward) for kind in kinds], names=_NAMES,
        rms_eps=fields.number("norm_eps"), tied=None if tied is None else bool(tied),
    )  # fmt: skip


def _size(fields: Fields) -> int:
    """Compute the feed-forward's size: two thirds of the stated one, rounded up, if so configured."""
    stated = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    size = fields.integer(stated)
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    factor, multiple = fields.optional("block_ffn_dim_multiplier"), fields.integer("block_multiple_of")
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


FAMILIES = (Family("Lfm2ForCausalLM", "lfm2", _DEFAULTS, define),)
