"""Kimi-Linear: delta nets whose channels decay by themselves, every fourth layer latent attention
without positions, and experts behind the first layers."""

from ramify.gpu.models.definition import (
    Definition,
    DeltaSettings,
    ExpertNames,
    LayerSettings,
    MixerSettings,
    TensorNames,
)
from ramify.gpu.models.families.deepseek import V3, sigmoid_router
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import (
    Family,
    after_dense,
    decoder,
    latent_attention,
    layer_kinds,
    routed_experts,
)

_DEFAULTS = V3 | {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.446,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
_CALLED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}


def define(fields: Fields) -> Definition:
    fields.rename(_CALLED)
    for name, served in (("mla_use_nope", True), ("moe_layer_freq", 1), ("scoring_func", "sigmoid")):
        if fields.get(name) not in (None, served):
            raise fields.refused(f"{name} is {fields.get(name)!r}: served is {served!r}")
    given = fields.inside("linear_attn_config")  # as it is published; `transformers` writes it flat
    heads = given.integer("num_heads", fields.integer("linear_num_heads"))
    dim = given.integer("head_dim", fields.integer("linear_head_dim"))
    kernel = given.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim"), most=64)
    latent = latent_attention(fields, turns=False)
    delta = DeltaSettings(heads, heads, dim, dim, kernel, rank=dim)
    mixers: dict[str, MixerSettings] = {"full_attention": latent, "linear_attention": delta}
    full = given.get("full_attn_layers")
    if full is not None and not isinstance(full, list):
        raise given.refused(f"full_attn_layers is {full!r}: must be a list of layers, from 1 on")

    def kind(index: int) -> str:
        attends = index and index % 4 == 0 if full is None else index + 1 in full
        return "full_attention" if attends else "linear_attention"

    kinds = layer_kinds(fields, mixers, kind)
    layers = [
        LayerSettings(mixers[kind], each)
        for kind, each in zip(
            kinds, after_dense(fields, routed_experts(fields, sigmoid_router(fields))), strict=True
        )
    ]
    # files that `transformers` writes have all feed-forwards where experts are published
    places = [f"model.layers.{index}." for index in range(len(layers))]
    moved = tuple((f"{place}block_sparse_moe.", f"{place}mlp.") for place in places)
    experts = ExpertNames(each=("w1", "w3", "w2"), shared="shared_experts")
    return decoder(fields, layers, names=TensorNames(experts=experts, renamed=moved))


FAMILIES = (Family("KimiLinearForCausalLM", "kimi_linear", _DEFAULTS, define),)
