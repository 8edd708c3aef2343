"""Gemma 4: heads of another size where a layer sees all positions, KV that layers share,
inputs of tokens for every layer, experts beside a dense feed-forward (26B-A4B).
"""

from dataclasses import replace
from typing import Any

from ramify.gpu.models.definition import (
    AttentionSettings,
    Definition,
    ExpertNames,
    FeedForwardSettings,
    LayerSettings,
    TensorNames,
    TokenInputs,
)
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import (
    COMMON,
    Family,
    activation,
    attention,
    decoder,
    dense,
    experts,
    layer_count,
    windows,
)
from ramify.gpu.models.rope import ropes
from ramify.gpu.models.towers import gemma4_vision
from ramify.gpu.ops.experts import RouterSettings

_DEFAULTS = COMMON | {
    "vocab_size": 262144,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "eos_token_id": 1,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
_NAMES = TensorNames(before=("input_layernorm", "pre_feedforward_layernorm"))
_EXPERTS = ExpertNames(router="router.proj", part="")


def define(fields: Fields) -> Definition:
    if fields.get("use_bidirectional_attention") == "all":
        raise fields.refused("use_bidirectional_attention is 'all': only causal attention is served")
    everywhere, local = ropes(fields, 1_000_000.0, 10_000.0)
    found = windows(fields, lambda index: (index + 1) % 6 > 0)
    found[-1] = None  # as its config class says
    sources = _sources(fields, found)
    mixers = []
    for index, (window, source) in enumerate(zip(found, sources, strict=True)):
        kv_heads, head_dim = _sizes(fields, index, window)
        mixer = attention(
            fields, everywhere if window is None else local, window=window, scale=1.0, qk_norm="head",
            kv_heads=kv_heads, head_dim=head_dim,
        )  # fmt: skip
        same = window is None and fields.flag("attention_k_eq_v")
        mixers.append(replace(mixer, value_norm=True, keys_are_values=same, kv_of=source))
    if fields.flag("attention_bias"):
        raise fields.refused("attention_bias is true: Gemma 4 is served without")
    hidden, names = fields.integer("hidden_size"), _NAMES
    if fields.flag("enable_moe_block"):
        scale = ("router.scale", ((hidden, hidden**-0.5),))
        names = replace(names, experts=_EXPERTS, scaled=(scale,))
    return decoder(
        fields, _layers(fields, mixers), names=names,
        embedding_scale=hidden**0.5, embedding_scale_rounded=True,
        logit_softcap=fields.optional("final_logit_softcapping"),
        token_inputs=_token_inputs(fields), layer_scalars=True,
    )  # fmt: skip


def _layers(fields: Fields, mixers: list[AttentionSettings]) -> list[LayerSettings]:
    """Make the layers. Those without KV of their own may be twice as wide (`use_double_wide_mlp`)."""
    own = dense(fields)
    wide = replace(own, size=2 * own.size) if fields.flag("use_double_wide_mlp") else own
    both = [own if mixer.kv_of is None else wide for mixer in mixers]
    fed: list[FeedForwardSettings] = [*both]
    if fields.flag("enable_moe_block"):
        router = RouterSettings(weighed=True)
        one = experts(fields, router, top="top_k_experts")
        fed = [replace(one, beside=each) for each in both]
    return [LayerSettings(*each, norms="both") for each in zip(mixers, fed, strict=True)]


def _token_inputs(fields: Fields) -> TokenInputs | None:
    size = fields.get("hidden_size_per_layer_input")
    if not size:
        return None
    size = fields.integer("hidden_size_per_layer_input")
    vocabulary = fields.integer("vocab_size_per_layer_input")
    if vocabulary < fields.integer("vocab_size"):
        raise fields.refused(f"vocab_size_per_layer_input is {vocabulary}: must be that of all tokens")
    return TokenInputs(size, vocabulary, activation(fields))


def _sizes(fields: Fields, index: int, window: int | None) -> tuple[int, int]:
    """Read KV heads and head size of a layer: as published files spell them, or layer by layer."""
    kv_heads, head_dim = fields.integer("num_key_value_heads"), fields.integer("head_dim")
    own: Any = (fields.get("per_layer_config") or {}).get(str(index))
    if own is not None:
        if not isinstance(own, dict):
            raise fields.refused(f"per_layer_config[{index}] is {own!r}: must be an object")
        kv_heads, head_dim = own.get("num_key_value_heads", kv_heads), own.get("head_dim", head_dim)
        for name, value in (("num_key_value_heads", kv_heads), ("head_dim", head_dim)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 16:
                told = f"per_layer_config[{index}].{name} is {value!r}"
                raise fields.refused(f"{told}: must be a positive integer")
    elif window is None and fields.get("per_layer_config") is None:
        head_dim = fields.integer("global_head_dim")
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.optional_integer("num_global_key_value_heads") or kv_heads
    return kv_heads, head_dim


def _sources(fields: Fields, found: list[int | None]) -> list[int | None]:
    """List for each layer the one whose KV it reads: the last `num_kv_shared_layers` have none"""
    shared = fields.get("num_kv_shared_layers") or 0
    layers = layer_count(fields)
    if not isinstance(shared, int) or not 0 <= shared < layers:
        raise fields.refused(f"num_kv_shared_layers is {shared!r}: must be less than {layers} layers")
    first = layers - shared
    sources: list[int | None] = [None] * layers
    for index in range(first, layers):
        same = [each for each in range(first) if found[each] == found[index]]
        if not same:
            raise fields.refused(
                f"num_kv_shared_layers is {shared}: layer {index} has none to read from"
            )
        sources[index] = same[-1]
    return sources


FAMILIES = (
    Family("Gemma4ForCausalLM", "gemma4_text", _DEFAULTS, define),
    Family(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        _DEFAULTS,
        define,
        text="gemma4_text",
        vision=gemma4_vision,
    ),
)
