"""One request's conversation with its session: what it asks, and what becomes of the answers.

A `Dialogue` is pure. A `DialogueRun` sends its `ops`, hands it what the session says, and writes what
it returns: to a connection of its own (`exchange.py`), or to a socket that others share (`channel.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ramify.actors.gateway.port.http import Response
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import ClientMessage, ServerMessage


class Dialogue(ABC):
    """`ops`: the frame to send. `streams`: whether the answer goes out piece by piece.

    `keeps`: its session goes on without it; `saves`: and may be on a disk, if it is a new one.
    `outlives`: it goes on when the client has gone. `over`: its answer is complete.
    """

    ops: list[ClientMessage]
    streams = False
    keeps = False
    saves = False
    outlives = False
    over = False
    _more: list[ClientMessage] = []  # who adds to it makes one of its own

    @abstractmethod
    def receive(self, messages: Sequence[ServerMessage]) -> bytes | Response | None:
        """Bytes of the stream, as they are written; or the whole response; None: nothing yet."""

    def take_ops(self) -> list[ClientMessage]:
        """A frame that follows from what was received; empty: none."""
        more, self._more = self._more, []
        return more

    def abandon(self) -> list[ClientMessage]:
        """The ops for a session whose client went before the dialogue was over; may be empty.

        What runs for this client alone is cancelled anyway.
        """
        return []

    @abstractmethod
    def fail(self, error: RamifyError) -> bytes | Response | None:
        """The server ends the dialogue."""
