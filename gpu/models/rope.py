"""The rotary settings of a config.json, in both spellings, and the contexts that they allow.

`rope_theta` + `rope_scaling`, or `rope_parameters` of transformers 5, which may hold a dictionary for
each type of layer.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ramify.gpu.models.fields import Fields
from ramify.gpu.ops.rotary import RopeSettings

# Fields of rotary settings that change the mathematics and that no layer knows
_UNKNOWN = ("llama_4_scaling_beta", "long_mscale", "mrope_section", "short_mscale")
TYPES = ("full_attention", "sliding_attention")
_MOST_THETA = 1e12  # a thousand times that of any model


def rope(
    fields: Fields, theta: float = 10_000.0, partial: bool = False, unread: Sequence[str] = ()
) -> RopeSettings:
    """Read the settings of all layers. `theta`: the default. `partial`: a part of each head may rotate.

    `unread`: settings that change nothing where a model is served as text.
    """
    given = {name: value for name, value in _given(fields).items() if name not in unread}
    if any(isinstance(value, dict) for value in given.values()):
        raise fields.refused(f"rope_parameters per layer type: {fields.architecture} has none")
    if partial:
        share = given.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
        share = 1 if share is None else share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise fields.refused(
                f"partial_rotary_factor is {share!r}: must be a number above 0, up to 1"
            )
        given = given | {"partial_rotary_factor": share}
    return _settings(fields, given, fields.get("rope_theta") or theta, partial)


def sectioned_rope(
    fields: Fields, sections: tuple[int, ...], theta: float = 10_000.0, partial: bool = False
) -> RopeSettings:
    """Read the settings of interleaved M-RoPE: how many pairs each of three positions rotates.

    `sections`: the default. In text the three positions are one.
    """
    settings = rope(fields, theta, partial, unread=("mrope_section", "mrope_interleaved"))
    given = _given(fields).get("mrope_section")
    found = list(sections) if given is None else given
    if not isinstance(found, list) or len(found) != 3 or not all(each in range(1024) for each in found):
        raise fields.refused(f"mrope_section is {found!r}: must be three numbers of pairs")
    return settings | {"sections": found}


def ropes(fields: Fields, theta: float, local_theta: float) -> tuple[RopeSettings, RopeSettings]:
    """Read the settings of layers that see all positions, and of those with a window, not scaled."""
    given = _given(fields)
    local: Any = {}
    if any(name in given for name in TYPES):
        local = given.get("sliding_attention") or {}
        given = given.get("full_attention") or {}
    return _settings(fields, given, theta), _settings(fields, local, local_theta)


def contexts(
    settings: Iterable[RopeSettings | None], max_position: int, fields: Fields
) -> tuple[int, int | None]:
    """Compute the context to serve, and the longest that may be asked for (None: any)."""
    found = [_contexts(each, max_position, fields) for each in settings if each is not None]
    context = max((each[0] for each in found), default=max_position)
    longest = [each[1] for each in found if each[1] is not None]
    return context, None if len(longest) < len(found) else max(longest, default=max_position)


def _given(fields: Fields) -> dict[str, Any]:
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise fields.refused(f"rope_parameters is {given!r}: must be an object")
    return given


def _settings(fields: Fields, given: Any, theta: float, partial: bool = False) -> RopeSettings:
    """Read both spellings as one dict with `rope_type`, `rope_theta` and the type's own fields."""
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise fields.refused("rope_parameters nests objects in the settings of a layer type")
    for name in _UNKNOWN:
        if given.get(name):
            raise fields.refused(
                f"{name} is {given[name]!r}: {fields.architecture} is not served with it"
            )
    settings = dict(given)
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    if not isinstance(settings["rope_type"], str):
        raise fields.refused(f"rope_type is {settings['rope_type']!r}: must be a name")
    if settings.get("rope_theta") is None:
        settings["rope_theta"] = theta
    base = settings["rope_theta"]
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < _MOST_THETA:
        raise fields.refused(f"rope_theta is {base!r}: must be a number in (0, {_MOST_THETA:g})")
    share = settings.get("partial_rotary_factor")
    if not partial and share not in (None, 1) and settings["rope_type"] != "proportional":
        raise fields.refused(
            f"partial_rotary_factor is {share!r}: {fields.architecture} is served with 1.0"
        )
    max_position = fields.integer("max_position_embeddings")
    outer = fields.get("original_max_position_embeddings")
    if outer is not None:
        settings["original_max_position_embeddings"] = outer
    settings.setdefault("original_max_position_embeddings", max_position)
    settings["max_position_embeddings"] = max_position
    return settings


def _contexts(settings: RopeSettings, max_position: int, fields: Fields) -> tuple[int, int | None]:
    """Compute the contexts of layers with these settings.

    `max_position_embeddings` means either of two lengths. Qwen's documentation adds YaRN to a config
    that keeps stating the original length; other checkpoints state the stretched one. With
    YaRN the product of factor and original length tells, because both are given for it. The factor
    of `linear` may or may not be counted in already, so it is served only if it is asked for;
    `llama3` and `longrope` always state the stretched length. `dynamic` stretches to any length.
    """
    kind, factor = settings["rope_type"], settings.get("factor")
    if kind == "dynamic":
        return max_position, None
    if kind not in ("yarn", "linear") or factor is None:
        return max_position, max_position
    original = settings["original_max_position_embeddings"] if kind == "yarn" else max_position
    for name, value in (("factor", factor), ("original_max_position_embeddings", original)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
            raise fields.refused(f"{name} of rope_type {kind!r} is {value!r}: must be a positive number")
    stretched = max(max_position, int(factor * original))
    return stretched if kind == "yarn" else max_position, stretched
