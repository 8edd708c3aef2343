"""The parts of family files: functions from a config's fields to layers' settings."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.models.definition import (
    AttentionSettings,
    Definition,
    DenseSettings,
    ExpertNames,
    ExpertSettings,
    FeedForwardSettings,
    KeptSettings,
    LatentSettings,
    LayerSettings,
    MambaSettings,
    TensorNames,
    TokenInputs,
)
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.rope import TYPES, contexts, rope
from ramify.gpu.ops.base import Activation
from ramify.gpu.ops.experts import RouterSettings
from ramify.gpu.ops.rotary import RopeSettings, yarn_scale
from ramify.gpu.vision.tower import TowerSettings, Vision

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_LAYERS = 1024
_MOST_EXPERTS = 4096

# As models with a vision tower call them, those of the LLaVA kind; older ones have no `model.` in front
_RENAMED = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
)
_TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "visual.",
)

SHARED_EXPERTS = TensorNames(experts=ExpertNames(shared="shared_experts"))
"""The tensor names of checkpoints with DeepSeek's experts."""

COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Defaults that most config classes of `transformers` have."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. `defaults`: of its config class; a saved config.json leaves out equal values.

    `text`: of a model with a vision tower: the `model_type` of its text part. `vision`: reads the
    tower's settings from those of the whole; None: the text part is served alone.
    """

    architecture: str
    model_type: str
    defaults: dict[str, Any]
    define: Callable[[Fields], Definition]
    text: str | None = None
    other: "Family | None" = None  # the same around another text part
    vision: Callable[[Fields, int], Vision] | None = None


def of_text(definition: Definition) -> Definition:
    """Adapt a definition to a checkpoint with a vision tower, whose tensors are not read."""
    towers = (*_TOWER, *(f"model.{name}" for name in _TOWER))
    skipped = (*definition.names.skipped, *towers)
    names = replace(definition.names, renamed=_RENAMED, skipped=skipped)
    return replace(definition, names=names)


def seeing(definition: Definition, vision: Vision) -> Definition:
    """Add vision to a definition."""
    layers = []
    for layer in definition.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionSettings):
            whole = vision.whole == "all" or (
                vision.whole == "windows" and mixer.spec.window is not None
            )
            mixer = replace(mixer, spec=replace(mixer.spec, whole=whole))
        layers.append(replace(layer, mixer=mixer))
    return replace(definition, layers=tuple(layers), vision=vision)


def with_tower(names: TensorNames, tower: TowerSettings) -> TensorNames:
    """Adapt the names of `of_text` to a tower that is read as well."""
    read = {*tower.parts, *(f"model.{name}" for name in tower.parts)}
    skipped = tuple(name for name in names.skipped if name not in read)
    return replace(names, skipped=(*skipped, *tower.unread), renamed=(*names.renamed, *tower.renamed))


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=_MOST_LAYERS)


def layer_kinds(fields: Fields, known: Collection[str], kind: Callable[[int], str]) -> list[str]:
    """List each layer's kind, one of `known`. `kind`: of a layer, without `layer_types`."""
    layers, types = layer_count(fields), fields.get("layer_types")
    if types is None:
        return [kind(index) for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(each in known for each in types):
        raise fields.refused(f"layer_types must name {layers} layers, each one of {sorted(known)}")
    return [str(each) for each in types]


def windows(fields: Fields, windowed: Callable[[int], bool]) -> list[int | None]:
    """List each layer's sliding window. `windowed`: which layers have it, without `layer_types`."""
    layers, window = layer_count(fields), fields.optional_integer("sliding_window")
    types = fields.get("layer_types")
    if window is None:
        return [None] * layers
    if not types:
        return [window if windowed(index) else None for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in TYPES for kind in types):
        raise fields.refused(f"layer_types must name {layers} layers, each one of {sorted(TYPES)}")
    return [window if kind == "sliding_attention" else None for kind in types]


def attention(
    fields: Fields,
    rope: RopeSettings | None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    qk_norm: Literal["head", "width"] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    sinks: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> AttentionSettings:
    """Make the settings of attention. `scale`: None: by the size of a head. `sinks`: there are some.

    `kv_heads`, `head_dim`: None: the config's.
    """
    heads = fields.integer("num_attention_heads")
    if kv_heads is None:
        kv_heads = fields.integer("num_key_value_heads", heads)
    if head_dim is None:
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    if heads % kv_heads:
        raise fields.refused(f"num_attention_heads {heads} is no multiple of {kv_heads} kv heads")
    if head_dim % 2:
        raise fields.refused(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
    turned = int(head_dim * rope.get("partial_rotary_factor", 1)) if rope is not None else 0
    if turned % 2:
        told = f"partial_rotary_factor turns {turned} of a head's {head_dim} values"
        raise fields.refused(f"{told}: rotary embedding needs an even number")
    sunk = torch.empty(heads, device="meta") if sinks else None
    spec = AttentionSpec(head_dim**-0.5 if scale is None else scale, softcap, window, sunk)
    return AttentionSettings(heads, kv_heads, head_dim, spec, rope, qk_norm, qkv_bias, output_bias)


def mamba(
    fields: Fields, *, width: int | None = None, normed: bool = True, norm_first: bool = False
) -> MambaSettings:
    """Make the settings of Mamba-2, of fields `mamba_...`. `width`: of all heads; None: the config's."""
    if width is None:
        width = fields.integer("mamba_expand", most=64) * fields.integer("hidden_size")
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    if fields.get("mamba_d_head") not in (None, "auto", width // heads) or width % heads:
        raise fields.refused(f"mamba_n_heads {heads} of mamba_d_head are not the mixer's width, {width}")
    if heads % groups:
        raise fields.refused(f"mamba_n_heads {heads} is no multiple of {groups} groups")
    check_steps(fields)
    return MambaSettings(
        heads, width // heads, groups, fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv", most=64), conv_bias=fields.flag("mamba_conv_bias"),
        bias=fields.flag("mamba_proj_bias"),
        norm_eps=fields.number("rms_norm_eps") if normed else None, norm_first=norm_first,
    )  # fmt: skip


def check_steps(fields: Fields) -> None:
    """Raise ModelError for bounds of dt, which `transformers` obeys in prompts and not in decodes."""
    bounds = fields.get("time_step_limit")
    if bounds not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.refused(f"time_step_limit is {bounds!r}: only [0, Infinity] is served")


def dense(fields: Fields, *, bias: bool = False, size: int | None = None) -> DenseSettings:
    """Make the settings of a dense feed-forward. `size`: None: the config's."""
    size = fields.integer("intermediate_size") if size is None else size
    return DenseSettings(size, activation(fields), bias)


def experts(
    fields: Fields,
    router: RouterSettings,
    *,
    count: str = "num_experts",
    size: str = "moe_intermediate_size",
    top: str = "num_experts_per_tok",
    shared: int | None = None,
    shared_gated: bool = False,
    kind: Literal["clamped_swiglu", "relu2"] | None = None,
    bias: bool = False,
) -> ExpertSettings:
    """Make the settings of experts. `router`: without `top`. `count`, `size`, `top`: names of fields.

    `shared`: size of the expert that every token goes through. `kind`: None: the config's activation.
    """
    fields.get(count)
    if fields.get("num_local_experts") is not None:  # as `transformers` calls it in files that it writes
        count = "num_local_experts"
    many = fields.integer(count, most=_MOST_EXPERTS)
    chosen = fields.integer(top, most=many)
    if many % router.groups or not 1 <= router.top_groups <= router.groups:
        raise fields.refused(
            f"{many} experts are not in {router.groups} groups, of which {router.top_groups} are chosen"
        )
    if chosen > many // router.groups * router.top_groups:
        raise fields.refused(f"{top} is {chosen}: more than the chosen groups hold")
    router = replace(router, top=chosen)
    own = kind or activation(fields)
    return ExpertSettings(many, fields.integer(size), own, router, shared, shared_gated, bias)


def routed_experts(fields: Fields, router: RouterSettings) -> ExpertSettings:
    """Make the settings of experts from DeepSeek's fields; shared experts are one wide one."""
    shared = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", most=64)
    return experts(fields, router, count="n_routed_experts", shared=shared)


def after_dense(fields: Fields, sparse: ExpertSettings) -> list[FeedForwardSettings]:
    """List each layer's feed-forward: the first ones dense."""
    layers, first = layer_count(fields), fields.get("first_k_dense_replace")
    kinds = fields.get("mlp_layer_types")  # as `transformers` calls it in files that it writes
    if kinds is None:
        if not isinstance(first, int) or first < 0:
            raise fields.refused(f"first_k_dense_replace is {first!r}: must be a number of layers")
        kinds = ["dense" if index < first else "sparse" for index in range(layers)]
    known = ("dense", "sparse")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(each in known for each in kinds):
        raise fields.refused(f"mlp_layer_types must name {layers} layers, each dense or sparse")
    return [sparse if kind == "sparse" else dense(fields) for kind in kinds]


def latent_attention(fields: Fields, grows: bool = False, turns: bool = True) -> LatentSettings:
    """Make the settings of latent attention. `grows`: read `llama_4_scaling_beta`. `turns`: rotate."""
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.refused(f"num_key_value_heads is not {heads}: each head has keys of its own")
    nope, turned = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if turned % 2:
        raise fields.refused(f"qk_rope_head_dim {turned} is odd: rotary embedding needs an even one")
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    given = given if isinstance(given, dict) else {}  # which `rope` refuses
    for name in ("factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta"):
        if not isinstance(given.get(name, 0), (int, float, type(None))):
            raise fields.refused(f"{name} is {given[name]!r}: must be a number")
    beta, share = given.get("llama_4_scaling_beta"), given.get("partial_rotary_factor")
    if share not in (None, 1, turned / (nope + turned)):  # of a head, whose other part never turns
        raise fields.refused(f"partial_rotary_factor is {share!r}: qk_rope_head_dim says what turns")
    unread = ("partial_rotary_factor", "llama_4_scaling_beta")[: 1 + grows]
    positions, scale, every = rope(fields, unread=unread) if turns else None, (nope + turned) ** -0.5, 0
    if positions is not None:
        every = positions["original_max_position_embeddings"]
    if positions and positions["rope_type"] != "default" and positions.get("mscale_all_dim"):
        scale *= yarn_scale(positions.get("factor") or 1, positions["mscale_all_dim"]) ** 2
    q_rank, bias = fields.optional_integer("q_lora_rank"), fields.flag("attention_bias")
    if bias and q_rank is None:
        raise fields.refused("attention_bias is true: it is served where q_lora_rank is given")
    return LatentSettings(
        heads, fields.integer("kv_lora_rank"), nope, turned, fields.integer("v_head_dim"),
        AttentionSpec(scale), positions, q_rank, turns and fields.get("rope_interleave") is not False,
        bias,
        (float(beta), every) if beta else None,  # which `rope` refuses where they do not grow
    )  # fmt: skip


def latent_decoder(
    fields: Fields, mixer: LatentSettings, router: RouterSettings, score: str
) -> Definition:
    """Make a decoder of latent attention, with experts after the first layers. `score`: the router's."""
    for name, served in (("moe_layer_freq", 1), ("scoring_func", score)):
        if fields.get(name) not in (None, served):
            raise fields.refused(f"{name} is {fields.get(name)!r}: {fields.architecture} is served "
                                 f"with {served}")  # fmt: skip
    feed_forwards = after_dense(fields, routed_experts(fields, router))
    extra = f"model.layers.{len(feed_forwards)}."  # of the layer that predicts further tokens
    layers = [LayerSettings(mixer, each) for each in feed_forwards]
    return decoder(fields, layers, names=SHARED_EXPERTS, skipped=(extra,))


def activation(fields: Fields) -> Activation:
    """Read the activation of a gate."""
    name = str(fields.get("hidden_activation") or fields.get("hidden_act"))
    if name not in _ACTIVATIONS:
        raise fields.refused(f"hidden_act {name!r} is not supported: only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def decoder(
    fields: Fields,
    layers: Sequence[LayerSettings],
    *,
    names: TensorNames = TensorNames(),  # noqa: B008
    embedding_scale: float = 1.0,
    embedding_scale_rounded: bool = False,
    norm_offset: float = 0.0,
    rms_eps: float | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    token_inputs: TokenInputs | None = None,
    layer_scalars: bool = False,
    tied: bool | None = None,
    skipped: tuple[str, ...] = (),
) -> Definition:
    """Make a definition of `layers` and the rest. `rms_eps`, `tied`: None: the config's.

    `skipped`: more of `TensorNames.skipped`.
    """
    max_position = fields.integer("max_position_embeddings")
    mixers = [each.mixer for each in layers if isinstance(each.mixer, KeptSettings)]
    if not mixers:
        raise fields.refused("no layer is attention: models without keys and values are not served")
    context, longest = contexts((mixer.rope for mixer in mixers), max_position, fields)
    return Definition(
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(layers),
        names=replace(names, skipped=(*names.skipped, *skipped)),
        rms_eps=fields.number("rms_norm_eps") if rms_eps is None else rms_eps,
        tied=fields.flag("tie_word_embeddings") if tied is None else tied,
        max_position=max_position,
        context=context,
        longest=longest,
        eos_token_ids=fields.eos(),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        embedding_scale=embedding_scale,
        embedding_scale_rounded=embedding_scale_rounded,
        norm_offset=norm_offset,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        token_inputs=token_inputs,
        layer_scalars=layer_scalars,
    )
