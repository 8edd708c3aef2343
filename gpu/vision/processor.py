"""Reads a checkpoint's settings of pictures: preprocessor_config.json, or processor_config.json.

What cannot be served raises ModelError, which names file and field.
"""

import math
from pathlib import Path
from typing import Any

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.fields import Fields
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.errors import ModelError
from ramify.protocol.pictures import MOST_PIXELS, PictureSettings

_BICUBIC = 3
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def read_processor(folder: Path, shape: Definition) -> PictureSettings:
    """Raises ModelError, also where the checkpoint has none."""
    assert shape.vision is not None
    files, tower = json_files(folder), shape.vision.tower
    raw, where = files("preprocessor_config.json"), folder / "preprocessor_config.json"
    if raw is None:
        raw, where = files("processor_config.json"), folder / "processor_config.json"
        raw = None if raw is None else raw.get("image_processor")
    if not isinstance(raw, dict):
        raise ModelError(f"{folder / 'preprocessor_config.json'} is missing: download it, too")
    fields = Fields(shape.architecture, raw, {}, str(where))
    for name in _STEPS:
        if fields.get(name) not in (None, True):
            raise fields.refused(f"{name} is {fields.get(name)!r}: only true is served")
    if fields.get("resample") not in (None, _BICUBIC):
        raise fields.refused(
            f"resample is {fields.get('resample')!r}: only {_BICUBIC} (bicubic) is served"
        )
    factor = fields.get("rescale_factor")
    if factor is not None and not math.isclose(fields.number("rescale_factor"), 1 / 255):
        raise fields.refused(f"rescale_factor is {factor!r}: only 1/255 is served")
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
    return PictureSettings(
        patch=tower.patch,
        unit=tower.unit,
        least=least,
        most=most,
        mean=_three(fields, "image_mean"),
        std=_three(fields, "image_std"),
        before=shape.vision.before,
        after=shape.vision.after,
        token=shape.vision.token,
        model=shape.architecture,
    )


def _three(fields: Fields, name: str) -> tuple[float, float, float]:
    """A positive number for each colour."""
    values: Any = fields.get(name)
    if isinstance(values, list) and len(values) == 3:
        numbers = [float(each) for each in values if isinstance(each, (int, float)) and 0 < each < 1]
        if len(numbers) == 3:
            return numbers[0], numbers[1], numbers[2]
    raise fields.refused(f"{name} is {values!r}: must be three numbers between 0 and 1")
