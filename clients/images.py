"""Pictures for the model: files or bytes (PNG, JPEG, WebP, GIF), sent as they are."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MARK, MOST_BYTES, is_remote


class Image:
    """A picture: the path of a file, its bytes, or an address that the server is to fetch (http, https).

    Raises OSError, and BadRequest for one too large.
    """

    def __init__(self, source: "str | os.PathLike[str] | bytes") -> None:
        if isinstance(source, str) and is_remote(source.encode(errors="replace")):
            source = source.encode(errors="replace")
        self.data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not 0 < len(self.data) <= MOST_BYTES:
            raise BadRequest(f"a picture has {len(self.data)} bytes: 1 to {MOST_BYTES} are allowed")


Images: TypeAlias = Sequence[Image | bytes]


def image_bytes(images: Images) -> list[bytes]:
    return [each.data if isinstance(each, Image) else each for each in images]


def marked(text: str, images: Images) -> str:
    """Give a text a mark for each picture: in front, if it has none."""
    return text if not images or MARK in text else MARK * len(images) + text
