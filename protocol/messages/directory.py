"""What the directory of sessions is told: sockets that open one, and what the store says."""

from ramify.protocol.messages.base import Base
from ramify.protocol.messages.session import Shutdown
from ramify.protocol.wire import (
    MOST_PRIORITY,
    ClientMessage,
    Open,
)


class OpenSession(Base, frozen=True):
    """The first frame of a socket: `open`, and the ops that came with it.

    `owner`: the name of the credential that the socket came with; "" where the server asks for none.
    `namespace`: which radix tree a new session's branches live in. `priority`: the highest that its
    generations may have. `place`: of `open` in the frame, as in `Frame`. `displaceable`: a new session
    makes room for later ones of the same kind when its owner has too many of them.
    """

    socket: int
    open: Open
    ops: list[ClientMessage]
    owner: str = ""
    namespace: str = ""
    priority: int = MOST_PRIORITY
    size: int = 0  # bytes of the frame
    place: int | None = 0
    displaceable: bool = False
    saves: bool = True  # False: no store needs a new session, and another one lives on as it would have
    fetched: bool = False  # the store was asked for the session
    binds: bool = False  # a new one is for a request that brings its history as text: see `Histories`


class Fetched(Base, frozen=True):
    """The answer to `Fetch`. `items`: empty if the store has no such session.

    `error`: why it could not be read; ask again, unless it is `damaged`. `fence`: the session is this
    server's from now on, and saves carry it; 0: it was only looked at. `held`: another server has it,
    and keeps it.
    """

    session: str
    items: dict[str, bytes]
    error: str | None = None
    fence: int = 0
    held: bool = False
    damaged: bool = False


class Waiting(Base, frozen=True):
    """The store's sessions in which ops wait or run: their servers ended before they were done."""

    sessions: list[str]


class Saving(Base, frozen=True):
    """Whether the store can be written. `error`: why not, since now; None: it can be again."""

    error: str | None


class Wanted(Base, frozen=True):
    """Other servers wait for these sessions, which the store says this one has."""

    sessions: list[str]


DirectoryMessage = OpenSession | Shutdown | Fetched | Waiting | Saving | Wanted
