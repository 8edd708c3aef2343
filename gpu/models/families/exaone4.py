"""Exaone 4: norms after, and of each head of q and k; positions in layers with a window only.

A model without windows has positions everywhere.
"""

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count, windows
from ramify.gpu.models.rope import rope

DEFAULTS = COMMON | {
    "rms_norm_eps": 1e-5,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "eos_token_id": 2,
}


def define(fields: Fields) -> Definition:
    positions, feed_forward = rope(fields), dense(fields)
    hybrid = fields.get("sliding_window") is not None
    layers = [
        LayerSettings(
            attention(
                fields, None if hybrid and window is None else positions, window=window,
                qk_norm="head",
            ),
            feed_forward,
            norms="after",
        )
        for window in _windows(fields)
    ]  # fmt: skip
    return decoder(fields, layers)


def _windows(fields: Fields) -> list[int | None]:
    """Read the pattern: a number N, every Nth layer has no window; or letters: L has one, G none."""
    pattern, last = fields.get("sliding_window_pattern"), layer_count(fields) - 1
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        letters = pattern
        return windows(fields, lambda index: letters[index % len(letters)] == "L" and index != last)
    if pattern is None or pattern == 0:
        return windows(fields, lambda index: False)
    every = fields.integer("sliding_window_pattern")
    return windows(fields, lambda index: (index + 1) % every > 0)


FAMILIES = (Family("Exaone4ForCausalLM", "exaone4", DEFAULTS, define),)
