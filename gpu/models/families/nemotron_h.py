"""Nemotron-H and 3: blocks that are each Mamba-2, attention or a feed-forward without a gate.

A block that mixes and the feed-forward behind it are one layer here. `transformers` keeps dt above
`time_step_min` in prompts and not in decodes; here dt is never clamped, so that a hit equals a miss.
"""

from typing import Literal

from ramify.gpu.models.definition import (
    Definition,
    DenseSettings,
    ExpertNames,
    ExpertSettings,
    FeedForwardSettings,
    LayerSettings,
    MambaSettings,
    MixerSettings,
    TensorNames,
)
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, check_steps, decoder, experts
from ramify.gpu.ops.experts import RouterSettings

_DEFAULTS = COMMON | {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "eos_token_id": 2,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
}
_MOST_BLOCKS = 1024
_EXPERTS = ExpertNames(
    each=("up_proj", "down_proj"), stacked=("experts.up_proj", "experts.down_proj"),
    shared="shared_experts",
)  # fmt: skip

Kind = Literal["mamba", "self_attn", "mlp", "moe"]
_KINDS: dict[object, Kind] = {
    "M": "mamba", "mamba": "mamba", "linear_attention": "mamba",
    "*": "self_attn", "attention": "self_attn", "full_attention": "self_attn",
    "-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe",
}  # fmt: skip


def define(fields: Fields) -> Definition:
    fields.get("n_routed_experts")  # stated where no block has any
    kinds = _kinds(fields)
    mixers = _mixers(fields)
    feed_forwards: dict[Kind, FeedForwardSettings] = {"mlp": _dense(fields)} if "mlp" in kinds else {}
    if "moe" in kinds:
        feed_forwards["moe"] = _experts(fields)
    layers: list[LayerSettings] = []
    renamed = [("backbone.embeddings.", "model.embed_tokens."), ("backbone.norm_f.", "model.norm.")]
    for index, kind in enumerate(kinds):
        if kind in mixers:
            layers.append(LayerSettings(mixers[kind], None))
        elif not layers or layers[-1].feed_forward is not None:
            raise fields.refused(f"block {index} is a feed-forward that no mixer stands before")
        else:
            layers[-1] = LayerSettings(layers[-1].mixer, feed_forwards[kind])
        ours = f"model.layers.{len(layers) - 1}."
        norm, part = ("input_layernorm", kind) if kind in mixers else ("post_attention_layernorm", "mlp")
        theirs = f"backbone.layers.{index}."
        renamed += [(f"{theirs}norm.", f"{ours}{norm}."), (f"{theirs}mixer.", f"{ours}{part}.")]
    names = TensorNames(
        gate_up=("up_proj",), experts=_EXPERTS, renamed=tuple(renamed), skipped=("mtp.",)
    )
    return decoder(fields, layers, names=names, rms_eps=fields.number("layer_norm_epsilon"))


def _kinds(fields: Fields) -> list[Kind]:
    """List the kind of each block."""
    stated = fields.get("hybrid_override_pattern") or fields.get("layers_block_type")
    if not isinstance(stated, (str, list)) or not 1 <= len(stated) <= _MOST_BLOCKS:
        raise fields.refused(f"layers_block_type must name 1 to {_MOST_BLOCKS} blocks")
    for each in stated:
        if not isinstance(each, str) or each not in _KINDS:
            raise fields.refused(
                f"layers_block_type names {each!r}: {fields.architecture} is served with mamba, "
                "attention, mlp and moe"
            )
    return [_KINDS[each] for each in stated]


def _mixers(fields: Fields) -> dict[Kind, MixerSettings]:
    heads, groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    if heads % groups:
        raise fields.refused(f"mamba_num_heads {heads} is no multiple of {groups} n_groups")
    if fields.get("mamba_hidden_act") != "silu":
        raise fields.refused(f"mamba_hidden_act is {fields.get('mamba_hidden_act')!r}: must be silu")
    check_steps(fields)
    mamba = MambaSettings(
        heads, fields.integer("mamba_head_dim"), groups, fields.integer("ssm_state_size"),
        kernel=fields.integer("conv_kernel", most=64), conv_bias=fields.flag("use_conv_bias"),
        bias=fields.flag("use_bias"), norm_eps=fields.number("layer_norm_epsilon"),
    )  # fmt: skip
    bias = fields.flag("attention_bias")
    return {"mamba": mamba, "self_attn": attention(fields, None, qkv_bias=bias, output_bias=bias)}


def _check_activation(fields: Fields) -> None:
    if fields.get("mlp_hidden_act") != "relu2":
        raise fields.refused(f"mlp_hidden_act is {fields.get('mlp_hidden_act')!r}: must be relu2")


def _experts(fields: Fields) -> ExpertSettings:
    _check_activation(fields)
    if fields.get("moe_latent_size") is not None or fields.flag("mlp_bias"):
        raise fields.refused("moe_latent_size and mlp_bias: experts are served without them")
    router = RouterSettings(
        score="sigmoid",
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=fields.integer("n_group"),
        top_groups=fields.integer("topk_group"),
        corrected=True,
    )
    shared = fields.integer("moe_shared_expert_intermediate_size")
    return experts(fields, router, count="n_routed_experts", shared=shared, kind="relu2")


def _dense(fields: Fields) -> DenseSettings:
    _check_activation(fields)
    return DenseSettings(fields.integer("intermediate_size"), "relu2", fields.flag("mlp_bias"))


FAMILIES = (Family("NemotronHForCausalLM", "nemotron_h", _DEFAULTS, define),)
