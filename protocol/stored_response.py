"""The id of a response that is kept: it says where, and opens it.

The id holds the session's key, so only clients may have it. What a store keeps of a response has ids
without the key, which is put back when somebody comes with it.
"""

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta

PREFIX = "resp_"


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """The place of a stored response: a branch of a session. Its id says it, so no table is needed.

    `key`: the session's, which opens it for the same credential only. `instructions`: a checksum.
    `transient`: it lasts as long as the WebSocket that it was made on. `start`: where its output begins,
    of one in the background: so any process can tell its stream again.
    """

    session: Annotated[str, Meta(max_length=256)]
    key: Annotated[str, Meta(max_length=256)]
    branch: Annotated[str, Meta(max_length=64, pattern=r"^r[A-Za-z0-9._/-]+\Z")]
    instructions: Annotated[int, Meta(ge=0, lt=2**33)]
    transient: bool = False
    start: Annotated[int, Meta(ge=0, lt=2**53)] | None = None

    @property
    def unique(self) -> str:
        """What the ids of its items are made of."""
        return self.branch[1:]

    @property
    def ident(self) -> str:
        """The response's id."""
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def of(cls, ident: str) -> "Stored | None":
        """None if it is the id of no response of ours."""
        text = ident.removeprefix(PREFIX)
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            return msgspec.msgpack.decode(data, type=cls)
        except (binascii.Error, ValueError, msgspec.DecodeError):
            return None


def with_key(ident: str, key: str) -> str:
    """The id of the same response with this key ("": none). What is no such id stays as it is."""
    stored = Stored.of(ident) if ident.startswith(PREFIX) else None
    return ident if stored is None else msgspec.structs.replace(stored, key=key).ident
