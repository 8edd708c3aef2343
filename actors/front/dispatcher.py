"""What gateway processes tell the core, handed to its actors, to metrics and to other processes.

It remembers which sessions of each process the cache has heard of, so that what they hold can be
given back when the process ends without a word.

When the sessions of a process have filled their part of a mailbox, its messages wait here in order. The
process gets no credits meanwhile, so its sessions stop reading.

This file does not know how processes are started and replaced.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from ramify.actors.front.gateway_messages import (
    CoreMessage,
    Forward,
    Gauges,
    count_of,
)
from ramify.actors.front.interface import Core
from ramify.actors.front.process import GatewayProcess
from ramify.actors.kit.health import StoreHealth
from ramify.actors.kit.mailbox import Address, MailboxClosed
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.relay import Relay
from ramify.actors.processes.messages import AskMetrics, MetricsText
from ramify.protocol.messages import (
    AbandonSession,
    CancelSession,
    DropSessions,
    OpenBranch,
    session_of,
)


class Dispatcher:
    """`up`: the processes that serve, by the number of their worker; its owner keeps it.

    `core`: from `serve` on.
    """

    def __init__(self, metrics: Metrics, up: dict[int, GatewayProcess]) -> None:
        self.core: Core | None = None
        self._metrics = metrics
        self._up = up
        self._relays: dict[GatewayProcess, Relay[CoreMessage | Callable[[], None]]] = {}
        self._owed: dict[int, Relay[Any]] = {}  # to cache and scheduler: what must arrive

    def handle(
        self, process: GatewayProcess, messages: list[CoreMessage], done: Callable[[], None]
    ) -> None:
        """One turn's messages of a process, in order. `done` is called when all have been taken."""
        relay = self._relays.get(process)
        if relay is None:
            relay = self._relays[process] = Relay()
            relay.connect(_ProcessAddress(self, process))
        for message in messages:
            relay.tell(message)
        relay.tell(done)

    def release(self, process: GatewayProcess) -> None:
        """A process has ended: give back what its sessions held. Messages that wait are dropped."""
        self._metrics.gateway(process.worker, 0, 0, 0.0)
        self._metrics.usage_ended(process.worker)
        self._metrics.store_is(StoreHealth(), process.worker)
        relay = self._relays.pop(process, None)
        if relay is not None:
            relay.close()
        if process.live and self.core is not None:
            for session in process.live:
                self._must(self.core.scheduler, CancelSession(session))
                self._must(self.core.grammar, AbandonSession(session))
            self._must(self.core.cache, DropSessions(sorted(process.live)))

    def take(self, process: GatewayProcess, message: CoreMessage | Callable[[], None]) -> None:
        """Hand a message on. Raises MailboxFull, and then nothing has happened."""
        if callable(message):
            message()
            return
        with contextlib.suppress(MailboxClosed):  # the engine is going down
            self._handle(process, message)

    def _must(self, address: Address[Any], message: Any) -> None:
        relay: Relay[Any] | None = self._owed.get(id(address))
        if relay is None:
            relay = self._owed[id(address)] = Relay()
            relay.connect(address)
        relay.tell(message)

    def _handle(self, process: GatewayProcess, message: CoreMessage) -> None:
        match message:
            case Forward(worker, body):
                peer = self._up.get(worker)
                if peer is not None:
                    peer.forward(body)
            case Gauges(sockets, sessions, lag, held, usage, store):
                self._metrics.gateway(process.worker, sockets, sessions, lag, held)
                self._metrics.usage(process.worker, usage)
                self._metrics.store_is(store, process.worker)
            case AskMetrics(ident):
                self._metrics.scrape(lambda text: process.tell(MetricsText(ident, text)))
            case OpenBranch(branch):
                self._core.tell(message)
                session = session_of(branch)
                process.live.add(session)
                process.first = max(process.first, count_of(session) + 1)
            case DropSessions(sessions):
                self._core.tell(message)
                process.live.difference_update(sessions)
            case _:
                self._core.tell(message)

    @property
    def _core(self) -> Core:
        assert self.core is not None, "sessions exist only once the core serves"
        return self.core


class _ProcessAddress:
    """Where the messages of one process go: an address that may be full for a while."""

    def __init__(self, dispatcher: Dispatcher, process: GatewayProcess) -> None:
        self._dispatcher = dispatcher
        self._process = process

    def tell(self, message: CoreMessage | Callable[[], None], /) -> None:
        self._dispatcher.take(self._process, message)
