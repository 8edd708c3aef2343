"""JSON and msgpack codecs of `ramify.v1`: frames in, frames out.

A frame is one message or an array of messages; a frame that fails to decode raises `BadRequest`
with the JSON path of the fault, and no part of it has been run.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from ramify.protocol.errors import BadRequest
from ramify.protocol.json_value import OneFrame
from ramify.protocol.wire import ClientMessage, ServerMessage

CodecName = Literal["json", "msgpack"]
SUBPROTOCOLS: dict[str, CodecName] = {"ramify.v1+json": "json", "ramify.v1+msgpack": "msgpack"}
BEARER_PREFIX = "ramify.bearer."

T = TypeVar("T")

_MOST_SHOWN = 300  # characters of an error's text, and of its path

# How msgspec ends its messages: "... - at `$[0].id`", "... - at `key` in `$.have`".
_PATH = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_ARRAY = re.compile(rb"\s*\[")
_FIELD = re.compile(r"^(?:Object (?:contains unknown|missing required) field )?`([^`]*)`")


class Codec:
    """Encode and decode frames of one kind. Stateless after construction; share one a process."""

    def __init__(self, name: CodecName) -> None:
        self.name: CodecName = name
        self.binary = name == "msgpack"
        module: Any = msgspec.msgpack if self.binary else msgspec.json
        self._encode: Callable[[Any], bytes] = module.Encoder().encode
        self._any: Callable[[bytes | str], Any] = module.Decoder().decode
        self._client: Callable[[bytes | str], ClientMessage | list[ClientMessage]] = module.Decoder(
            ClientMessage | list[ClientMessage]
        ).decode
        self._server: Callable[[bytes | str], ServerMessage | list[ServerMessage]] = module.Decoder(
            ServerMessage | list[ServerMessage]
        ).decode

    def encode(self, messages: list[ServerMessage] | list[ClientMessage]) -> bytes:
        """One frame: a single message as it is, several as an array."""
        return self._encode(messages[0] if len(messages) == 1 else messages)

    def decode_client(self, data: bytes | str) -> list[ClientMessage]:
        """Decode a frame sent by a client.

        Raises BadRequest: `details.path` is the JSON path of the field at fault; `details.parse`
        instead says that the frame is not JSON (or msgpack) at all.
        """
        with OneFrame():
            return _decode(self._client, data)

    def is_array(self, data: bytes) -> bool:
        """Whether a frame that decodes is an array, even of one message."""
        if self.binary:  # fixarray, array 16, array 32
            return 0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD)
        return _ARRAY.match(data) is not None

    def decode_server(self, data: bytes | str) -> list[ServerMessage]:
        """Decode a frame sent by a server. Raises BadRequest as `decode_client` does."""
        return _decode(self._server, data)

    def ids(self, data: bytes | str) -> list[int | None]:
        """The op ids of a frame that did not validate, in frame order; None where none is legible.

        So each op of a refused frame can be answered. Empty if the frame does not even parse.
        """
        try:
            value = self._any(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []
        return [_id_of(item) for item in (value if isinstance(value, list) else [value])]


def _decode(decode: Callable[[bytes | str], T | list[T]], data: bytes | str) -> list[T]:
    try:
        value = decode(data)
    except msgspec.ValidationError as error:
        path = _clip(_path_of(str(error)))
        raise BadRequest(_with_path(str(error), path), details={"path": path}) from None
    except RecursionError:
        message = "the frame does not parse: it is nested too deeply"
        raise BadRequest(message, details={"parse": True}) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the frame does not parse: {error}", details={"parse": True}) from None
    return value if isinstance(value, list) else [value]


def _path_of(message: str) -> str:
    """The JSON path in an error of msgspec's, down to the field; `$` is the frame itself."""
    at = _PATH.search(message)
    path = at.group(1) if at else "$"
    field = _FIELD.match(message)
    return f"{path}.{field.group(1)}" if field else path


def _with_path(message: str, path: str) -> str:
    return f"{_clip(_PATH.sub('', message))} - at `{path}`"


def _clip(text: str) -> str:
    """Shorten text that repeats what a client sent."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _id_of(item: Any) -> int | None:
    ident = item.get("id") if isinstance(item, dict) else None
    return ident if type(ident) is int and 0 <= ident < 1 << 53 else None
