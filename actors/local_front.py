"""A gateway and the sessions of its sockets, on one event loop.

The whole front of an engine in one process; in an engine with gateway processes, what each of them
runs. The actors are the same: only the addresses in `Mailboxes` differ.
"""

import socket
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from ramify.actors.front.interface import BIG, Core, Guard, Mailboxes, Naming
from ramify.actors.gateway.actor import GatewayActor
from ramify.actors.gateway.port.access.minted import Minted
from ramify.actors.gateway.port.interfaces import GatewayMetrics, Served, Status
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import FanOut
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.kit.memory import Holdings
from ramify.actors.kit.report import CredentialUsage, StoreHealth
from ramify.actors.kit.working import Working
from ramify.actors.session.directory import RETRY_MS, Directory, SessionMetrics
from ramify.actors.session.making import SessionMaker
from ramify.actors.spare_work import SpareWork, WarmStart
from ramify.actors.store.actor import StoreActor
from ramify.actors.store.base import Store, StoreError
from ramify.actors.store.opening import open_store
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.config import DAY_S, EngineConfig
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import ConfigError
from ramify.protocol.messages import (
    Shutdown,
    StoreMessage,
)


class FrontMetrics(GatewayMetrics, SessionMetrics, Protocol):
    """What the gateway and the directory report."""

    usage: Callable[[], dict[str, CredentialUsage]]  # what each credential has here

    def store_is(self, health: StoreHealth, /) -> None:
        """How the store is for the sessions here, after each change."""


class LocalFront:
    """See the module docstring. A `Front`."""

    def __init__(
        self,
        config: EngineConfig,
        status: Status,
        metrics: FrontMetrics,
        clock: Clock,
        *,
        mailboxes: Mailboxes | None = None,
        naming: Naming | None = None,
        listeners: Sequence[socket.socket] = (),
        minted: Minted | None = None,
        credentials: Sequence[Credential] = (),
        working: Working | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`secret`: with which the gateway signs, where several do and no store has one."""
        self._working = working
        self._barred: set[str] = set()
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._mailboxes = mailboxes if mailboxes is not None else Mailboxes()
        self._naming = naming if naming is not None else Naming()
        self._tokenizer: Tokenizer | None = None
        self._directory: Directory | None = None
        self.spread = FanOut(self._mailboxes.sessions)
        self.gateway = GatewayActor(
            self._mailboxes.to_gateway,
            config.server,
            config.limits,
            self._mailboxes.directory,
            self._mailboxes.sessions,
            status,
            metrics,
            clock,
            listeners=listeners,
            numbers=self._naming.sockets,
            minted=minted,
            credentials=credentials,
        )
        if secret is not None:
            self.gateway.signs(secret)
        self._mailboxes.here = self.gateway
        metrics.usage = self.gateway.usage

    async def listen(self, group: TaskGroup, guard: Guard) -> int:
        port: int = await group.start(guard("gateway", self.gateway.run))
        return port

    async def load(self) -> None:
        path = self._config.model.path
        self._tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, path)

    async def serve(self, group: TaskGroup, guard: Guard, core: Core) -> None:
        assert self._tokenizer is not None
        config = self._config
        holdings = Holdings(
            config.limits, sessions=config.server.max_sessions, most=config.server.sessions_bytes
        )
        self._metrics.held = lambda: holdings.held
        keeper = await self._open_store(group, guard) if config.server.store is not None else None
        numbers = self._naming.sessions or count(1)
        spare = SpareWork(
            context=core.context,
            cache=core.cache,
            scheduler=core.scheduler,
            sessions=self._mailboxes.sessions,
            numbers=numbers,
            clock=self._clock,
        )
        maker = SessionMaker(
            self._tokenizer,
            server=core.server,
            context=core.context,
            vocab=core.vocab,
            limits=config.limits,
            ttl_s=config.server.session_ttl_s,
            ttl_max_s=config.server.session_ttl_max_s,
            clock=self._clock,
            numbers=numbers,
            tool_parser=config.model.tool_parser,
            store=keeper.mailbox if keeper is not None else None,
            kept_s=config.server.store_days * DAY_S,
            persist=config.server.persist,
            working=self._working,
            ahead=spare.put,
            pictures=core.pictures,
            fetch_images=config.server.fetch_images,
        )
        self._directory = directory = Directory(
            self._mailboxes.to_directory,
            maker,
            holdings=holdings,
            cache=core.cache,
            scheduler=core.scheduler,
            grammar=core.grammar,
            gateway=self._mailboxes.gateway,
            sessions=self._mailboxes.sessions,
            metrics=self._metrics,
            prefix=self._naming.prefix,
            barred=self._barred,
        )
        self._metrics.histories = maker.histories.counts
        if keeper is not None and config.server.persist_histories:
            maker.histories.keep(maker.model, keeper.keep, keeper.recall)
        template = maker.template
        self.gateway.loaded(
            self._tokenizer.token_bytes,
            Served(
                context=core.context,
                thinks=template.speech.dialect.thought is not None,
                unthought=template.speech.unthought,
                users_follow_results=template.lets_users_follow_results(),
                tells_effort=template.tells_effort(),
                control=self._tokenizer.spelling,
                sampling=msgspec.structs.asdict(self._tokenizer.generation_defaults),
                pictures=core.pictures is not None,
                fetches=bool(config.server.fetch_images),
            ),
        )
        await group.start(guard("directory", directory.run))
        await group.start(guard("spare work", spare.run))
        if config.server.store is not None and config.server.warm_start != 0:
            warm_start = WarmStart(
                spare,
                partial(open_store, config.server.store, config.server.store_key_file, read_only=True),
                model=maker.model,
                most=self._share_of_warm_start(),
                takes=self._naming.takes,
                here=directory.__contains__,
            )
            await group.start(guard("warm start", warm_start.run))

    def _share_of_warm_start(self) -> int | None:
        """Tokens; each process with sessions has an equal part. None: no bound."""
        most = self._config.server.warm_start
        return None if most is None else most // max(1, self._config.gateways or 1)

    async def _open_store(self, group: TaskGroup, guard: Guard) -> StoreActor:
        """Start the store actor, which has sessions with ops taken up at once. Raises ConfigError."""
        server = self._config.server
        assert server.store is not None

        def opened(place: str) -> tuple[Store, list[str], bytes]:
            store = open_store(place, server.store_key_file)
            try:
                return store, store.waiting(), store.secret()
            except BaseException:
                store.close()
                raise

        try:
            store, waiting, secret = await anyio.to_thread.run_sync(opened, server.store)
        except StoreError as error:
            raise ConfigError(str(error)) from error
        self.gateway.signs(secret)
        mailbox: Mailbox[StoreMessage] = Mailbox("store", BIG)
        actor = StoreActor(
            mailbox,
            store,
            self._mailboxes.sessions,
            self._mailboxes.to_directory,
            keep_s=server.store_days * DAY_S,
            most=server.store_bytes,
            waiting=[session for session in waiting if self._naming.takes(session)],
            takes=self._naming.takes,
            report=self._metrics.store_is,
        )
        await group.start(guard("store", actor.run))
        return actor

    async def announced(self) -> None:
        """The gateway looks at the engine's status itself."""

    def bar(self, session: str) -> None:
        """This session is not taken up from the store."""
        self._barred.add(session)

    def accept(self, credentials: Sequence[Credential]) -> None:
        self.gateway.accept(credentials)

    def begin_drain(self, reason: str, grace: float) -> None:
        self._mailboxes.to_directory.tell(Shutdown(reason, RETRY_MS))
        self.gateway.begin_drain(reason, grace)

    async def drain(self, grace: float, *, failed: bool = False) -> None:
        if failed:
            self.gateway.fail()
        if failed and self._directory is not None:
            with anyio.move_on_after(grace):
                await self._directory.fail()
        await self.gateway.drain(grace, failed=failed)

    async def close(self) -> None:
        """Everything ends with its task group."""
