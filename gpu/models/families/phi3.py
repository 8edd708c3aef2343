"""Phi-3 and Phi-4: q, k and v, and gate and up, each one tensor; LongRoPE, on a part of each head."""

from ramify.gpu.models.definition import Definition, LayerSettings, TensorNames
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, windows
from ramify.gpu.models.rope import rope

DEFAULTS = COMMON | {
    "rms_norm_eps": 1e-5,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "eos_token_id": 32000,
}
_NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def define(fields: Fields) -> Definition:
    positions, feed_forward = rope(fields, partial=True), dense(fields)
    if positions["rope_type"] in ("su", "yarn"):  # its name in early checkpoints
        positions["rope_type"] = "longrope"
    layers = [
        LayerSettings(attention(fields, positions, window=window), feed_forward)
        for window in windows(fields, lambda index: True)
    ]
    return decoder(fields, layers, names=_NAMES)


FAMILIES = (Family("Phi3ForCausalLM", "phi3", DEFAULTS, define),)
