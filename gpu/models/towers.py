"""Readers of `vision_config` in config.json: the settings of towers."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from ramify.gpu.models.fields import Fields
from ramify.gpu.vision.clip import ClipTowerSettings
from ramify.gpu.vision.gemma4 import Gemma4TowerSettings
from ramify.gpu.vision.pixtral import PixtralTowerSettings
from ramify.gpu.vision.qwen import QwenTowerSettings
from ramify.gpu.vision.siglip import SiglipTowerSettings
from ramify.gpu.vision.tower import ACTIVATIONS, Vision
from ramify.protocol.pictures import FIRST, MOST_SIDE

_MOST_LAYERS = 1024
_MOST_PATCH = 64
_GELUS: dict[str, Literal["tanh", "none"]] = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
_CLIP = {
    "hidden_size": 1024,
    "hidden_act": "quick_gelu",
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "layer_norm_eps": 1e-5,
}
_SIGLIP = {
    "hidden_size": 768,
    "hidden_act": "gelu_pytorch_tanh",
    "image_size": 224,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
_PIXTRAL = {
    "hidden_size": 1024,
    "hidden_act": "gelu",
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 16,
}
_GEMMA4 = {
    "hidden_size": 768,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 64,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_hidden_layers": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-6,
}
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}


def qwen_vision(
    whole: Fields, hidden: int, ids: Mapping[str, int], deep: tuple[int, ...] | None = None
) -> Vision:
    """Read Qwen's tower. `ids`: defaults of config.json's tokens. `deep`: the default; None: none."""
    fields = whole.inside("vision_config", _DEFAULTS)
    layers, heads = fields.integer("depth", most=_MOST_LAYERS), fields.integer("num_heads")
    own, places = fields.integer("hidden_size"), fields.integer("num_position_embeddings", most=1 << 20)
    output, kind = fields.integer("out_hidden_size"), fields.get("hidden_act")
    if own % (4 * heads) or round(places**0.5) ** 2 != places:
        raise fields.refused(f"hidden_size {own} needs a multiple of 4 times {heads} heads, and "
                             f"num_position_embeddings {places} a square")  # fmt: skip
    if output != hidden:
        raise fields.refused(f"out_hidden_size is {output}: the decoder has {hidden}")
    if kind not in _GELUS or fields.get("in_channels") not in (None, 3):
        raise fields.refused(f"hidden_act {kind!r}: only {', '.join(_GELUS)} of 3 channels are served")
    given = fields.get("deepstack_visual_indexes")
    behind = list(deep or ()) if given is None else given
    if not isinstance(behind, list) or not all(each in range(layers) for each in behind):
        raise fields.refused(f"deepstack_visual_indexes must be layers, from 0 to {layers - 1}")
    if behind != sorted(set(behind)) or (behind and deep is None):
        raise fields.refused(f"deepstack_visual_indexes is {behind!r}: not served")
    positions = fields.inside("rope_parameters", {"rope_theta": 10_000.0})
    tower = QwenTowerSettings(
        layers=layers, hidden=own, heads=heads, intermediate=fields.integer("intermediate_size"),
        patch=fields.integer("patch_size", most=_MOST_PATCH),
        merge=fields.integer("spatial_merge_size", most=8),
        frames=fields.integer("temporal_patch_size", most=8),
        places=places, output=output, deep=tuple(behind), activation=_GELUS[kind],
        theta=positions.number("rope_theta"),
    )  # fmt: skip
    token, start, end = (whole.integer(name, default) for name, default in ids.items())
    return Vision(tower, token, (start,), (end,))


def clip_vision(whole: Fields, hidden: int) -> Vision:
    """Read CLIP's tower as LLaVA has it."""
    fields = whole.inside("vision_config", _CLIP)
    kind = fields.get("model_type") or "clip_vision_model"
    if kind != "clip_vision_model":
        raise fields.refused(f"model_type is {kind!r}: LLaVA is served with clip_vision_model")
    alike = _alike(fields, 1)
    layers, patch = alike["layers"], alike["patch"]
    behind, side = whole.get("vision_feature_layer"), fields.integer("image_size", most=MOST_SIDE)
    behind = -2 if behind is None else behind
    if not isinstance(behind, int) or isinstance(behind, bool) or not -layers <= behind <= layers:
        raise whole.refused(f"vision_feature_layer is {behind!r}: must be one of {layers} layers")
    if whole.get("vision_feature_select_strategy") not in (None, "default") or side % patch:
        raise whole.refused("vision_feature_select_strategy must be 'default', and image_size a "
                            "multiple of patch_size")  # fmt: skip
    alike["layers"] = behind if behind >= 0 else layers + 1 + behind
    tower = ClipTowerSettings(
        **alike, side=side, output=hidden, whole=layers, eps=fields.number("layer_norm_eps"),
        projector_activation=_projected(whole), bias=whole.get("multimodal_projector_bias") is not False,
    )  # fmt: skip
    return Vision(tower, _image_token(whole, 32000), fit="crop")


def siglip_vision(whole: Fields, hidden: int) -> Vision:
    """Read SigLIP's tower as Gemma 3 has it."""
    fields = whole.inside("vision_config", _SIGLIP)
    kind = fields.get("model_type") or "siglip_vision_model"
    if kind != "siglip_vision_model":
        raise fields.refused(f"model_type is {kind!r}: Gemma 3 is served with siglip_vision_model")
    alike, side = _alike(fields, 1), fields.integer("image_size", most=MOST_SIDE)
    tokens = whole.integer("mm_tokens_per_image", 256, most=1 << 16)
    rows = math.isqrt(tokens)
    if rows**2 != tokens or side % (rows * alike["patch"]):
        raise whole.refused(f"mm_tokens_per_image {tokens} must be a square, and its root times "
                            f"patch_size divide image_size {side}")  # fmt: skip
    tower = SiglipTowerSettings(
        **alike, side=side, merge=side // (rows * alike["patch"]), output=hidden,
        eps=fields.number("layer_norm_eps"),
    )  # fmt: skip
    start, end = (whole.integer(f"{name}_token_index", default)
                  for name, default in (("boi", 255_999), ("eoi", 256_000)))  # fmt: skip
    token = _image_token(whole, 262_144)
    return Vision(tower, token, (start,), (end,), fit="stretch", around="\n\n", whole="all")


def gemma4_vision(whole: Fields, hidden: int) -> Vision:
    """Read the tower of Gemma 4. A picture's tokens see each other where the text part says so."""
    fields, text = whole.inside("vision_config", _GEMMA4), whole.inside("text_config")
    kind, turns = fields.get("model_type") or "gemma4_vision", fields.inside("rope_parameters")
    if kind != "gemma4_vision":
        raise fields.refused(f"model_type is {kind!r}: Gemma 4 is served with gemma4_vision")
    if turns.get("rope_type") not in (None, "default", "axial"):
        raise fields.refused(f"rope_type is {turns.get('rope_type')!r}: only 'axial' is served")
    alike = _alike(fields, 4, "hidden_activation")
    if fields.integer("num_key_value_heads") != alike["heads"]:
        raise fields.refused(f"num_key_value_heads is not {alike['heads']}: heads share no keys")
    theta = turns.number("rope_theta") if turns.get("rope_theta") is not None else 100.0
    tower = Gemma4TowerSettings(
        **alike, merge=fields.integer("pooling_kernel_size", most=8), output=hidden, theta=theta,
        eps=fields.number("rms_norm_eps"),
        places=fields.integer("position_embedding_size", most=1 << 20),
        clips=fields.flag("use_clipped_linears"), standardizes=fields.flag("standardize"),
    )  # fmt: skip
    token = text.get("pad_token_id") or 0  # whose inputs the layers are given beside a picture's
    if not isinstance(token, int) or not 0 <= token < FIRST:
        raise text.refused(f"pad_token_id is {token!r}: must be a token")
    start, end = (whole.integer(f"{name}_token_id", default)
                  for name, default in (("boi", 255_999), ("eoi", 258_882)))  # fmt: skip
    sees = text.get("use_bidirectional_attention") == "vision"
    return Vision(tower, token, (start,), (end,), fit="within", whole="windows" if sees else "none")


def pixtral_vision(whole: Fields, hidden: int) -> Vision:
    """Read Pixtral's tower as Mistral Small 3 and 4 have it, with a merger of patches."""
    fields = whole.inside("vision_config", _PIXTRAL)
    kind, behind = fields.get("model_type") or "pixtral", whole.get("vision_feature_layer")
    if kind != "pixtral" or behind not in (None, -1):
        raise whole.refused(f"vision_config of {kind!r}, vision_feature_layer {behind!r}: only pixtral "
                            "and -1 are served")  # fmt: skip
    turns = fields.inside("rope_parameters")
    theta = fields.get("rope_theta") or turns.get("rope_theta") or 10_000.0
    if turns.get("rope_type") not in (None, "default", "axial") or not isinstance(theta, (int, float)):
        raise fields.refused("rope_parameters: only type 'axial' with a rope_theta is served")
    eps = whole.inside("text_config").get("rms_norm_eps")
    tower = PixtralTowerSettings(
        **_alike(fields, 4), merge=whole.integer("spatial_merge_size", 2, most=8), output=hidden,
        projector_activation=_projected(whole), bias=bool(whole.get("multimodal_projector_bias")),
        theta=float(theta),
        norm_eps=1e-6 if eps is None else whole.inside("text_config").number("rms_norm_eps"),
    )  # fmt: skip
    return Vision(tower, _image_token(whole, 10), fit="longest", lined=True)


def _alike(fields: Fields, parts: int, activation: str = "hidden_act") -> dict[str, Any]:
    """Read settings of towers with layers all alike. `parts`: see `_heads`. `activation`: a field."""
    own, heads = _heads(fields, parts)
    return {
        "patch": _patch(fields), "hidden": own, "heads": heads,
        "layers": fields.integer("num_hidden_layers", most=_MOST_LAYERS),
        "intermediate": fields.integer("intermediate_size"),
        "activation": _activation(fields, activation),
    }  # fmt: skip


def _patch(fields: Fields) -> int:
    if fields.get("num_channels") not in (None, 3):
        raise fields.refused(f"num_channels is {fields.get('num_channels')!r}: only 3 are served")
    return fields.integer("patch_size", most=_MOST_PATCH)


def _heads(fields: Fields, parts: int) -> tuple[int, int]:
    """Read the width, and the number of heads; a head has a multiple of `parts` values."""
    own, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    size = fields.get("head_dim")
    if own % (parts * heads) or size not in (None, own // heads):
        raise fields.refused(f"hidden_size {own} needs a multiple of {parts} times {heads} heads, and "
                             f"head_dim {size!r} their size")  # fmt: skip
    return own, heads


def _activation(fields: Fields, name: str, default: str | None = None) -> str:
    kind = default if fields.get(name) is None else fields.get(name)
    if kind not in ACTIVATIONS:
        raise fields.refused(f"{name} is {kind!r}: only {', '.join(ACTIVATIONS)} are served")
    return str(kind)


def _projected(whole: Fields) -> str:
    return _activation(whole, "projector_hidden_act", "gelu")


def _image_token(whole: Fields, default: int) -> int:
    name = "image_token_id" if whole.get("image_token_id") is not None else "image_token_index"
    return whole.integer(name, default)
