"""SmolLM3: Llama's layers, every fourth without positions."""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count, windows
from ramify.gpu.models.rope import rope

DEFAULTS = COMMON | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
    "eos_token_id": 128001,
}


def define(fields: Fields) -> Definition:
    turned = _turned(fields)
    bias, positions = fields.flag("attention_bias"), rope(fields, 2_000_000.0)
    found: list[int | None] = [None] * len(turned)
    if fields.flag("use_sliding_window"):
        found = windows(fields, lambda index: not turned[index])
    feed_forward = dense(fields, bias=fields.flag("mlp_bias"))
    mixers = [
        attention(
            fields, positions if has else None, window=window, qkv_bias=bias, output_bias=bias
        )
        for has, window in zip(turned, found, strict=True)
    ]  # fmt: skip
    return decoder(fields, [LayerSettings(mixer, feed_forward) for mixer in mixers])


def _turned(fields: Fields) -> list[bool]:
    """List whether each layer has positions: `no_rope_layers` is 1 where it has."""
    layers, given = layer_count(fields), fields.get("no_rope_layers")
    every = fields.integer("no_rope_layer_interval")
    if given is None:
        return [(index + 1) % every > 0 for index in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(one not in (0, 1) for one in given):
        raise fields.refused(f"no_rope_layers must hold 0 or 1 for each of {layers} layers")
    return [bool(one) for one in given[:layers]]


FAMILIES = (Family("SmolLM3ForCausalLM", "smollm3", DEFAULTS, define),)
