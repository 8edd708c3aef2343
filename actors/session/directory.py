"""The directory: creates sessions, finds them by id and key, and cleans up after them.

A session that crashes loses its sockets (1011) and its branches, and nobody else notices. The directory
cleans up by the session's number alone, because a crashed session cannot be trusted to know its
branches. It uses relays, because these messages must arrive however full the mailboxes are. A full
mailbox of the directory means that sockets open faster than sessions can be made: the gateway answers
`overloaded`.
"""

import hmac
import itertools
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.session.actor import ENDS, SessionActor, SessionEvent, SessionMailbox
from ramify.actors.session.calls.dialects import dialect_of
from ramify.actors.session.core import FAILED, SessionCore
from ramify.actors.session.detokenizer import Detokenizer
from ramify.actors.session.displacement import Displacement
from ramify.actors.session.encoder import Encoder
from ramify.actors.session.meter import Holdings, Meter
from ramify.actors.session.replies import error_message
from ramify.actors.session.state import SessionState
from ramify.actors.session.template import ChatTemplate
from ramify.actors.session.view import Identity
from ramify.actors.tokenizer import Tokenizer
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
    GatewayMessage,
    GrammarMessage,
    Opened,
    OpenRefused,
    OpenSession,
    RequestMessage,
    SessionMessage,
    Shutdown,
)
from ramify.protocol.wire import Open, ServerInfo

RETRY_MS = 1000  # when a client may look for this server's next life
log = get_log(__name__)
Message = TypeVar("Message")


class SessionMetrics(Protocol):
    """What the directory reports."""

    def sessions(self, delta: int, /) -> None:
        """A session began (+1) or ended (-1)."""
        ...

    def watch_held(self, held: Callable[[], int], /) -> None:
        """`held()`: bytes of the host's memory that the sessions here hold now."""
        ...


class _Entry:
    """A live session."""

    def __init__(
        self,
        identity: Identity,
        mailbox: Mailbox[SessionEvent],
        actor: SessionActor,
        *,
        displaceable: bool,
    ) -> None:
        self.identity = identity
        self.mailbox = mailbox
        self.actor = actor
        self.displaceable = displaceable


class Directory:
    """The sessions of this process.

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
    ) -> None:
        self._mailbox = mailbox
        dialect = dialect_of(tokenizer.template_source, tool_parser)
        log.info("tool calls", form=dialect.name, thoughts=dialect.thought is not None)
        shown = tokenizer.showing(dialect.marks)
        self._tokenizer = shown
        self._template = ChatTemplate(shown, dialect, control=shown is not tokenizer)
        self._detokenizer = Detokenizer(shown.token_bytes)
        self._server = server
        self._context = context
        self._vocab = vocab
        self._encoder = Encoder()
        _compare(tokenizer, vocab)
        self._limits = limits
        self._ttl_s = ttl_s
        self._ttl_max_s = ttl_max_s
        self._holdings = holdings if holdings is not None else Holdings(limits)
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
        self._entries: dict[str, tuple[int, _Entry]] = {}
        self._displacement = Displacement()
        self._numbers = numbers if numbers is not None else itertools.count(1)
        self._prefix = prefix
        self._draining: Shutdown | None = None
        self._deserted = anyio.Event()  # no session is left; a new one for the next
        self._deserted.set()

    def __len__(self) -> int:
        return len(self._entries)

    async def fail(self) -> None:
        """The engine is broken: sessions answer their ops, close their sockets and end.

        Returns when none is left. New ones are refused.
        """
        self._draining = Shutdown(FAILED, RETRY_MS)
        for _, entry in self._entries.values():
            entry.actor.fail(FAILED)
        await self._deserted.wait()

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
                    for _, entry in self._entries.values():
                        entry.mailbox.close()
        finally:
            self._encoder.close()

    def _handle(self, message: DirectoryMessage, group: TaskGroup) -> None:
        match message:
            case OpenSession(socket, opened):
                try:
                    self._open(message, group)
                except RamifyError as error:
                    log.info("open refused", client=opened.who, code=error.code)
                    self._must_gateway.tell(OpenRefused(socket, error_message(error)))
                except BaseException as error:
                    if isinstance(error, ENDS):
                        raise
                    log.exception("a session could not be opened")
                    reply = error_message(RamifyError("the session could not be opened"))
                    self._must_gateway.tell(OpenRefused(socket, reply))
            case Shutdown():
                self._draining = message

    def _open(self, message: OpenSession, group: TaskGroup) -> None:
        opened = message.open
        if opened.model is not None and opened.model != self._server.model:
            raise BadRequest(
                f"this server has the model {self._server.model!r}, not {opened.model!r}: "
                "leave `model` out"
            )
        if self._draining is not None:
            raise Overloaded("the server is draining", retry_ms=self._draining.after_ms)
        if opened.session is None:
            if opened.key is not None:  # a new session instead would look like a lost history
                path = "$.key" if message.place is None else f"$[{message.place}].key"
                raise BadRequest(
                    "`key` without `session`: give both to resume, none for a new session "
                    f"- at `{path}`",
                    details={"path": path},
                )
            number, entry, write = *self._create(message, group), True
        else:
            number, entry, write = self._find(opened.session, opened, message.owner)
        try:
            place = (message.place or 0) + 1
            entry.mailbox.tell(Attach(message.socket, opened, message.ops, write, message.size, place))
        except MailboxFull:
            raise Overloaded("the session has too much to do", retry_ms=1000) from None
        self._must_gateway.tell(Opened(message.socket, number))

    def _find(self, session: str, opened: Open, owner: str) -> tuple[int, _Entry, bool]:
        """The session that the keys open. For another owner than its own, only a view key does:
        without it there seems to be no such session.
        """
        number, entry = self._entries.get(session, (0, None))
        mine = entry is not None and entry.actor.core.state.owner == owner
        if entry is not None:
            key = (opened.key or "").encode()
            if mine and hmac.compare_digest(key, entry.identity.key.encode()):
                if entry.displaceable:
                    self._displacement.use(owner, session)
                return number, entry, True
            if hmac.compare_digest(key, entry.identity.view_key.encode()):
                return number, entry, False
        if entry is None or not mine:
            raise NoSession(
                f"there is no session {session!r}: it was closed, has expired, or the server restarted; "
                "open one without `session`"
            )
        raise Forbidden("the session's `key` is missing or wrong")

    def _create(self, message: OpenSession, group: TaskGroup) -> tuple[int, _Entry]:
        """A new session. Raises LimitExceeded."""
        if message.displaceable:
            budget = self._holdings.budget(message.owner)
            for session in self._displacement.make_room(message.owner, budget, self._in_use):
                self._entries[session][1].actor.displace()
        meter = self._holdings.open(message.owner)
        try:
            return self._begin(message, meter, group)
        except BaseException:
            self._holdings.close(message.owner, meter)
            raise

    def _in_use(self, session: str) -> bool:
        return bool(self._entries[session][1].actor.core.sockets)

    def _limits_of(self, message: OpenSession) -> Limits:
        if message.priority >= self._limits.priority:
            return self._limits
        return msgspec.structs.replace(self._limits, priority=message.priority)

    def _begin(self, message: OpenSession, meter: Meter, group: TaskGroup) -> tuple[int, _Entry]:
        opened = message.open
        number = next(self._numbers)
        identity = Identity(
            f"{self._prefix}{secrets.token_urlsafe(9)}",
            f"k_{secrets.token_urlsafe(18)}",
            f"v_{secrets.token_urlsafe(18)}",
        )
        mailbox: SessionMailbox[SessionEvent] = SessionMailbox(f"session {number}")
        core = SessionCore(
            identity,
            SessionState(
                number,
                context=self._context,
                vocab=self._vocab,
                limits=self._limits_of(message),
                decode=self._tokenizer.decode,
                owner=message.owner,
                namespace=message.namespace,
                meter=meter,
            ),
            self._tokenizer,
            self._template,
            self._detokenizer,
            server=self._server,
            ttl_s=self._ttl_s,
            ttl_max_s=self._ttl_max_s,
            random_seed=lambda: secrets.randbits(62),
        )
        actor = SessionActor(
            mailbox,
            core,
            cache=self._cache,
            scheduler=self._scheduler,
            grammar=self._grammar,
            gateway=self._gateway,
            clock=self._clock,
            encoder=self._encoder,
        )
        entry = _Entry(identity, mailbox, actor, displaceable=message.displaceable)
        with ExitStack() as undo:
            undo.callback(self._leave, identity.session)
            self._entries[identity.session] = (number, entry)
            if self._deserted.is_set():
                self._deserted = anyio.Event()
            self._sessions.add(number, mailbox)
            undo.callback(self._sessions.remove, number)
            self._metrics.sessions(1)
            undo.callback(self._metrics.sessions, -1)
            whose: dict[str, Any] = {"owner": message.owner} if message.owner else {}
            log.info("session opened", session=identity.session, client=opened.who, **whose)
            group.start_soon(actor.live, partial(self._ended, number, entry))
            undo.pop_all()
        if message.displaceable:
            self._displacement.use(message.owner, identity.session)
        return number, entry

    def _leave(self, session: str) -> None:
        """There is no such session any more."""
        del self._entries[session]
        if not self._entries:
            self._deserted.set()

    def _ended(self, number: int, entry: _Entry, code: int, reason: str) -> None:
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
        self._holdings.close(core.state.owner, core.state.meter)
        log.info("session ended", session=identity.session, reason=core.ended or "stopped")


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
