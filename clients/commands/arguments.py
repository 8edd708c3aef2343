"""Arguments of the slash commands of `ramify chat`: words, names, and files of pictures."""

import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from ramify.clients.images import Image
from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MOST_BYTES

_FIELD = re.compile(r"`images\[(\d{1,4})\]`")
_SIGNED = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif")  # endings of files that may be dropped


def near(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(f"/{name}", known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _path(word: str) -> Path:
    """Make a path of a word, which may be a `file:` URL."""
    return Path(unquote(word.removeprefix("file://")) if word.startswith("file://") else word)


def dropped(text: str) -> list[str]:
    """Find the files in a text that is nothing but paths of pictures, as terminals write them."""
    try:
        given = shlex.split(text)
        paths = [_path(word) for word in given]
        pictures = [path.suffix.lower() in PICTURES and path.is_absolute() for path in paths]
        return given if given and all(pictures) and all(path.is_file() for path in paths) else []
    except (ValueError, OSError):  # no words, or none that a path can be
        return []


def words(rest: str, usage: str) -> list[str]:
    """Split the arguments of a command; spaces in one are quoted. Raises BadRequest."""
    try:
        given = shlex.split(rest)
    except ValueError as error:
        raise BadRequest(f"{rest}: {error}. Use {usage}") from None
    if not any(given):
        raise BadRequest(f"the name is missing: use {usage}")
    return given


def one(rest: str, usage: str) -> str:
    """Read the one argument of a command. Raises BadRequest."""
    given = words(rest, usage)
    if len(given) > 1:
        raise BadRequest(f"use {usage}; a name with spaces goes in quotes: {shlex.quote(rest)}")
    return given[0]


def picture(name: str) -> tuple[str, bytes]:
    """Read the name and the bytes of a file. Raises BadRequest, which names it."""
    path = _path(name).expanduser()
    try:
        if not 0 < path.stat().st_size <= MOST_BYTES:
            raise BadRequest(f"{path} has not 1 to {MOST_BYTES} bytes")
        data = Image(path).data
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None
    if not _SIGNED.match(data):
        raise BadRequest(f"{path} is no picture: PNG, JPEG, WebP and GIF are shown")
    return path.name, data


def as_typed(message: str, names: Sequence[str]) -> str:
    """Put the names of files for fields in what a server says of a message with pictures."""
    named = _FIELD.sub(lambda found: dict(enumerate(names)).get(int(found[1]), found[0]), message)
    return named.replace("`images`", "`/image`")
