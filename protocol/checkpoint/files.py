"""The JSON files of a model, by name: those of a folder, or what a GGUF file holds in their place."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ramify.protocol.checkpoint.gguf import read_gguf
from ramify.protocol.checkpoint.gguf_config import config_of, generation_of
from ramify.protocol.checkpoint.gguf_tokenizer import tokenizer_config_of, tokenizer_of
from ramify.protocol.errors import ModelError

JsonFiles = Callable[[str], dict[str, Any] | None]
"""The object in the file of this name, None if there is no such file. Raises ModelError."""

_MADE = {
    "config.json": config_of,
    "generation_config.json": generation_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
}


def json_files(path: Path) -> JsonFiles:
    """Those of the model at `path`, a folder or a GGUF file. Raises ModelError."""
    if path.is_dir():
        return partial(_in_folder, path)
    if not path.is_file():
        raise ModelError(f"{path} is not a folder with a model: give the folder of a Hugging Face "
                         "checkpoint, or a GGUF file")  # fmt: skip
    file = read_gguf(path)
    return lambda name: _MADE[name](file) if name in _MADE else None


def _in_folder(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    try:
        data = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read, it is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} cannot be read: it is a {type(data).__name__}, not a JSON object")
    return data
