"""DeepSeek V2 and V3 (R1, Kimi K2): latent attention, the first layers dense, then experts."""

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, latent_attention, latent_decoder
from ramify.gpu.ops.experts import RouterSettings

_LATENT = COMMON | {
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V2 = _LATENT | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
V3 = _LATENT | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
}


def define_2(fields: Fields) -> Definition:
    method = fields.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refused(f"topk_method is {method!r}: must be greedy or group_limited_greedy")
    if fields.flag("norm_topk_prob"):
        raise fields.refused(f"norm_topk_prob is true: {fields.architecture} is served without")
    grouped = method == "group_limited_greedy"
    router = RouterSettings(
        renormalise=False,
        scale=fields.number("routed_scaling_factor"),
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
        group_best=1,
    )
    return latent_decoder(fields, latent_attention(fields), router, "softmax")


def sigmoid_router(fields: Fields) -> RouterSettings:
    return RouterSettings(
        score="sigmoid",
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        corrected=True,
    )


def define_3(fields: Fields) -> Definition:
    return latent_decoder(fields, latent_attention(fields), sigmoid_router(fields), "sigmoid")


FAMILIES = (
    Family("DeepseekV2ForCausalLM", "deepseek_v2", _V2, define_2),
    Family("DeepseekV3ForCausalLM", "deepseek_v3", V3, define_3),
)
