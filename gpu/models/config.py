"""Reads a checkpoint's config.json into the definition that the decoder is built from.

Parses the file itself (importing `transformers` costs seconds). The family that `architectures` names
says what its fields mean. What this build cannot run raises ModelError, which names file and field.
"""

import json
from pathlib import Path
from typing import Any

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.families import FAMILIES
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family, of_text
from ramify.protocol.errors import ModelError


def read_config(folder: Path) -> Definition:
    """Read `folder`/config.json and generation_config.json. Raises ModelError."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give the folder of a Hugging Face checkpoint")
    raw = _read_json(path)
    if raw is None:
        raise ModelError(f"{path} is missing: give the folder of a Hugging Face checkpoint")
    generation = _read_json(folder / "generation_config.json") or {}
    return parse_config(raw, generation, path)


def parse_config(raw: dict[str, Any], generation: dict[str, Any], path: Path) -> Definition:
    """`raw`: config.json; `generation`: generation_config.json; `path`: named in errors."""
    family = FAMILIES[_architecture(raw, path)]
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "of an unknown method")
        raise ModelError(f"{path}: quantization_config ({method}) is not supported: give a checkpoint "
                         "in float32, bfloat16 or float16")  # fmt: skip
    values, where = (raw, str(path)) if family.text is None else _text(raw, family, path)
    fields = Fields(family.architecture, family.defaults | values, generation, where)
    definition = family.define(fields)
    fields.refuse_unread()
    return definition if family.text is None else of_text(definition)


def _text(raw: dict[str, Any], family: Family, path: Path) -> tuple[dict[str, Any], str]:
    """The fields of the text part, with what is said of the whole; and where they are."""
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        raise ModelError(f"{path}: text_config is {inner!r}: must be an object")
    kind = inner.get("model_type", family.text)
    if kind != family.text:
        raise ModelError(f"{path}: text_config.model_type is {kind!r}: {family.architecture} is served "
                         f"with {family.text}")  # fmt: skip
    outer = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")
    said = {name: raw[name] for name in outer if raw.get(name) is not None}
    return inner | said, f"{path}: text_config"


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
