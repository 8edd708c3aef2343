"""Mistral Small 4, text: latent attention, whose queries grow with the position, and experts."""

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, latent_attention, latent_decoder
from ramify.gpu.ops.experts import RouterSettings

_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
DEFAULTS = COMMON | {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "max_position_embeddings": 1048576,
    "eos_token_id": 2,
    "rope_parameters": _ROPE,
}


def define(fields: Fields) -> Definition:
    router = RouterSettings(
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    return latent_decoder(fields, latent_attention(fields, grows=True), router, "softmax")


FAMILIES = (Family("Mistral4ForCausalLM", "mistral4", DEFAULTS, define),)
