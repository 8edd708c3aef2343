"""Qwen 2, 2.5 and 3, dense: biases on q, k and v, or norms of each head of q and k."""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count, windows
from ramify.gpu.models.rope import rope

_COMMON = COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _windows(fields: Fields) -> list[int | None]:
    if not fields.flag("use_sliding_window"):
        return [None] * layer_count(fields)
    first = int(fields.get("max_window_layers") or 0)
    return windows(fields, lambda index: index >= first)


def define_2(fields: Fields) -> Definition:
    positions, feed_forward = rope(fields), dense(fields)
    layers = [
        LayerSettings(attention(fields, positions, window=window, qkv_bias=True), feed_forward)
        for window in _windows(fields)
    ]
    return decoder(fields, layers)


def define_3(fields: Fields) -> Definition:
    positions, feed_forward, bias = rope(fields), dense(fields), fields.flag("attention_bias")
    mixers = [
        attention(fields, positions, window=window, qk_norm="head", qkv_bias=bias, output_bias=bias)
        for window in _windows(fields)
    ]
    return decoder(fields, [LayerSettings(one, feed_forward) for one in mixers])


FAMILIES = (
    Family("Qwen2ForCausalLM", "qwen2", _COMMON, define_2),
    Family("Qwen3ForCausalLM", "qwen3", _COMMON | {"head_dim": 128}, define_3),
)
