"""The reader of a checkpoint's settings of pictures: preprocessor_config.json or processor_config.json.

Settings that cannot be served raise ModelError, which names file and field.
"""

import math
from pathlib import Path
from typing import Any

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.fields import Fields
from ramify.gpu.vision.gemma4 import Gemma4TowerSettings
from ramify.gpu.vision.tower import TowerSettings, Vision
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.errors import ModelError
from ramify.protocol.pictures import FIRST, MOST_PIXELS, PictureFit, PictureSettings

_RESAMPLES = {2: "bilinear", 3: "bicubic"}
_MOST_LONGEST = 4096  # pixels of a side
_MOST_SOFT = 1120  # tokens of a picture, Gemma 4
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_ROW_ENDS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


def read_processor(folder: Path, shape: Definition) -> PictureSettings:
    """Read the settings of pictures. Raises ModelError, also if the checkpoint has none."""
    assert shape.vision is not None
    files, vision = json_files(folder), shape.vision
    raw, where = files("preprocessor_config.json"), folder / "preprocessor_config.json"
    whole = files("processor_config.json") or {}
    if raw is None:
        raw, where = whole.get("image_processor"), folder / "processor_config.json"
    if not isinstance(raw, dict):
        raise ModelError(f"{folder / 'preprocessor_config.json'} is missing: download it, too")
    fields = Fields(shape.architecture, raw, {}, str(where))
    _check_steps(fields, vision.fit)
    least, most = _SIZES[vision.fit](fields, vision.tower)
    ends = _row_ends(folder, whole, vision) if vision.lined else ()
    return PictureSettings(
        patch=vision.tower.patch,
        unit=vision.tower.unit,
        least=least,
        most=most,
        mean=_three(fields, "image_mean", vision.fit),
        std=_three(fields, "image_std", vision.fit),
        before=vision.before,
        after=ends[1:] or vision.after,
        token=vision.token,
        model=shape.architecture,
        fit=vision.fit,
        between=ends[:1],
        around=vision.around,
        whole=vision.whole != "none",
    )


def _check_steps(fields: Fields, fit: PictureFit) -> None:
    """Check that the file's steps are those of models with this `fit`. Raises ModelError."""
    crops, served = fit == "crop", fields.architecture
    for name in _STEPS + crops * ("do_center_crop",):
        due = name != "do_normalize" or fit != "within"
        if fields.get(name) not in (None, due):
            raise fields.refused(f"{name} is {fields.get(name)!r}: only {str(due).lower()} is served")
    if (crops and fields.get("do_pad")) or (not crops and fields.get("do_center_crop")):
        raise fields.refused(f"do_pad or do_center_crop is true: {served} is served without")
    if fields.get("do_pan_and_scan"):
        raise fields.refused(f"do_pan_and_scan is true: {served} is served without")
    resample = 2 if fit == "stretch" else 3
    if fields.get("resample") not in (None, resample):
        raise fields.refused(f"resample is {fields.get('resample')!r}: only {resample} "
                             f"({_RESAMPLES[resample]}) is served")  # fmt: skip
    factor = fields.get("rescale_factor")
    if factor is not None and not math.isclose(fields.number("rescale_factor"), 1 / 255):
        raise fields.refused(f"rescale_factor is {factor!r}: only 1/255 is served")


def _area(fields: Fields, tower: TowerSettings) -> tuple[int, int]:
    """Read the least and the most pixels of a picture."""
    for name, ours in (
        ("patch_size", tower.patch), ("merge_size", tower.merge), ("temporal_patch_size", tower.frames),
    ):  # fmt: skip
        if fields.integer(name) != ours:
            raise fields.refused(f"{name} is {fields.get(name)!r}: the tower has {ours}")
    size = fields.inside("size")
    least = size.integer("shortest_edge", most=MOST_PIXELS)
    most = size.integer("longest_edge", most=MOST_PIXELS)
    if least > most:
        raise fields.refused(f"size: shortest_edge {least} is more than longest_edge {most}")
    return least, most


def _longest(fields: Fields, tower: TowerSettings) -> tuple[int, int]:
    """Compute least and most pixels: of a token, and of a square with the longest sides."""
    longest = fields.inside("size").integer("longest_edge", most=_MOST_LONGEST)
    return tower.unit**2, longest**2


def _crop(fields: Fields, tower: TowerSettings) -> tuple[int, int]:
    """Compute least and most pixels: both of the square whose positions the tower has learned."""
    sides = set[int]()
    for name, edges in (("size", ("shortest_edge",)), ("crop_size", ("height", "width"))):
        given = fields.get(name)
        if isinstance(given, int):  # as older files say it
            sides.add(given)
        else:
            sides |= {fields.inside(name).integer(edge, most=_MOST_LONGEST) for edge in edges}
    if len(sides) > 1 or tower.side != (side := min(sides)):
        raise fields.refused(f"size and crop_size are {sorted(sides)}: the tower has {tower.side}")
    return side**2, side**2


def _stretch(fields: Fields, tower: TowerSettings) -> tuple[int, int]:
    """Compute least and most pixels: both of the square to which pictures are stretched."""
    size = fields.inside("size")
    sides = {size.integer(edge, most=_MOST_LONGEST) for edge in ("height", "width")}
    if sides != {tower.side}:
        raise fields.refused(f"size is {sorted(sides)}: the tower has {tower.side}")
    given, tokens = fields.get("image_seq_length"), (sides.pop() // tower.unit) ** 2
    if given not in (None, tokens):
        raise fields.refused(f"image_seq_length is {given!r}: the tower makes {tokens}")
    return tokens * tower.unit**2, tokens * tower.unit**2


def _within(fields: Fields, tower: TowerSettings) -> tuple[int, int]:
    """Compute least and most pixels: of a token, and of the most tokens of a picture."""
    for name, ours in (("patch_size", tower.patch), ("pooling_kernel_size", tower.merge)):
        if fields.get(name) not in (None, ours):
            raise fields.refused(f"{name} is {fields.get(name)!r}: the tower has {ours}")
    tokens = fields.integer("max_soft_tokens", 280, most=_MOST_SOFT)
    if isinstance(tower, Gemma4TowerSettings) and tokens * tower.merge > tower.places:
        raise fields.refused(f"max_soft_tokens is {tokens}: the tower has {tower.places} positions")
    return tower.unit**2, tokens * tower.unit**2


_SIZES = {"area": _area, "longest": _longest, "crop": _crop, "stretch": _stretch, "within": _within}


def _row_ends(folder: Path, whole: dict[str, Any], vision: Vision) -> tuple[int, int]:
    """Read the tokens after a picture's rows, and after its last one."""
    tower, where = vision.tower, folder / "processor_config.json"
    for name, ours in (("patch_size", tower.patch), ("spatial_merge_size", tower.merge)):
        if whole.get(name) not in (None, ours):
            raise ModelError(f"{where}: {name} is {whole[name]!r}: the tower has {ours}")
    added = (json_files(folder)("tokenizer.json") or {}).get("added_tokens")
    ids = {each.get("content"): each.get("id") for each in added or () if isinstance(each, dict)}
    found = [ids.get(whole.get(name, default)) for name, default in _ROW_ENDS.items()]
    first, last = (each if isinstance(each, int) and 0 <= each < FIRST else None for each in found)
    if first is None or last is None:
        raise ModelError(f"{folder / 'tokenizer.json'}: added_tokens has not the tokens that end a "
                         f"picture's rows, {' and '.join(_ROW_ENDS.values())}")  # fmt: skip
    return first, last


def _three(fields: Fields, name: str, fit: PictureFit) -> tuple[float, float, float]:
    """Read a positive number for each colour."""
    if fit == "within":
        return 0.5, 0.5, 0.5  # what Gemma 4's tower begins with, in the place of its processor
    values: Any = fields.get(name)
    if isinstance(values, list) and len(values) == 3:
        numbers = [float(each) for each in values if isinstance(each, (int, float)) and 0 < each < 1]
        if len(numbers) == 3:
            return numbers[0], numbers[1], numbers[2]
    raise fields.refused(f"{name} is {values!r}: must be three numbers between 0 and 1")
