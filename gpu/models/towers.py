"""Towers of config.json: the settings of `vision_config`."""

from collections.abc import Mapping
from typing import Literal

from ramify.gpu.models.definition import Vision
from ramify.gpu.models.fields import Fields
from ramify.gpu.vision.qwen import QwenTowerSettings

_MOST_LAYERS = 1024
_MOST_PATCH = 64
_GELUS: dict[str, Literal["tanh", "none"]] = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
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
    """`ids`: of config.json's tokens where it leaves them out. `deep`: likewise; None: there is none."""
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
        layers, own, heads, fields.integer("intermediate_size"),
        patch=fields.integer("patch_size", most=_MOST_PATCH),
        merge=fields.integer("spatial_merge_size", most=8),
        frames=fields.integer("temporal_patch_size", most=8),
        places=places, output=output, deep=tuple(behind), activation=_GELUS[kind],
        theta=positions.number("rope_theta"),
    )  # fmt: skip
    token, start, end = (whole.integer(name, default) for name, default in ids.items())
    return Vision(tower, token, (start,), (end,))
