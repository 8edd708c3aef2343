"""JSON and msgpack codecs of `ramify.v1`: frames in, frames out.

A frame is one message or an array of messages; a frame that fails to decode raises `BadRequest`
with the JSON path of the fault, and no part of it has been run.
"""

from typing import Any, Literal

import msgspec

from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ClientMessage, ServerMessage

CodecName = Literal["json", "msgpack"]
SUBPROTOCOLS: dict[str, CodecName] = {"ramify.v1+json": "json", "ramify.v1+msgpack": "msgpack"}
BEARER_PREFIX = "ramify.bearer."


class Codec:
    """Encode and decode frames of one kind. Stateless after construction; share one a process."""

    def __init__(self, name: CodecName) -> None:
        self.name: CodecName = name
        self.binary = name == "msgpack"
        module = msgspec.msgpack if self.binary else msgspec.json
        self._encoder = module.Encoder()
        self._client = module.Decoder(ClientMessage | list[ClientMessage])
        self._server = module.Decoder(ServerMessage | list[ServerMessage])

    def encode(self, messages: list[ServerMessage] | list[ClientMessage]) -> bytes:
        """One frame: the message itself if there is one, else an array."""
        return self._encoder.encode(messages[0] if len(messages) == 1 else messages)

    def decode_client(self, data: bytes | str) -> list[ClientMessage]:
        """Decode a frame sent by a client. Raises BadRequest that names the JSON path."""
        return _decode(self._client, data)

    def decode_server(self, data: bytes | str) -> list[ServerMessage]:
        """Decode a frame sent by a server. Raises BadRequest that names the JSON path."""
        return _decode(self._server, data)


def _decode(decoder: Any, data: bytes | str) -> Any:
    try:
        value = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the frame does not parse: {error}", details={"parse": True}) from None
    return value if isinstance(value, list) else [value]
