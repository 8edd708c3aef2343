"""One request's conversation with its session: what it asks, and what becomes of the answers.

A `Dialogue` is pure. A `DialogueRun` sends its `ops`, hands it what the session says, and writes what
it returns: to a connection of its own (`exchange.py`), or to a socket that others share (`channel.py`).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from msgspec.structs import replace

from ramify.actors.gateway.port.http import Response
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import ClientMessage, Error, ServerMessage


class Dialogue(ABC):
    """One request's conversation with its session.

    `ops`: the frame to send. `streams`: whether the answer goes out piece by piece.

    `keeps`: its session goes on without it; `saves`: and may be on a disk (see `OpenSession`).
    `outlives`: it goes on when the client has gone. `over`: its answer is complete.
    `pictures`: the fields of the request that have `append.images`, which errors are to name.
    """

    ops: list[ClientMessage]
    pictures: Sequence[str] = ()
    streams = False
    keeps = False
    saves = False
    outlives = False
    over = False
    _more: list[ClientMessage] = []  # who adds to it makes one of its own

    @abstractmethod
    def receive(self, messages: Sequence[ServerMessage]) -> bytes | Response | None:
        """Take messages. Returns bytes of the stream, or the whole response; None: nothing yet."""

    def take_ops(self) -> list[ClientMessage]:
        """Take the ops that follow from what was received; empty: there are none."""
        more, self._more = self._more, []
        return more

    def abandon(self) -> list[ClientMessage]:
        """Make the ops for a session whose client went before the dialogue was over; may be empty.

        What runs for this client alone is cancelled anyway.
        """
        return []

    @abstractmethod
    def fail(self, error: RamifyError) -> bytes | Response | None:
        """End the dialogue with an error of the server. Returns as `receive`."""


def naming(message: ServerMessage, pictures: Sequence[str]) -> ServerMessage:
    """Have an error of a picture name the field that has it. See `Dialogue`."""
    if not isinstance(message, Error):
        return message
    path = str((message.details or {}).get("path"))
    found = _IMAGE.fullmatch(path)
    if found is None or int(found[1]) >= len(pictures):
        return message
    field = pictures[int(found[1])]
    text = message.message.replace(f"`{path}`", f"`{field}`")
    return replace(message, message=text, details={"field": field})


_IMAGE = re.compile(r"images\[(\d{1,2})\]")
