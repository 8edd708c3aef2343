"""GLM 4.5 to 4.7 with experts: the first layers dense, sigmoid routers, one shared expert.

4.7-Flash: latent attention.
"""

from typing import Literal

from ramify.gpu.models.definition import Definition, LayerSettings
from ramify.gpu.models.families.deepseek import sigmoid_router
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import (
    COMMON,
    SHARED_EXPERTS,
    Family,
    after_dense,
    attention,
    decoder,
    latent_attention,
    latent_decoder,
    layer_count,
    routed_experts,
)
from ramify.gpu.models.rope import rope

_DEFAULTS = COMMON | {
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
_LITE = _DEFAULTS | {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": 202752,
    "partial_rotary_factor": 1.0,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "eos_token_id": 1,
}


def define(fields: Fields) -> Definition:
    positions = rope(fields, partial=True)
    qk_norm: Literal["head"] | None = "head" if fields.flag("use_qk_norm") else None
    bias, layers = fields.flag("attention_bias"), layer_count(fields)
    mixer = attention(fields, positions, qk_norm=qk_norm, qkv_bias=bias)
    sparse = routed_experts(fields, sigmoid_router(fields))
    extra = f"model.layers.{layers}."  # of the layer that predicts further tokens
    return decoder(
        fields,
        [LayerSettings(mixer, each) for each in after_dense(fields, sparse)],
        names=SHARED_EXPERTS,
        skipped=(extra,),
    )


def define_lite(fields: Fields) -> Definition:
    return latent_decoder(fields, latent_attention(fields), sigmoid_router(fields), "sigmoid")


FAMILIES = (
    Family("Glm4MoeForCausalLM", "glm4_moe", _DEFAULTS, define),
    Family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _LITE, define_lite),
)
