"""Mixtral: Mistral's layers, each with experts of which two are chosen."""

from dataclasses import replace

from ramify.gpu.models.definition import Definition, ExpertNames, LayerSettings, TensorNames
from ramify.gpu.models.families import mistral
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family, attention, decoder, experts, windows
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import RouterSettings

_DEFAULTS = mistral.DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1_000_000.0,
}
_NAMES = replace(
    TensorNames(), feed_forward="block_sparse_moe", experts=ExpertNames(each=("w1", "w3", "w2"))
)


def define(fields: Fields) -> Definition:
    positions = rope(fields)
    feed_forward = experts(fields, RouterSettings(), count="num_local_experts", size="intermediate_size")
    layers = [
        LayerSettings(attention(fields, positions, window=window), feed_forward)
        for window in windows(fields, lambda index: True)
    ]
    return decoder(fields, layers, names=_NAMES)


FAMILIES = (Family("MixtralForCausalLM", "mixtral", _DEFAULTS, define),)
