"""What fronts and cores are to each other and to the engine, wherever they run.

A front faces clients: gateways and sessions. A core computes: scheduler, cache, grammar and executor.
This file knows none of these actors.
"""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import msgspec
from anyio.abc import TaskGroup

from ramify.actors.kit.fanout import Router, Spread
from ramify.actors.kit.mailbox import Address, LimitedAddress, Mailbox
from ramify.protocol.cluster import PutBlocks, ReadBlocks
from ramify.protocol.credentials import Credential
from ramify.protocol.messages import (
    Abandon,
    AbandonSession,
    CacheMessage,
    CancelRequest,
    CancelSession,
    Compile,
    DirectoryMessage,
    GatewayMessage,
    GrammarMessage,
    RequestMessage,
    SessionMessage,
    Submit,
)
from ramify.protocol.pictures import PictureSettings
from ramify.protocol.plan import ExecutorInfo
from ramify.protocol.wire import ServerInfo

PROTOCOL_VERSION = 1
BIG = 1 << 20  # messages of the gateway's mailbox; it reads all that there are at every turn of the loop
OPENS = 4096  # sockets that wait for the directory
OWN = 16  # what the engine tells the directory, whatever waits

Progress = Callable[[str, float], None]
Runner = Callable[..., Coroutine[Any, Any, None]]
Guard = Callable[[str, Runner], Runner]
"""Makes the failure of an actor, given its name, the engine's."""


def unguarded(name: str, run: Runner) -> Runner:
    """A `Guard` for processes that are replaced: whatever fails there ends the process."""
    return run


class Core(msgspec.Struct, frozen=True):
    """What sessions need of the rest of the engine. `server` is what clients are told of it."""

    cache: Address[CacheMessage]
    scheduler: Address[RequestMessage]
    grammar: Address[GrammarMessage]
    server: ServerInfo
    context: int  # tokens that a branch can hold
    vocab: int  # token ids that the model has
    pictures: PictureSettings | None = None  # None: it takes none

    def tell(self, message: CacheMessage | RequestMessage | GrammarMessage, /) -> None:
        """Tell the actor that a message is for. Raises MailboxFull, and then nothing has happened."""
        match message:
            case Submit() | CancelRequest() | CancelSession() | ReadBlocks() | PutBlocks():
                self.scheduler.tell(message)
            case Compile() | Abandon() | AbandonSession():
                self.grammar.tell(message)
            case _:
                self.cache.tell(message)


class Front(Protocol):
    """Gateways and sessions. Calls come in this order."""

    @property
    def spread(self) -> Spread[SessionMessage]:
        """How the scheduler and the cache reach sessions."""
        ...

    async def listen(self, group: TaskGroup, guard: Guard) -> int:
        """Open the port and return it; upgrades get 503 until the engine is ready.

        Raises ConfigError.
        """
        ...

    async def load(self) -> None:
        """Read the tokenizer. Raises ModelError."""

    async def serve(self, group: TaskGroup, guard: Guard, core: Core) -> None:
        """Open sessions from now on."""

    async def announced(self) -> None:
        """Return when every gateway knows that the engine is ready."""

    def accept(self, credentials: list[Credential]) -> None:
        """From now on these tokens are accepted. Sockets whose token is gone close with 4401."""

    def begin_drain(self, reason: str, grace: float) -> None:
        """No new connections and sessions; `bye` to every socket. `grace` in seconds."""

    async def drain(self, grace: float, *, failed: bool = False) -> None:
        """Wait for clients to leave, at most `grace` seconds, then close their sockets.

        `failed`: the engine is broken. Ends every request and closes with 1012, and waits only for
        sessions that are behind.
        """

    async def close(self) -> None:
        """Leave nothing behind, whatever came before."""


class CoreHost(Protocol):
    """What computes for the sessions of a front: one core, or a cluster of them. Calls in this order."""

    @property
    def info(self) -> ExecutorInfo:
        """Of the executor, once loaded."""
        ...

    async def load(self, group: TaskGroup, guard: Guard, progress: Progress) -> None:
        """Load the model. Raises ModelError, ConfigError, NotStarted."""

    async def serve(
        self,
        group: TaskGroup,
        guard: Guard,
        spread: Spread[SessionMessage],
        epoch: str,
        faulty: Callable[[str | None], None],
    ) -> Core:
        """Compute from now on. `spread`: how sessions are reached; `faulty`: see `watch_executor`."""
        ...

    async def close(self) -> None:
        """Leave nothing behind, whatever came before."""


class Mailboxes:
    """The mailboxes of a gateway and a directory, and what their messages are addressed to.

    In one process the addresses are the mailboxes.
    """

    def __init__(self) -> None:
        self.to_gateway: Mailbox[GatewayMessage] = Mailbox("gateway", BIG)
        self.here: Address[GatewayMessage] = self.to_gateway  # the gateway itself, once there is one
        self.to_directory: Mailbox[DirectoryMessage] = Mailbox("directory", OPENS + OWN)
        self.opens: LimitedAddress[DirectoryMessage] = LimitedAddress(self.to_directory, OPENS)
        self.sessions: Router[SessionMessage] = Router("sessions")

    @property
    def gateway(self) -> Address[GatewayMessage]:
        """Where sessions deliver."""
        return self.here

    @property
    def directory(self) -> Address[DirectoryMessage]:
        """Where the gateway asks for sessions."""
        return self.opens


class Naming(msgspec.Struct, frozen=True):
    """Names of sockets and sessions; `gateway_messages.naming`: in processes that share a port."""

    sockets: Iterator[int] | None = None
    sessions: Iterator[int] | None = None
    prefix: str = "s_"
    takes: Callable[[str], bool] = lambda session: True  # of the store: whether it is taken up here
