"""What the gateway is told: where sockets belong, and frames for them."""

from ramify.protocol.messages.base import Base
from ramify.protocol.wire import (
    Error,
    ServerMessage,
)


class Opened(Base, frozen=True):
    """The socket belongs to `session` now: its further frames go there."""

    socket: int
    session: int


class OpenRefused(Base, frozen=True):
    """The other answer to `OpenSession`: `error` is sent, and the client may `open` anew.

    It may follow `Opened`: the session cannot have the socket. Its sender has detached it.
    """

    socket: int
    error: Error


class Deliver(Base, frozen=True):
    """Send `messages` as one frame."""

    socket: int
    messages: list[ServerMessage]


class CloseSocket(Base, frozen=True):
    """Close the socket after what was delivered before."""

    socket: int
    code: int
    reason: str


GatewayMessage = Opened | OpenRefused | Deliver | CloseSocket
