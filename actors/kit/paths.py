"""How paths, which settings hold, cross a link: as text.

msgspec asks these hooks about what it does not know itself, and wants NotImplementedError for the rest.
"""

from pathlib import Path
from typing import Any


def encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no encoding for {type(value).__name__}")


def decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no decoding for {kind.__name__}")
