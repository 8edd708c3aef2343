"""What gateway processes tell the core: handed to scheduler, cache, metrics and neighbours.

It remembers which sessions of each process the cache has heard of, so that what they hold can be
given back when the process ends without a word.

This file does not know how processes are started and replaced.
"""

import contextlib

from ramify.actors.front.interface import Core
from ramify.actors.front.process import GatewayProcess
from ramify.actors.front.wire import (
    AskMetrics,
    CoreMessage,
    Forward,
    Gauges,
    MetricsText,
    count_of,
)
from ramify.actors.kit.mailbox import MailboxClosed
from ramify.actors.kit.metrics import Metrics
from ramify.protocol.messages import (
    Cancel,
    CancelSession,
    DropSessions,
    OpenBranch,
    Submit,
    session_of,
)


class Inlet:
    """`up`: the processes that serve, by slot; its owner keeps it. `core`: from `serve` on."""

    def __init__(self, metrics: Metrics, up: dict[int, GatewayProcess]) -> None:
        self.core: Core | None = None
        self._metrics = metrics
        self._up = up

    def handle(self, process: GatewayProcess, messages: list[CoreMessage]) -> None:
        """One turn's messages of a process, in order."""
        for message in messages:
            with contextlib.suppress(MailboxClosed):  # the engine is going down
                self._handle(process, message)

    def bury(self, process: GatewayProcess) -> None:
        """Give back what the sessions of a process held that has ended."""
        self._metrics.gateway(process.slot, 0, 0, 0.0)
        self._metrics.usage_ended(process.slot)
        if process.live and self.core is not None:
            with contextlib.suppress(MailboxClosed):
                for session in process.live:
                    self.core.scheduler.tell(CancelSession(session))
                self.core.cache.tell(DropSessions(sorted(process.live)))

    def _handle(self, process: GatewayProcess, message: CoreMessage) -> None:
        match message:
            case Forward(slot, body):
                neighbour = self._up.get(slot)
                if neighbour is not None:
                    neighbour.forward(body)
            case Gauges(sockets, sessions, lag, usage):
                self._metrics.gateway(process.slot, sockets, sessions, lag)
                self._metrics.usage(process.slot, usage)
            case AskMetrics(ident):
                self._metrics.scrape(lambda text: process.tell(MetricsText(ident, text)))
            case Submit() | Cancel():
                self._core.scheduler.tell(message)
            case CancelSession(session):
                process.live.discard(session)
                self._core.scheduler.tell(message)
            case OpenBranch(branch):
                session = session_of(branch)
                process.live.add(session)
                process.first = max(process.first, count_of(session) + 1)
                self._core.cache.tell(message)
            case _:
                self._core.cache.tell(message)

    @property
    def _core(self) -> Core:
        assert self.core is not None, "sessions exist only once the core serves"
        return self.core
