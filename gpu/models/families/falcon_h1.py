"""Falcon-H1: attention and Mamba-2 side by side in every layer; factors, which weights take over."""

from ramify.gpu.models.definition import Definition, LayerSettings, MambaSettings, TensorNames
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, layer_count, mamba
from ramify.gpu.models.rope import rope

_FACTORS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
    "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
_DEFAULTS = (
    COMMON
    | dict.fromkeys(_FACTORS, 1.0)
    | {
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }
)


def define(fields: Fields) -> Definition:
    for name in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
        if fields.flag(name):
            raise fields.refused(f"{name} is true: {fields.architecture} is served without it")
    mixer = attention(fields, rope(fields))
    beside = mamba(
        fields, width=fields.optional_integer("mamba_d_ssm"), normed=fields.flag("mamba_rms_norm"),
        norm_first=fields.flag("mamba_norm_before_gate"),
    )  # fmt: skip
    feed_forward = dense(fields, bias=fields.flag("mlp_bias"))
    layer = LayerSettings(mixer, feed_forward, beside=beside)
    factors = {name: _number(fields, name, fields.get(name)) for name in _FACTORS}
    names = TensorNames(
        before=("input_layernorm", "pre_ff_layernorm"), feed_forward="feed_forward",
        last_norm="final_layernorm",
        scaled=(
            *_attention(mixer.width, mixer.kv_width, fields.integer("hidden_size"), factors),
            *_mamba(beside, fields, factors),
            *_feed_forward(feed_forward.size, fields),
        ),
    )  # fmt: skip
    return decoder(
        fields, [layer] * layer_count(fields), names=names,
        embedding_scale=factors["embedding_multiplier"], logit_scale=factors["lm_head_multiplier"],
    )  # fmt: skip


Scaled = tuple[str, tuple[tuple[int, float], ...]]


def _attention(own: int, kv: int, hidden: int, factors: dict[str, float]) -> list[Scaled]:
    read = factors["attention_in_multiplier"]
    return [
        ("self_attn.q_proj.weight", ((own, read),)),
        ("self_attn.k_proj.weight", ((kv, read * factors["key_multiplier"]),)),
        ("self_attn.v_proj.weight", ((kv, read),)),
        ("self_attn.o_proj.weight", ((hidden, factors["attention_out_multiplier"]),)),
    ]


def _mamba(one: MambaSettings, fields: Fields, factors: dict[str, float]) -> list[Scaled]:
    """Scale gates, x, B, C and steps one by one."""
    grouped, read = one.groups * one.state_dim, factors["ssm_in_multiplier"]
    rows, each = (
        (one.width, one.width, grouped, grouped, one.heads),
        _numbers(fields, "ssm_multipliers", 5),
    )
    scaled = tuple((count, read * factor) for count, factor in zip(rows, each, strict=True))
    written = factors["ssm_out_multiplier"]
    return [
        ("mamba.in_proj.weight", scaled),
        ("mamba.out_proj.weight", ((fields.integer("hidden_size"), written),)),
    ]


def _feed_forward(size: int, fields: Fields) -> list[Scaled]:
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    hidden = fields.integer("hidden_size")
    parts = (("gate_proj", size, gate), ("down_proj", hidden, down))
    return [
        (f"feed_forward.{name}.{kind}", ((rows, factor),))
        for name, rows, factor in parts
        for kind in ("weight", "bias")
    ]


def _numbers(fields: Fields, name: str, count: int) -> list[float]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) != count:
        raise fields.refused(f"{name} is {value!r}: must be {count} numbers")
    return [_number(fields, name, one) for one in value]


def _number(fields: Fields, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise fields.refused(f"{name} holds {value!r}: must be a number")
    return float(value)


FAMILIES = (Family("FalconH1ForCausalLM", "falcon_h1", _DEFAULTS, define),)
