"""What the engine needs of the part that faces clients, wherever it runs."""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
from anyio.abc import TaskGroup

from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.mailbox import Address
from ramify.protocol.credentials import Credential
from ramify.protocol.messages import (
    Abandon,
    AbandonSession,
    CacheMessage,
    CancelRequest,
    CancelSession,
    Compile,
    GrammarMessage,
    RequestMessage,
    SessionMessage,
    Submit,
)
from ramify.protocol.wire import ServerInfo

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

    def tell(self, message: CacheMessage | RequestMessage | GrammarMessage, /) -> None:
        """Tell the actor that a message is for. Raises MailboxFull, and then nothing has happened."""
        match message:
            case Submit() | CancelRequest() | CancelSession():
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
        ...

    async def serve(self, group: TaskGroup, guard: Guard, core: Core) -> None:
        """Open sessions from now on."""
        ...

    async def announced(self) -> None:
        """Return when every gateway knows that the engine is ready."""
        ...

    def accept(self, credentials: list[Credential]) -> None:
        """From now on these tokens are accepted. Sockets whose token is gone close with 4401."""
        ...

    def begin_drain(self, reason: str, grace: float) -> None:
        """No new connections and sessions; `bye` to every socket. `grace` in seconds."""
        ...

    async def drain(self, grace: float, *, failed: bool = False) -> None:
        """Wait for clients to leave, at most `grace` seconds, then close their sockets.

        `failed`: the engine is broken. Ends every request and closes with 1012, and waits only for
        sessions that are behind.
        """
        ...

    async def close(self) -> None:
        """Leave nothing behind, whatever came before."""
        ...
