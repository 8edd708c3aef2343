"""Reads a checkpoint's config.json into the one description that the decoder is built from.

Parses the file itself (importing `transformers` costs seconds), with each family's defaults: a
config.json saved by `transformers` leaves out what equals them. Both spellings of the rotary
settings are read: `rope_theta` + `rope_scaling`, and `rope_parameters` of transformers 5.
What this build cannot run raises ModelError that names the file and the field.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.kv.layout import KVLayout, PairLayout
from ramify.gpu.models.families import FAMILIES, Family
from ramify.gpu.ops.base import Activation
from ramify.gpu.ops.rotary import RopeSettings
from ramify.protocol.errors import ModelError

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and variants of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int  # max_position_embeddings
    context: int  # longest sequence to serve unless another is asked for
    longest: int | None  # the most that may be asked for; None: any
    rope: RopeSettings  # has at least rope_type and rope_theta
    local_rope: RopeSettings | None  # of the layers with a window; None: the same
    specs: tuple[AttentionSpec, ...]  # of the layers
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool  # lm_head shares the embedding
    eos_token_ids: tuple[int, ...]
    dtype: str  # as the file states it
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to the weights of the norms
    post_norms: bool = False  # what attention and feed-forward add to the residual is normalised
    logit_softcap: float | None = None

    @property
    def attention_width(self) -> int:
        """Heads times head size: what goes into the output projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def attention_shape(self, dtype: torch.dtype) -> AttentionShape:
        """What attention back ends are chosen and made by."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, dtype, self.specs)

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """How keys and values are kept."""
        return PairLayout(self.layers, self.kv_heads, self.head_dim, dtype)


def read_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json and generation_config.json. Raises ModelError."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give the folder of a Hugging Face checkpoint")
    raw = _read_json(path)
    if raw is None:
        raise ModelError(f"{path} is missing: give the folder of a Hugging Face checkpoint")
    generation = _read_json(folder / "generation_config.json") or {}
    return parse_config(raw, generation, path)


def parse_config(raw: dict[str, Any], generation: dict[str, Any], path: Path) -> DecoderConfig:
    """`raw`: config.json; `generation`: generation_config.json; `path`: named in errors."""
    architecture = _architecture(raw, path)
    family = FAMILIES[architecture]
    fields = _Fields(family.defaults | raw, path)
    _refuse_variants(raw, fields, path)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", hidden // heads)
    layers = fields.integer("num_hidden_layers")
    if heads % kv_heads:
        raise ModelError(f"{path}: num_attention_heads {heads} is no multiple of {kv_heads} kv heads")
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim {head_dim} is odd: rotary embedding needs an even one")
    max_position = fields.integer("max_position_embeddings")
    attention_bias = bool(fields.get("attention_bias"))
    rope, local_rope = _ropes(raw, family, max_position, path)
    context, longest = _contexts(rope, max_position, path)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps"),
        max_position=max_position,
        context=context,
        longest=longest,
        rope=rope,
        local_rope=local_rope,
        specs=_specs(fields, _windows(fields, family, layers, path), head_dim),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(fields.get("mlp_bias")) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied=bool(fields.get("tie_word_embeddings")),
        eos_token_ids=_eos(fields, generation),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        activation=_ACTIVATIONS[_activation(fields)],
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        logit_softcap=fields.optional("final_logit_softcapping"),
    )


class _Fields:
    """Typed access to a config's values, with errors that name the file and the field."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self._values = values
        self._path = path

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self._path}: {name} is {value!r}: must be a positive integer")
        return value

    def optional(self, name: str) -> float | None:
        """A positive number; None: the config has none."""
        if self._values.get(name) is None:
            return None
        value = self.number(name)
        if value <= 0:
            raise ModelError(f"{self._path}: {name} is {value!r}: must be a positive number or null")
        return value

    def number(self, name: str) -> float:
        value = self._values.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"{self._path}: {name} is {value!r}: must be a number")
        return float(value)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _architecture(raw: dict[str, Any], path: Path) -> str:
    supported = ", ".join(FAMILIES)
    named = raw.get("architectures")
    if not named:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        if raw.get("model_type") in by_type:
            return by_type[raw["model_type"]]
        raise ModelError(f"{path} names no architecture (model_type {raw.get('model_type')!r}): "
                         f"this build serves {supported}")  # fmt: skip
    if not isinstance(named, list) or named[0] not in FAMILIES:
        raise ModelError(
            f"{path}: architecture {named!r} is not supported: this build serves {supported}"
        )
    return str(named[0])


def _refuse_variants(raw: dict[str, Any], fields: _Fields, path: Path) -> None:
    """Settings that change the mathematics and that the decoder does not know."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "of an unknown method")
        raise ModelError(f"{path}: quantization_config ({method}) is not supported: give a checkpoint "
                         "in float32, bfloat16 or float16")  # fmt: skip
    if _activation(fields) not in _ACTIVATIONS:
        raise ModelError(f"{path}: hidden_act {_activation(fields)!r} is not supported: "
                         f"only {', '.join(_ACTIVATIONS)}")  # fmt: skip
    if fields.get("use_bidirectional_attention"):
        raise ModelError(f"{path}: use_bidirectional_attention is not supported: only causal attention")
    if raw.get("model_type") == "gemma3_text" and raw.get("attn_logit_softcapping"):
        raise ModelError(f"{path}: attn_logit_softcapping is not supported: scores of Gemma 3 have no "
                         "soft cap, set it to null")  # fmt: skip
    rope = raw.get("rope_parameters") or {}
    partial = raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{path}: partial_rotary_factor {partial} is not supported: only 1.0")


def _activation(fields: _Fields) -> str:
    return str(fields.get("hidden_activation") or fields.get("hidden_act"))


def _specs(fields: _Fields, windows: tuple[int | None, ...], head_dim: int) -> tuple[AttentionSpec, ...]:
    scalar = fields.optional("query_pre_attn_scalar")
    scale = (head_dim if scalar is None else scalar) ** -0.5
    softcap = fields.optional("attn_logit_softcapping")
    return tuple(AttentionSpec(scale, softcap, window) for window in windows)


def _ropes(
    raw: dict[str, Any], family: Family, max_position: int, path: Path
) -> tuple[RopeSettings, RopeSettings | None]:
    """The settings of the layers, and those of the layers with a window if they are others."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    local: Any = {}
    if family.local_rope_theta is not None and isinstance(given, dict):
        local = given.get("sliding_attention") or {}
        if "full_attention" in given or local:
            given = given.get("full_attention") or {}
    rope = _rope_settings(raw, given, raw.get("rope_theta") or family.rope_theta, max_position, path)
    if family.local_rope_theta is None:
        return rope, None
    theta = raw.get("rope_local_base_freq") or family.local_rope_theta
    return rope, _rope_settings(raw, local, theta, max_position, path)


def _rope_settings(
    raw: dict[str, Any], given: Any, theta: float, max_position: int, path: Path
) -> RopeSettings:
    """Both spellings as one dict with `rope_type`, `rope_theta` and the type's own fields."""
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{path}: rope_parameters per layer type are not supported")
    rope = dict(given)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = theta
    outer = raw.get("original_max_position_embeddings")
    if outer is not None:
        rope["original_max_position_embeddings"] = outer
    rope.setdefault("original_max_position_embeddings", max_position)
    rope["max_position_embeddings"] = max_position
    return rope


def _contexts(rope: RopeSettings, max_position: int, path: Path) -> tuple[int, int | None]:
    """The context to serve, and the longest that may be asked for (None: any).

    `max_position_embeddings` means either of two lengths. Qwen's documentation adds YaRN to a config
    that keeps stating the original length; other checkpoints state the stretched one. With
    YaRN the product of factor and original length tells, because both are given for it. The factor
    of `linear` may or may not be counted in already, so it is served only if it is asked for;
    `llama3` and `longrope` always state the stretched length. `dynamic` stretches to any length.
    """
    kind, factor = rope["rope_type"], rope.get("factor")
    if kind == "dynamic":
        return max_position, None
    if kind not in ("yarn", "linear") or factor is None:
        return max_position, max_position
    original = rope["original_max_position_embeddings"] if kind == "yarn" else max_position
    for name, value in (("factor", factor), ("original_max_position_embeddings", original)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
            raise ModelError(
                f"{path}: {name} of rope_type {kind!r} is {value!r}: must be a positive number"
            )
    stretched = max(max_position, int(factor * original))
    return stretched if kind == "yarn" else max_position, stretched


def _windows(fields: _Fields, family: Family, layers: int, path: Path) -> tuple[int | None, ...]:
    """Each layer's sliding window."""
    window = fields.get("sliding_window")
    if family.model_type == "llama" or window is None:
        return (None,) * layers
    if family.model_type.startswith("qwen") and not fields.get("use_sliding_window"):
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"{path}: sliding_window is {window!r}: must be a positive integer or null")
    types = fields.get("layer_types")
    if types:
        known = {"sliding_attention", "full_attention"}
        if len(types) != layers or not set(types) <= known:
            raise ModelError(
                f"{path}: layer_types must name {layers} layers, each one of {sorted(known)}"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.full_every is not None:
        pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern")
        every = int(pattern or family.full_every)
        return tuple(window if (i + 1) % every else None for i in range(layers))
    if family.model_type.startswith("qwen"):
        first = int(fields.get("max_window_layers") or 0)
        return tuple(window if i >= first else None for i in range(layers))
    return (window,) * layers


def _eos(fields: _Fields, generation: dict[str, Any]) -> tuple[int, ...]:
    """All ids that end a text: generation_config.json and config.json may each name some."""
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), fields.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in ids:
                ids.append(token)
    return tuple(ids)
