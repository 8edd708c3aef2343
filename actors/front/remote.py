"""The engine's state and metrics in a gateway process: the core sends the state, and is asked for
metrics.

This file does not know the link.
"""

import asyncio
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from ramify.actors.front.core_messages import Said
from ramify.actors.front.gateway_messages import EngineState
from ramify.actors.kit.report import CredentialUsage, Report, StoreHealth
from ramify.actors.links.bundle import Bundle
from ramify.actors.processes.peer import Scrapes


class RemoteStatus:
    """See `gateway.interfaces.Status`. The core tells every change; `now` is 0.25 s old at most."""

    def __init__(self) -> None:
        self.ready = False
        self.phase = "starting"
        self.fault: str | None = None
        self.store = StoreHealth()
        self.now: dict[str, float] = {"queue": 0.0, "kv": 0.0}
        self._info: dict[str, Any] = {}

    def become(self, status: EngineState) -> None:
        """The engine's state has changed."""
        self.ready, self.phase, self._info = status.ready, status.phase, status.info
        self.fault, self.store = status.fault, status.store

    @property
    def model(self) -> str:
        name: str = self._info["model"]["model"]
        return name

    def info(self) -> dict[str, Any]:
        return self._info

    def load(self) -> dict[str, float]:
        return self.now


class RemoteMetrics:
    """Counts what happens here and tells the core. Asks it for the text of all metrics.

    See `gateway.interfaces.GatewayMetrics` and `kit.metrics`.
    """

    def __init__(self, core: Bundle[Said]) -> None:
        self._core = core
        self._sockets = self._sessions = 0
        self._lag = 0.0
        self._store = StoreHealth()
        self._loop = asyncio.get_running_loop()
        self._due = False
        self.scrapes = Scrapes()
        self._told: dict[str, CredentialUsage] = {}
        # Set by who knows it: called with each report; see `Metrics`
        self.held: Callable[[], int] = lambda: 0
        self.histories: Callable[[], Mapping[str, int]] = dict
        self.usage: Callable[[], dict[str, CredentialUsage]] = dict
        # how many sessions moved, and how late first tokens were, since the last look
        self.cores: Callable[[], tuple[int, list[float]]] = lambda: (0, [])

    def sockets(self, delta: int, /) -> None:
        self._sockets += delta
        self._changed()

    def sessions(self, delta: int, /) -> None:
        self._sessions += delta
        self._changed()

    def store_is(self, health: StoreHealth, /) -> None:
        self._store = health
        self._changed()

    def loop_lag(self, seconds: float, /) -> None:
        """Called four times a second; what credentials have is told then, too."""
        self._lag = seconds
        self._report(self._news())

    def scrape(self, done: Callable[[bytes], object], /) -> None:
        self._report(self._news())  # first what happened here
        self.scrapes.ask(self._core.tell, done)

    def _changed(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._report)

    def _news(self) -> dict[str, CredentialUsage]:
        """The usage of credentials that has changed since it was last told."""
        news = {
            name: copy(usage) for name, usage in self.usage().items() if usage != self._told.get(name)
        }
        self._told.update(news)
        return news

    def _report(self, usage: dict[str, CredentialUsage] | None = None) -> None:
        self._due = False
        moves, first_tokens = self.cores()
        self._core.tell(
            Report(
                moves=moves,
                first_tokens=first_tokens,
                lag=self._lag,
                sockets=self._sockets,
                sessions=self._sessions,
                session_bytes=self.held(),
                usage=usage or {},
                histories=dict(self.histories()),
                store=self._store,
            )
        )
