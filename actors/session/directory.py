"""The directory: creates sessions, finds them by id and key, and cleans up after them.

A session that crashes loses its sockets (1011) and its branches, and nobody else notices. The directory
cleans up by the session's number alone, because a crashed session cannot be trusted to know its
branches. It uses relays, because these messages must arrive however full the mailboxes are. A full
mailbox of the directory means that sockets open faster than sessions can be made: the gateway answers
`overloaded`.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.calls.dialects import dialect_of
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull, SessionMailbox
from ramify.actors.kit.memory import Displacement, Holdings, Meter
from ramify.actors.kit.relay import Relay
from ramify.actors.kit.turns import Steps, Turns, Work
from ramify.actors.kit.working import Working, cell_of
from ramify.actors.session.actor import ENDS, SessionActor, SessionEvent
from ramify.actors.session.branches.state import MakeTokens, SessionState
from ramify.actors.session.core import FAILED, SessionCore
from ramify.actors.session.durable.exports import Importing, imported
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.session.output.generation import Seeds
from ramify.actors.session.restore import Damaged, read_head, restoring
from ramify.actors.session.saver import Saver
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.session.sockets.publisher import error_message
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.actors.tokenizer.encoder import Encoder, Job
from ramify.actors.tokenizer.histories import Histories
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, Forbidden, NoSession, Overloaded, RamifyError
from ramify.protocol.messages import (
    AbandonSession,
    Attach,
    CacheMessage,
    CancelSession,
    CloseSocket,
    DirectoryMessage,
    DropSessions,
    Fetch,
    Fetched,
    GatewayMessage,
    GrammarMessage,
    Opened,
    OpenRefused,
    OpenSession,
    Release,
    RequestMessage,
    Saving,
    SessionMessage,
    Shutdown,
    StoreMessage,
    Waiting,
    Wanted,
)
from ramify.protocol.saved import SavedHead
from ramify.protocol.wire import Open, Persist, ServerInfo

FETCH_RETRY_MS = 2000
WRONG_KEY = "the session's `key` is missing or wrong"
RETRY_MS = 1000  # when a client may look for this server's next life
log = get_log(__name__)
Message = TypeVar("Message")


class SessionMetrics(Protocol):
    """What the directory reports."""

    def sessions(self, delta: int, /) -> None:
        """A session began (+1) or ended (-1)."""

    def watch_histories(self, counts: Callable[[], dict[str, int]], /) -> None:
        """`counts()`: see `Histories.counts`."""

    def watch_held(self, held: Callable[[], int], /) -> None:
        """`held()`: bytes of the host's memory that the sessions here hold now."""


@dataclass(eq=False, repr=False)
class _LiveSession:
    """A live session."""

    identity: Identity
    mailbox: Mailbox[SessionEvent]
    actor: SessionActor
    displaceable: bool


class _Terms(NamedTuple):
    """What holds for a session from its `open` to its end."""

    owner: str
    namespace: str
    priority: int
    saves: bool
    displaceable: bool
    binds: bool = False

    @classmethod
    def of(cls, message: OpenSession) -> "_Terms":
        """Of a new one."""
        return cls(
            message.owner,
            message.namespace,
            message.priority,
            message.saves,
            message.displaceable,
            message.binds,
        )


class _Made(NamedTuple):
    """A session that does not run yet."""

    number: int
    core: SessionCore
    saver: Saver | None
    displaceable: bool


class Directory:
    """The sessions of this process.

    `store`: keeps them, if there is one, for `kept_s` seconds after their last use; those that are not
    in memory are read when somebody opens them. `wall`: seconds since 1970.

    `working`: where to write which session is worked on. `barred`: saved sessions that are not taken up.
    `ahead`: see `SpareWork.put`.

    `holdings`: the memory that they may hold. `numbers`: what they are called inside, `prefix`: how
    their public ids begin, where several processes have sessions.
    """

    def __init__(
        self,
        mailbox: Mailbox[DirectoryMessage],
        *,
        tokenizer: Tokenizer,
        server: ServerInfo,
        context: int,
        vocab: int,
        limits: Limits,
        ttl_s: float,
        ttl_max_s: float = math.inf,
        holdings: Holdings | None = None,
        cache: Address[CacheMessage],
        scheduler: Address[RequestMessage],
        grammar: Address[GrammarMessage],
        gateway: Address[GatewayMessage],
        sessions: Router[SessionMessage],
        clock: Clock,
        metrics: SessionMetrics,
        numbers: Iterator[int] | None = None,
        prefix: str = "s_",
        tool_parser: str = "auto",
        store: Address[StoreMessage] | None = None,
        kept_s: float = math.inf,
        persist: Persist = "lazy",
        wall: Callable[[], float] = time.time,
        working: Working | None = None,
        barred: Set[str] = frozenset(),
        ahead: Callable[[str, MakeTokens], None] | None = None,
    ) -> None:
        self._ahead = ahead
        self._working = working
        self._barred = barred
        self._store = store
        self._kept_s = kept_s if store is not None else None
        self._wall = wall
        self._persist: Persist = persist
        self._unsaved = False  # the store cannot be written now
        self._coming: dict[str, list[OpenSession]] = {}  # who waits for a session that is being read
        self._mailbox = mailbox
        dialect = dialect_of(tokenizer.template_source, tool_parser)
        log.info("tool calls", form=dialect.name, thoughts=dialect.thought is not None)
        shown = tokenizer.showing(dialect.marks)
        self._tokenizer = shown
        self._template = ChatTemplate(shown, dialect, control=shown is not tokenizer)
        self.template = self._template
        self._detokenizer = Detokenizer(shown.token_bytes)
        self._server = server
        self.model = f"{server.model} ({vocab} tokens)"  # as `SavedHead.model`
        self._context = context
        self._vocab = vocab
        self._encoder = Encoder()
        self._turns = Turns()
        self._seeds = Seeds()
        _compare(tokenizer, vocab)
        self._limits = limits
        self._ttl_s = ttl_s
        self._ttl_max_s = ttl_max_s
        self.holdings = holdings if holdings is not None else Holdings(limits)
        self.histories = Histories(limits)
        self._cache = cache
        self._scheduler = scheduler
        self._grammar = grammar
        self._gateway = gateway
        self._must_cache: Relay[CacheMessage] = _relay(cache)
        self._must_scheduler: Relay[RequestMessage] = _relay(scheduler)
        self._must_grammar: Relay[GrammarMessage] = _relay(grammar)
        self._must_gateway: Relay[GatewayMessage] = _relay(gateway)
        self._sessions = sessions
        self._clock = clock
        self._metrics = metrics
        self.entries: dict[str, tuple[int, _LiveSession]] = {}
        self._displacement = Displacement()
        self._numbers = numbers if numbers is not None else itertools.count(1)
        self._prefix = prefix
        self._draining: Shutdown | None = None
        self._deserted = anyio.Event()  # no session is left; a new one for the next
        self._deserted.set()

    def __len__(self) -> int:
        return len(self.entries)

    async def fail(self) -> None:
        """The engine is broken: sessions answer their ops, close their sockets and end.

        Returns when none is left. New ones are refused.
        """
        self._draining = Shutdown(FAILED, RETRY_MS)
        for _, entry in self.entries.values():
            entry.actor.fail(FAILED)
        await self._deserted.wait()

    def __contains__(self, session: object) -> bool:
        """Whether a session with this public id is in memory."""
        return session in self.entries

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled, or until the mailbox is closed and every session has ended."""
        try:
            async with anyio.create_task_group() as group:
                task_status.started()
                try:
                    while True:
                        for message in await self._mailbox.drain():
                            self._handle(message, group)
                except MailboxClosed:
                    for _, entry in self.entries.values():
                        entry.mailbox.close()
        finally:
            self._encoder.close()

    def _handle(self, message: DirectoryMessage, group: TaskGroup) -> None:
        match message:
            case OpenSession():
                try:
                    if message.open.import_ is not None:
                        self._check_open(message)
                        group.start_soon(self._import, message, group)
                    else:
                        self._open(message, group)
                except BaseException as error:
                    self._refuse(message, error)
            case Fetched():
                group.start_soon(self._fetched, message, group)
            case Waiting(sessions):
                for session in sessions:
                    self._fetch(session, [], how="free")
            case Wanted(sessions):
                for session in sessions:
                    self._give_up(session)
            case Saving(error):
                self._unsaved = error is not None
            case Shutdown():
                self._draining = message

    def _refuse(self, message: OpenSession, error: BaseException) -> None:
        """Say why a socket gets no session. Raises what ends the process or its tasks."""
        if isinstance(error, ENDS):
            raise error
        if isinstance(error, RamifyError):
            log.info("open refused", client=message.open.who, code=error.code)
            reply = error_message(error)
        else:
            log.error("a session could not be opened", exc_info=error)
            reply = error_message(RamifyError("the session could not be opened"))
        self._must_gateway.tell(OpenRefused(message.socket, reply))

    # --- sessions that the store has ---------------------------------------------------------------

    def _fetch(
        self, session: str, who: list[OpenSession], *, how: Literal["look", "free"] = "look"
    ) -> None:
        """Have a session read for those who want to open it, or because its ops wait ("free")."""
        coming = self._coming.get(session)
        if coming is not None:
            coming += who
        elif session not in self.entries and self._store is not None:
            self._store.tell(Fetch(session, how))
            self._coming[session] = who

    async def _fetched(self, found: Fetched, group: TaskGroup) -> None:
        """The store has answered: take the session for those who may open it, then let them in."""
        session = found.session
        waiting = self._coming.get(session, [])
        error: RamifyError | None = None
        try:
            if await self._asks_again(found, waiting, group):
                return
        except RamifyError as refused:
            error = refused
        except Damaged as damaged:
            log.error("a saved session is damaged", session=session, error=str(damaged))
            error = RamifyError("the session was saved, and what was saved is damaged: open a new one")
        except BaseException as bug:
            if isinstance(bug, ENDS):
                raise
            log.exception("a saved session could not be taken up", session=session)
            error = RamifyError("the session was saved, and could not be taken up: open a new one")
        self._coming.pop(session, None)
        if found.fence and session not in self.entries and self._store is not None:
            self._store.tell(Release(session))
        for message in waiting:
            if error is not None:
                log.info("open refused", client=message.open.who, code=error.code)
                self._must_gateway.tell(OpenRefused(message.socket, error_message(error)))
            else:
                self._handle(msgspec.structs.replace(message, fetched=True), group)

    async def _asks_again(self, found: Fetched, waiting: list[OpenSession], group: TaskGroup) -> bool:
        """Take a session up that was fetched. True if the store is asked once more instead.

        Raises RamifyError, Damaged.
        """
        session, items = found.session, found.items
        if session in self._barred:
            raise RamifyError("the session kept its server from working: open a new one")
        if found.damaged:
            raise Damaged(found.error or "")
        if found.error is not None:
            raise Overloaded("the session cannot be read now: try later", retry_ms=FETCH_RETRY_MS)
        if found.held and waiting and self._store is not None:  # its ops are another server's
            self._store.tell(Fetch(session))
            return True
        if items and session not in self.entries:
            head = read_head(items)
            _check_wanted(session, head, waiting)
            self._check_model(session, head)
            if not found.fence and self._store is not None:  # who may not open it moves nothing
                self._store.tell(Fetch(session, "ask"))
                return True
            await self._take_up(session, found, group)
        return False

    def _give_up(self, session: str) -> None:
        """Another server waits for a session that the store says is here."""
        _, entry = self.entries.get(session, (0, None))
        if entry is not None:
            entry.actor.give_up()
        elif session not in self._coming and self._store is not None:
            self._store.tell(Release(session))

    def _check_model(self, session: str, head: SavedHead) -> None:
        """Raises NoSession for one whose tokens are another model's."""
        if head.model != self.model:
            raise NoSession(
                f"session {session!r} was made with the model {head.model!r}, this server has "
                f"{self.model!r}, whose tokens differ: open a new one"
            )

    async def _take_up(self, session: str, found: Fetched, group: TaskGroup) -> None:
        """Make a session of what was saved. Raises Damaged, LimitExceeded."""
        head = read_head(found.items)
        identity = Identity(session, "", hashes=(head.key, head.view_key))
        terms = _Terms(head.owner, head.namespace, head.priority, True, head.displaceable)
        with self._room(head.owner, self.holdings.open(head.owner)) as meter:
            made = self._make(identity, meter, terms, found)
            await self._fill(made, found)
            self._begin(made, group, who=None, taken_up=True)

    @contextmanager
    def _room(self, owner: str, meter: Meter) -> Iterator[Meter]:
        """What a session counts against, given back if it does not begin."""
        try:
            yield meter
        except BaseException:
            self.holdings.close(owner, meter)
            raise

    def _check_open(self, message: OpenSession) -> None:
        """Raises RamifyError for what no session is opened for, whichever is asked for."""
        opened = message.open
        if opened.model is not None and opened.model != self._server.model:
            raise BadRequest(
                f"this server has the model {self._server.model!r}, not {opened.model!r}: "
                "leave `model` out"
            )
        if self._draining is not None:
            raise Overloaded("the server is draining", retry_ms=self._draining.after_ms)
        if opened.session is None and opened.key is not None:  # a new one would look like a lost history
            path = "$.key" if message.place is None else f"$[{message.place}].key"
            raise BadRequest(
                f"`key` without `session`: give both to resume, none for a new session - at `{path}`",
                details={"path": path},
            )

    def _open(self, message: OpenSession, group: TaskGroup) -> None:
        self._check_open(message)
        opened = message.open
        if opened.session is None:
            number, entry, write = *self._create(message, group), True
        else:
            wanted = opened.session
            if self._store is not None and wanted not in self.entries and not message.fetched:
                self._fetch(wanted, [message])
                return
            number, entry, write = self._find(wanted, opened, message.owner)
            if write and message.saves and not entry.actor.saves:
                self._save_from_now(entry)
        self._attach(message, opened, number, entry, write)

    def _attach(
        self, message: OpenSession, opened: Open, number: int, entry: _LiveSession, write: bool
    ) -> None:
        try:
            place = (message.place or 0) + 1
            entry.mailbox.tell(Attach(message.socket, opened, message.ops, write, message.size, place))
        except MailboxFull:
            raise Overloaded("the session has too much to do", retry_ms=1000) from None
        self._must_gateway.tell(Opened(message.socket, number))

    async def _import(self, message: OpenSession, group: TaskGroup) -> None:
        """Open a new session with what a file says: checked in a thread, then made in turns."""
        try:
            identity = Identity.new(self._prefix)
            found = Fetched(identity.session, await self._imported(identity, message))
            self._check_open(message)  # time has passed
            with self._room(message.owner, self._admit(message)) as meter:
                made = self._make(identity, meter, _Terms.of(message), found)
                await self._fill(made, found)
                number, entry = self._begin(made, group, who=message.open.who)
            opened = msgspec.structs.replace(message.open, import_=None)  # it may be large
            self._attach(message, opened, number, entry, True)
        except Damaged as error:
            why = f"the file cannot be imported: {error} - at `$.import`"
            self._refuse(message, BadRequest(why))
        except BaseException as error:
            self._refuse(message, error)

    def _work_on(self, cell: bytes | None) -> None:
        if self._working is None:
            return
        if cell is None:
            self._working.off()
        else:
            self._working.on(cell)

    async def _fill(self, made: _Made, found: Fetched) -> None:
        """Restore a session, some of it in each turn of the loop. Raises Damaged, LimitExceeded."""
        work = Work()
        now, wall = self._clock.now(), self._wall()
        sound = True

        def steps() -> Steps[None]:
            nonlocal sound
            sound = yield from restoring(made.core, found.items, now, wall, stored=found.fence > 0)

        name = cell_of(found.session)
        self._work_on(name)
        for cost in steps():
            if not work.take(cost):
                self._work_on(None)
                await self._turns.next()
                self._work_on(name)
                work.renew()
                work.take(cost)
        self._work_on(None)
        if not sound and made.saver is not None:
            made.saver.unsaved(1)  # what the store has is not what the session is

    def _find(self, session: str, opened: Open, owner: str) -> tuple[int, _LiveSession, bool]:
        """The session that the keys open. For another owner than its own, only a view key does:
        without it there seems to be no such session.
        """
        number, entry = self.entries.get(session, (0, None))
        mine = entry is not None and entry.actor.core.state.owner == owner
        if entry is not None:
            key = opened.key or ""
            if mine and entry.identity.opens(key):
                if entry.displaceable:
                    self._displacement.use(owner, session)
                return number, entry, True
            if entry.identity.shows(key):
                return number, entry, False
        if entry is None or not mine:
            raise _no_session(session)
        raise Forbidden(WRONG_KEY)

    def _create(self, message: OpenSession, group: TaskGroup) -> tuple[int, _LiveSession]:
        """A new session. Raises LimitExceeded, and Overloaded while what it needs cannot be written."""
        with self._room(message.owner, self._admit(message)) as meter:
            made = self._make(Identity.new(self._prefix), meter, _Terms.of(message))
            return self._begin(made, group, who=message.open.who)

    def _admit(self, message: OpenSession) -> Meter:
        """Room for a new session. Raises as `_create`."""
        if message.saves:
            self._refuse_unsaved()
        if message.displaceable:
            budget = self.holdings.budget(message.owner)
            for session in self._displacement.make_room(message.owner, budget, self._in_use):
                self.entries[session][1].actor.displace()
        return self.holdings.open(message.owner)

    async def _imported(self, identity: Identity, message: OpenSession) -> dict[str, bytes]:
        """The items that a new session begins with. Raises BadRequest, Overloaded."""
        file = message.open.import_
        assert file is not None
        into = Importing(
            identity,
            owner=message.owner,
            namespace=message.namespace,
            priority=message.priority,
            displaceable=message.displaceable,
            persist=self._persist,
            created=self._wall(),
        )
        run = partial(
            imported,
            file,
            into,
            model=self.model,
            vocab=self._vocab,
            context=self._context,
            limits=self._limits,
        )
        read: asyncio.Future[dict[str, bytes]] = asyncio.get_running_loop().create_future()
        self._encoder.submit(message.owner, -message.socket, Job(len(file), run, partial(_settle, read)))
        try:
            return await read
        finally:
            del read  # it has the exception, whose traceback has this frame

    def _save_from_now(self, entry: _LiveSession) -> None:
        """Something is to be kept of a session that nobody was to come back to."""
        if self._store is None:
            return
        self._refuse_unsaved()
        core = entry.actor.core
        core.save_from_now(self._persist, self._kept_s)
        core.record(
            model=self.model,
            priority=core.state.limits.priority,
            created=self._wall(),
            displaceable=entry.displaceable,
        )
        entry.actor.save_with(Saver(core, self._store, self._clock, late=True, wall=self._wall))

    def _refuse_unsaved(self) -> None:
        """Raises Overloaded while nothing can be written."""
        if self._unsaved:
            raise Overloaded(
                "sessions cannot be saved now (the server's log says why): try later",
                retry_ms=FETCH_RETRY_MS,
            )

    def _in_use(self, session: str) -> bool:
        return bool(self.entries[session][1].actor.core.sockets)

    def _limits_of(self, priority: int) -> Limits:
        if priority >= self._limits.priority:
            return self._limits
        return msgspec.structs.replace(self._limits, priority=priority)

    def _make(
        self,
        identity: Identity,
        meter: Meter,
        terms: _Terms,
        found: Fetched | None = None,
    ) -> _Made:
        """A session that is nowhere yet: a new one, or one to be filled with what was `found`."""
        number, saves, priority = next(self._numbers), terms.saves, terms.priority
        core = SessionCore(
            identity,
            SessionState(
                number,
                context=self._context,
                vocab=self._vocab,
                limits=self._limits_of(priority),
                decode=self._tokenizer.decode,
                owner=terms.owner,
                model=self.model,
                namespace=terms.namespace,
                meter=meter,
            ),
            self._tokenizer,
            self._template,
            self._detokenizer,
            server=self._server,
            ttl_s=self._ttl_s,
            ttl_max_s=self._ttl_max_s,
            random_seed=self._seeds,
            saved=found is not None,
            kept_s=self._kept_s if saves else None,
        )
        core.state.histories, core.state.binds = self.histories, terms.binds
        core.state.ahead = self._ahead
        saver = None
        if self._store is not None and saves:
            created = self._wall() if found is None else read_head(found.items).created
            core.state.persist = self._persist
            core.record(
                model=self.model,
                priority=priority,
                created=created,
                displaceable=terms.displaceable,
            )
            fence = 0 if found is None else found.fence
            saver = Saver(core, self._store, self._clock, fence=fence, wall=self._wall)
        return _Made(number, core, saver, terms.displaceable)

    def _begin(
        self,
        made: _Made,
        group: TaskGroup,
        *,
        who: str | None,
        taken_up: bool = False,
    ) -> tuple[int, _LiveSession]:
        """A session begins: one that `who` opened, or one that was `taken_up`."""
        if self._draining is not None:
            raise Overloaded("the server is draining", retry_ms=self._draining.after_ms)
        number, core, displaceable = made.number, made.core, made.displaceable
        identity, owner = core.identity, core.state.owner
        mailbox: SessionMailbox[SessionEvent] = SessionMailbox(f"session {number}")
        actor = SessionActor(
            mailbox,
            core,
            cache=self._cache,
            scheduler=self._scheduler,
            grammar=self._grammar,
            gateway=self._gateway,
            clock=self._clock,
            encoder=self._encoder,
            turns=self._turns,
            saver=made.saver,
            working=self._working,
        )
        entry = _LiveSession(identity, mailbox, actor, displaceable=displaceable)
        with ExitStack() as undo:
            undo.callback(self._leave, identity.session)
            self.entries[identity.session] = (number, entry)
            if self._deserted.is_set():
                self._deserted = anyio.Event()
            self._sessions.add(number, actor)
            undo.callback(self._sessions.remove, number)
            self._metrics.sessions(1)
            undo.callback(self._metrics.sessions, -1)
            whose: dict[str, Any] = {"owner": owner} if owner else {}
            if taken_up:
                log.info("session taken up", session=identity.session, **whose)
            else:
                log.info("session opened", session=identity.session, client=who, **whose)
            group.start_soon(actor.live, partial(self._ended, number, entry))
            undo.pop_all()
        if displaceable:
            self._displacement.use(owner, identity.session)
        return number, entry

    def _leave(self, session: str) -> None:
        """There is no such session any more."""
        del self.entries[session]
        if not self.entries:
            self._deserted.set()

    def _ended(self, number: int, entry: _LiveSession, code: int, reason: str) -> None:
        """A session has ended, however: give back what it held, close its sockets."""
        identity, core = entry.identity, entry.actor.core
        self._leave(identity.session)
        self._displacement.drop(core.state.owner, identity.session)
        self._sessions.remove(number)
        self._metrics.sessions(-1)
        entry.mailbox.close()
        late = [m.socket for m in entry.mailbox.drain_nowait() if isinstance(m, Attach)]
        for socket in [*core.sockets, *late]:
            self._must_gateway.tell(CloseSocket(socket, code, reason))
        self._must_scheduler.tell(CancelSession(number))
        self._must_grammar.tell(AbandonSession(number))
        self._must_cache.tell(DropSessions([number]))
        self.holdings.close(core.state.owner, core.state.meter)
        log.info("session ended", session=identity.session, reason=core.ended or "stopped")
        try:
            entry.actor.part()
        except BaseException as bug:  # its memory goes later
            if isinstance(bug, ENDS):
                raise
            log.exception("what a session held could not be taken apart", session=identity.session)


def _no_session(session: str) -> NoSession:
    return NoSession(
        f"there is no session {session!r}: it was closed, has expired, or the server restarted; "
        "open one without `session`"
    )


def _check_wanted(session: str, head: SavedHead, waiting: Sequence[OpenSession]) -> None:
    """A saved session is to be taken up if somebody has a key of it, or if its ops wait.

    Raises NoSession or Forbidden if those who want it may not: it costs its owner, not them.
    """
    saved = Identity(session, "", hashes=(head.key, head.view_key))
    mine = [message for message in waiting if message.owner == head.owner]
    if not waiting or any(saved.opens(message.open.key or "") for message in mine):
        return
    if not any(saved.shows(message.open.key or "") for message in waiting):
        raise Forbidden(WRONG_KEY) if mine else _no_session(session)


def _settle(
    read: asyncio.Future[dict[str, bytes]], items: dict[str, bytes] | None, error: BaseException | None
) -> None:
    if read.done():  # the directory has gone
        return
    if items is not None:
        read.set_result(items)
    else:
        read.set_exception(error or RamifyError("the file could not be read"))


def _relay(address: Address[Message]) -> Relay[Message]:
    relay: Relay[Message] = Relay()
    relay.connect(address)
    return relay


def _compare(tokenizer: Tokenizer, vocab: int) -> None:
    """Warn of tokens that the tokenizer has and the model lacks: appends that need one are refused."""
    unknown = tokenizer.beyond(vocab)
    if unknown:
        log.warning(
            "the tokenizer has tokens that the model does not have; text with one of them is refused. "
            "Serve a model whose embedding was resized for this tokenizer, or the model's own tokenizer",
            vocabulary=vocab,
            tokens=len(unknown),
            examples=dict(sorted(unknown.items())[:4]),
        )
    missing = sorted(tokenizer.eos_ids & unknown.keys())
    if missing:
        log.warning("the model can never sample these ends of a sequence", tokens=missing)
