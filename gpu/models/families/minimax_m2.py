"""MiniMax M2: norms over all of q and of k, a part of each head turns, sigmoid routers."""

from dataclasses import replace

from ramify.gpu.models.definition import Definition, ExpertNames, LayerSettings, TensorNames
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, experts, layer_count
from ramify.gpu.models.rope import rope
from ramify.gpu.ops.experts import RouterSettings

_DEFAULTS = COMMON | {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "eos_token_id": 200020,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
}
_NAMES = replace(
    TensorNames(),
    feed_forward="block_sparse_moe",
    experts=ExpertNames(each=("w1", "w3", "w2"), correction="e_score_correction_bias"),
    skipped=("model.mtp",),
)
_SERVED = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}


def define(fields: Fields) -> Definition:
    for name, served in (*_SERVED.items(), ("shared_intermediate_size", 0)):
        if fields.get(name) not in (None, served):
            raise fields.refused(f"{name} is {fields.get(name)!r}: MiniMax M2 is served with {served!r}")
    turned, head_dim = fields.optional_integer("rotary_dim"), fields.integer("head_dim")
    positions = rope(fields, 5_000_000.0, partial=True)
    if turned is not None:  # as published files say it
        positions = positions | {"partial_rotary_factor": turned / head_dim}
    router = RouterSettings(score="sigmoid", corrected=True)
    feed_forward = experts(fields, router, count="num_local_experts", size="intermediate_size")
    layer = LayerSettings(attention(fields, positions, qk_norm="width"), feed_forward)
    return decoder(fields, [layer] * layer_count(fields), names=_NAMES)


FAMILIES = (Family("MiniMaxM2ForCausalLM", "minimax_m2", _DEFAULTS, define),)
