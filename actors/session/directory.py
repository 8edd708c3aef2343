"""The directory: creates sessions, finds them by id and key, and cleans up after them.

A session that crashes loses its sockets (1011) and its branches, and nobody else notices. The directory
cleans up by the session's number alone, because a crashed session cannot be trusted to know its
branches. It uses relays, because these messages must arrive however full the mailboxes are. A full
mailbox of the directory means that sockets open faster than sessions can be made: the gateway answers
`overloaded`.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull, SessionMailbox
from ramify.actors.kit.memory import Displacement, Holdings, Meter
from ramify.actors.kit.relay import Relay
from ramify.actors.session.actor import ENDS, SessionActor, SessionEvent
from ramify.actors.session.core import FAILED, LEFT
from ramify.actors.session.fetching import FETCH_RETRY_MS, WRONG_KEY, Fetching, no_session
from ramify.actors.session.making import Made, SessionMaker, Terms
from ramify.actors.session.restore import Damaged, read_head
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.session.sockets.publisher import error_message
from ramify.protocol.errors import BadRequest, Close, Forbidden, Overloaded, RamifyError
from ramify.protocol.messages import (
    AbandonSession,
    Attach,
    CacheMessage,
    CancelSession,
    CloseSocket,
    DirectoryMessage,
    DropSessions,
    Fetched,
    GatewayMessage,
    GrammarMessage,
    Opened,
    OpenRefused,
    OpenSession,
    RequestMessage,
    Saving,
    SessionMessage,
    Shutdown,
    Waiting,
    Wanted,
)
from ramify.protocol.wire import Open

RETRY_MS = 1000  # when a client may look for this server's next life
log = get_log(__name__)
Message = TypeVar("Message")


class SessionMetrics(Protocol):
    """What the directory reports."""

    held: Callable[[], int]  # bytes of the host's memory that the sessions here hold
    histories: Callable[[], Mapping[str, int]]  # see `Histories.counts`

    def sessions(self, delta: int, /) -> None:
        """Count a session that began (+1) or ended (-1)."""


@dataclass(eq=False, repr=False)
class _LiveSession:
    """A live session."""

    identity: Identity
    mailbox: Mailbox[SessionEvent]
    actor: SessionActor
    displaceable: bool


class Directory:
    """The sessions of this process.

    `maker`: what they have in common, the store that keeps them among it. Those that are not in memory
    are read when somebody opens them. `barred`: saved sessions that are not taken up. `holdings`: the
    memory that they may hold. `prefix`: how public ids begin, where several processes have sessions.
    """

    def __init__(
        self,
        mailbox: Mailbox[DirectoryMessage],
        maker: SessionMaker,
        *,
        cache: Address[CacheMessage],
        scheduler: Address[RequestMessage],
        grammar: Address[GrammarMessage],
        gateway: Address[GatewayMessage],
        sessions: Router[SessionMessage],
        metrics: SessionMetrics,
        holdings: Holdings | None = None,
        prefix: str = "s_",
        barred: Set[str] = frozenset(),
    ) -> None:
        self._mailbox = mailbox
        self.maker = maker
        self._unsaved = False  # the store cannot be written now
        self.holdings = holdings if holdings is not None else Holdings(maker.limits)
        self._cache = cache
        self._scheduler = scheduler
        self._grammar = grammar
        self._gateway = gateway
        self._must_cache: Relay[CacheMessage] = _relay(cache)
        self._must_scheduler: Relay[RequestMessage] = _relay(scheduler)
        self._must_grammar: Relay[GrammarMessage] = _relay(grammar)
        self._must_gateway: Relay[GatewayMessage] = _relay(gateway)
        self._sessions = sessions
        self._metrics = metrics
        self.entries: dict[str, tuple[int, _LiveSession]] = {}
        self._displacement = Displacement()
        self._fetching = Fetching(maker.store, maker.model, barred, self.entries)
        self._prefix = prefix
        self._draining: Shutdown | None = None
        self._deserted = anyio.Event()  # no session is left; a new one for the next
        self._deserted.set()

    def __len__(self) -> int:
        return len(self.entries)

    async def fail(self) -> None:
        """End all sessions because the engine is broken: they answer their ops and close their sockets.

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
        """Serve until cancelled, or until the mailbox is closed and every session has ended."""
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
            self.maker.encoder.close()
            if self.maker.pictures is not None:
                self.maker.pictures.close()

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
                    self._fetching.fetch(session, how="free")
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

    async def _fetched(self, found: Fetched, group: TaskGroup) -> None:
        """Take up a session that the store has found, for those who may open it, then let them in."""
        session = found.session
        error: RamifyError | None = None
        try:
            match self._fetching.judge(found):
                case "ask":
                    return
                case "take up":
                    await self._take_up(session, found, group)
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
        for message in self._fetching.end(found):
            if error is not None:
                log.info("open refused", client=message.open.who, code=error.code)
                self._must_gateway.tell(OpenRefused(message.socket, error_message(error)))
            else:
                self._handle(msgspec.structs.replace(message, fetched=True), group)

    def _give_up(self, session: str) -> None:
        """Give up a session that another server waits for."""
        _, entry = self.entries.get(session, (0, None))
        if entry is not None:
            entry.actor.give_up()
        else:
            self._fetching.give_up(session)

    async def _take_up(self, session: str, found: Fetched, group: TaskGroup) -> None:
        """Make a session of what was saved. Raises Damaged, LimitExceeded."""
        head = read_head(found.items)
        identity = Identity(session, "", hashes=(head.key, head.view_key))
        terms = Terms(head.owner, head.namespace, head.priority, True, head.displaceable)
        with self._room(head.owner, self.holdings.open(head.owner)) as meter:
            made = self.maker.make(identity, meter, terms, found)
            await self.maker.fill(made, found)
            self._begin(made, group, who=None, taken_up=True)

    @contextmanager
    def _room(self, owner: str, meter: Meter) -> Iterator[Meter]:
        """Reserve what a session counts against; it is given back if the session does not begin."""
        try:
            yield meter
        except BaseException:
            self.holdings.close(owner, meter)
            raise

    def _check_open(self, message: OpenSession) -> None:
        """Raises RamifyError for an `open` that is refused whichever session it asks for."""
        opened = message.open
        if opened.model is not None and opened.model != self.maker.server.model:
            raise BadRequest(
                f"this server has the model {self.maker.server.model!r}, not {opened.model!r}: "
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
            if self.maker.store is not None and wanted not in self.entries and not message.fetched:
                self._fetching.fetch(wanted, message)
                return
            number, entry, write = self._find(wanted, opened, message.owner)
            if write and message.saves and not entry.actor.saves:
                self._refuse_unsaved()
                saver = self.maker.save_from_now(entry.actor.core, displaceable=entry.displaceable)
                entry.actor.save_with(saver)
        self._attach(message, opened, number, entry, write)

    def _attach(
        self, message: OpenSession, opened: Open, number: int, entry: _LiveSession, write: bool
    ) -> None:
        try:
            place = (message.place or 0) + 1
            to = Attach(message.socket, opened, message.ops, write, message.size, place, message.saves)
            entry.actor.attach(to)
        except MailboxFull:
            raise Overloaded("the session has too much to do", retry_ms=1000) from None
        self._must_gateway.tell(Opened(message.socket, number))

    async def _import(self, message: OpenSession, group: TaskGroup) -> None:
        """Open a new session with what a file says: checked in a thread, then made in turns."""
        try:
            identity = Identity.new(self._prefix)
            found = Fetched(identity.session, await self.maker.imported(identity, message))
            self._check_open(message)  # time has passed
            with self._room(message.owner, self._admit(message)) as meter:
                made = self.maker.make(identity, meter, Terms.of(message), found)
                await self.maker.fill(made, found)
                number, entry = self._begin(made, group, who=message.open.who)
            opened = msgspec.structs.replace(message.open, import_=None)  # it may be large
            self._attach(message, opened, number, entry, True)
        except Damaged as error:
            why = f"the file cannot be imported: {error} - at `$.import`"
            self._refuse(message, BadRequest(why))
        except BaseException as error:
            self._refuse(message, error)

    def _find(self, session: str, opened: Open, owner: str) -> tuple[int, _LiveSession, bool]:
        """Find the session and check the key: (number, session, whether it may be changed).

        Another owner than its own needs the view key; without it there seems to be no such session.
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
            raise no_session(session)
        raise Forbidden(WRONG_KEY)

    def _create(self, message: OpenSession, group: TaskGroup) -> tuple[int, _LiveSession]:
        """Make a new session. Raises LimitExceeded, and Overloaded while it could not be saved."""
        with self._room(message.owner, self._admit(message)) as meter:
            made = self.maker.make(Identity.new(self._prefix), meter, Terms.of(message))
            return self._begin(made, group, who=message.open.who)

    def _admit(self, message: OpenSession) -> Meter:
        """Reserve memory for a new session. Raises as `_create`."""
        if message.saves:
            self._refuse_unsaved()
        if message.displaceable:
            budget = self.holdings.budget(message.owner)
            for session in self._displacement.make_room(message.owner, budget, self._in_use):
                self.entries[session][1].actor.displace()
        return self.holdings.open(message.owner)

    def _refuse_unsaved(self) -> None:
        """Raises Overloaded while the store cannot be written."""
        if self._unsaved:
            raise Overloaded(
                "sessions cannot be saved now (the server's log says why): try later",
                retry_ms=FETCH_RETRY_MS,
            )

    def _in_use(self, session: str) -> bool:
        return bool(self.entries[session][1].actor.core.sockets)

    def _begin(
        self,
        made: Made,
        group: TaskGroup,
        *,
        who: str | None,
        taken_up: bool = False,
    ) -> tuple[int, _LiveSession]:
        """Begin a session: one that `who` opened, or one that was `taken_up`."""
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
            clock=self.maker.clock,
            encoder=self.maker.encoder,
            turns=self.maker.turns,
            saver=made.saver,
            working=self.maker.working,
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
        """Forget a session that has ended."""
        del self.entries[session]
        if not self.entries:
            self._deserted.set()

    def _ended(self, number: int, entry: _LiveSession, code: int, reason: str) -> None:
        """Clean up after a session that ended or crashed: free its memory, close its sockets."""
        identity, core = entry.identity, entry.actor.core
        self._leave(identity.session)
        self._displacement.drop(core.state.owner, identity.session)
        stored = core.ended in LEFT and entry.actor.saves
        self._sessions.remove(number, moved=stored or code == Close.RESTART)
        self._metrics.sessions(-1)
        entry.mailbox.close()
        for close in core.state.out.closes:  # what waits for a save is not told where that is another's
            self._must_gateway.tell(CloseSocket(*close))
        here = core.sockets
        for socket in {*here, *entry.actor.coming}:
            again = stored and socket not in here  # who comes now finds it in the store
            self._must_gateway.tell(CloseSocket(socket, Close.RESTART if again else code, reason))
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


def _relay(address: Address[Message]) -> Relay[Message]:
    relay: Relay[Message] = Relay()
    relay.connect(address)
    return relay
