"""Doors: protocols over WebSocket beside ramify.v1, chosen by the path of the upgrade.

`Connection` owns the socket: handshake, limits, pings, flow control and the closing handshake are the
same for all. It gives each complete text message to the `Door`, which knows one protocol, and starts a
`Channel` for what a session has to answer.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import RamifyError


class Line(Protocol):
    """The socket, as a door sees it.

    `credential`: the client's; None until a token was shown, at the handshake or to `admit`.
    """

    @property
    def credential(self) -> Credential | None: ...
    @property
    def share(self) -> Share | None: ...
    def admit(self, token: str | None) -> bool:
        """Accept a token that comes in a message. False: it is wrong, and the socket is closed."""
        ...

    def frame(self, payload: bytes) -> bytes:
        """Make the bytes of one text message; b"" if the socket is closing. Write them in this order."""
        ...

    def write(self, frames: bytes) -> None:
        """Queue frames until `flush`; what a message from the client leads to is flushed anyway."""

    def flush(self) -> None: ...
    def close(self, code: int, reason: str) -> None: ...


class Door(Protocol):
    """One client on one socket. Nothing here may raise for what a client sends."""

    @property
    def busy(self) -> bool:
        """True while sessions are to answer."""
        ...

    def receive(self, message: bytes) -> bool:
        """Handle a text message: UTF-8, and within the limits. False if it cannot be read as this
        protocol at all: the third of those closes the socket."""
        ...

    def refuse(self, error: RamifyError) -> None:
        """Say that a message was passed over, because the client sends too many."""

    def throttle(self, throttled: bool) -> None:
        """Note that the client reads too slowly, or reads again."""

    def drain(self, reason: str) -> None:
        """Begin nothing new, and close the line when nothing runs: the server stops."""

    def end(self) -> None:
        """End: the socket is gone, or as good as gone. May be called again."""


class DoorKind(msgspec.Struct, frozen=True):
    """A kind of door.

    `make`: the door of a socket whose handshake was accepted. `late_tokens`: a client that showed no
    token then may do so in a message (`Line.admit`), within `open_timeout_s`."""

    make: Callable[[Hub, Line], Door]
    late_tokens: bool = False
