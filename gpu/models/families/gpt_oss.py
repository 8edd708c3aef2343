"""gpt-oss: biases everywhere, heads with sinks, a window in every other layer, clamped experts."""

from dataclasses import replace

from ramify.gpu.models.definition import Definition, ExpertNames, LayerSettings, TensorNames
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, experts, windows
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import CLAMP, SHARPNESS, RouterSettings

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = COMMON | {
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": SHARPNESS,
    "swiglu_limit": CLAMP,
    "attention_bias": True,
    "rope_parameters": _YARN,
    "torch_dtype": "bfloat16",  # which the published files leave out
}
_NAMES = replace(TensorNames(), experts=ExpertNames(router="router", interleaved=True))


def define(fields: Fields) -> Definition:
    for name, served in (("swiglu_alpha", SHARPNESS), ("swiglu_limit", CLAMP)):
        if fields.number(name) != served:
            raise fields.refused(f"{name} is {fields.get(name)!r}: gpt-oss is served with {served}")
    # softmax over the chosen ones is that over all, renormalised
    feed_forward = experts(
        fields, RouterSettings(), count="num_local_experts", size="intermediate_size",
        kind="clamped_swiglu", bias=True,
    )  # fmt: skip
    positions, bias = rope(fields, 150_000.0), fields.flag("attention_bias")
    layers = [
        LayerSettings(
            attention(fields, positions, window=window, qkv_bias=bias, output_bias=bias, sinks=True),
            feed_forward,
        )
        for window in windows(fields, lambda index: index % 2 == 0)
    ]
    return decoder(fields, layers, names=_NAMES)


FAMILIES = (Family("GptOssForCausalLM", "gpt_oss", _DEFAULTS, define),)
