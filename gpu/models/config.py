"""The reader of a checkpoint's config.json, into the definition that the decoder is built from.

It parses the file itself (importing `transformers` costs seconds). The family that `architectures` names
interprets its fields. Settings that this build cannot run raise ModelError, which names file and field.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ramify.gpu.models.definition import Definition
from ramify.gpu.models.families import FAMILIES
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import Family, of_text, seeing
from ramify.gpu.ops.linear.checkpoints import read_format
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.errors import ModelError


def read_config(folder: Path) -> Definition:
    """Read config.json and generation_config.json of a folder, or of a GGUF file. Raises ModelError."""
    files = json_files(folder)
    raw, generation = files("config.json"), files("generation_config.json")
    if raw is None:
        raise ModelError(f"{folder / 'config.json'} is missing: give the folder of a Hugging Face "
                         "checkpoint")  # fmt: skip
    if not raw.get("quantization_config") and (apart := files("hf_quant_config.json")):
        raw = raw | {"quantization_config": {"quant_method": "modelopt"} | apart}
    definition = parse_config(raw, generation or {}, folder / "config.json")
    # a GGUF file has the offset in its norms' weights already
    return replace(definition, norm_offset=0.0) if folder.is_file() else definition


def parse_config(raw: dict[str, Any], generation: dict[str, Any], path: Path) -> Definition:
    """Make a definition. `raw`: config.json; `generation`: the other file; `path`: named in errors."""
    family = FAMILIES[_architecture(raw, path)]
    inner = raw.get("text_config")
    if family.other is not None and isinstance(inner, dict):
        family = family.other if inner.get("model_type") == family.other.text else family
    values, where = (raw, str(path)) if family.text is None else _text(raw, family, path)
    fields = Fields(family.architecture, family.defaults | values, generation, where)
    definition = family.define(fields)
    fields.refuse_unread()
    if quantized := raw.get("quantization_config"):
        try:
            definition = replace(definition, stored=read_format(quantized))
        except ValueError as error:
            raise ModelError(f"{path}: quantization_config {error}") from None
        mxfp4 = quantized["quant_method"] == "mxfp4"
        if mxfp4 and not definition.names.experts.interleaved:  # as gpt-oss's experts are
            raise ModelError(f"{path}: quantization_config (mxfp4) is not supported for "
                             f"{family.architecture}: give a checkpoint in floats")  # fmt: skip
    if family.text is None:
        return definition
    if family.vision is not None and raw.get("vision_config"):
        whole = Fields(family.architecture, raw, {}, str(path))
        definition = seeing(definition, family.vision(whole, definition.hidden_size))
    return of_text(definition)


def _text(raw: dict[str, Any], family: Family, path: Path) -> tuple[dict[str, Any], str]:
    """Collect the fields of the text part, with those of the whole, and their place in the file."""
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
