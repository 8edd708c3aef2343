"""The values of `--model`: a folder, a GGUF file, or a model of the Hugging Face hub.

That is `OWNER/NAME[:TYPE][@REVISION]`; TYPE chooses a GGUF file by what its name says, such as Q4_K_M.

A hub's name is looked up in the local cache first, where `huggingface_hub` and `transformers` put their
downloads. An incomplete model is downloaded, with progress on standard error; not with HF_HUB_OFFLINE=1.
Only files that can be served are fetched: safetensors, configuration, tokenizer.
"""

import json
import re
from pathlib import Path
from typing import Any

from ramify.clients.commands.engine import load
from ramify.protocol.errors import ConfigError

_NAME = re.compile(
    r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<type>[\w.-]{1,64}))?(?:@(?P<revision>[\w./-]{1,128}))?",
    re.ASCII,
)
_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
          "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "chat_template.jinja"]  # fmt: skip
_NEEDED = ("config.json", "tokenizer.json")


def find_model(given: str, cache: Path | None = None) -> tuple[Path, str | None]:
    """Find the folder or GGUF file of a model, and its name where that is not the folder's.

    `cache`: the hub's, if not where it usually is. Raises ConfigError that says what to do.
    """
    folder = Path(given)
    named = _NAME.fullmatch(given)
    if folder.exists() or named is None:
        return folder, folder.stem if folder.is_file() else None
    name, kind, revision = named["name"], named["type"], named["revision"]
    # here: it takes a third of a second that a folder need not cost
    snapshot_download = load("huggingface_hub").snapshot_download
    errors = load("huggingface_hub.errors")

    wanted: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "cache_dir": cache,
        "allow_patterns": [f"*{text}*.gguf" for text in (kind, kind.upper(), kind.lower())]
        if kind
        else _FILES,
    }
    fault = "it is not complete there"
    for local in (True, False):
        try:
            found = Path(snapshot_download(**wanted, local_files_only=local))
        except (
            errors.HfHubHTTPError,
            errors.HFValidationError,
            errors.LocalEntryNotFoundError,
            OSError,
        ) as error:
            fault = _first_line(error)
            continue
        if kind is not None:
            file = _of_type(found, kind)
            if file is not None:
                return file, f"{name}:{kind}"
            fault = f"it has no GGUF file with {kind} in its name"
        elif _complete(found):
            return found, name
    raise ConfigError(
        f"--model {given} is no folder here, and the hub's cache does not have it in full; nor does the "
        f"hub: {fault}. Give a folder with config.json, tokenizer.json and safetensors, a GGUF file, or "
        "a name as on huggingface.co (for a gated model set HF_TOKEN)"
    )


def _of_type(folder: Path, kind: str) -> Path | None:
    """Find the GGUF file whose name has this part, if there is one: no file of a vision tower."""
    part = re.compile(rf"(?:^|[-.]){re.escape(kind)}(?:[-.]|$)", re.IGNORECASE)
    found = [
        path for path in folder.rglob("*.gguf") if part.search(path.name) and "mmproj" not in path.name
    ]
    return min(found, key=lambda path: path.name, default=None)


def _complete(folder: Path) -> bool:
    """Whether a snapshot holds all that serving needs: a download may have been broken off."""
    if not all((folder / name).is_file() for name in _NEEDED):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
