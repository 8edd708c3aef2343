"""Mistral: Llama's layers, with a window in all or in none. Small 3 and 4 have Pixtral's tower."""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.families import mistral4
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, windows
from ramify.gpu.models.rope import rope
from ramify.gpu.models.towers import pixtral_vision

DEFAULTS = COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}


def define(fields: Fields) -> Definition:
    positions, feed_forward = rope(fields), dense(fields)
    layers = [
        LayerSettings(attention(fields, positions, window=window), feed_forward)
        for window in windows(fields, lambda index: True)
    ]
    return decoder(fields, layers)


_WHOLE = ("Mistral3ForConditionalGeneration", "mistral3")
_SMALL_4 = Family(*_WHOLE, mistral4.DEFAULTS, mistral4.define, text="mistral4", vision=pixtral_vision)
FAMILIES = (
    Family("MistralForCausalLM", "mistral", DEFAULTS, define),
    Family(*_WHOLE, DEFAULTS, define, text="mistral", other=_SMALL_4, vision=pixtral_vision),
)
