"""Qwen3-Next: Qwen3.5's layers with experts, as earlier checkpoints name and order them."""

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.families.qwen import sparse_layers
from ramify.gpu.models.families.qwen3_5 import MOE, hybrid
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family

_DEFAULTS = MOE | {
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def define(fields: Fields) -> Definition:
    shared = fields.integer("shared_expert_intermediate_size")
    return hybrid(fields, sparse_layers(fields, shared), fused=True)


FAMILIES = (Family("Qwen3NextForCausalLM", "qwen3_next", _DEFAULTS, define),)
