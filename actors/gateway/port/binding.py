"""Which session a socket belongs to, and what becomes of its frames until and while it has one.

    WAITING --open--> OPENING --Opened--> ATTACHED --the session is gone--> WAITING
       ^-----------------|  the directory refused, or the session          (end: ENDED, from each)

A frame that the session's mailbox has no room for waits here, with those behind it, and the socket is
not read meanwhile. It is not refused: an op that is sent again after a resume may have run, its reply is
on its way, and two replies to one op would contradict each other. Only the session knows.

No sockets and no codecs here: frames come in decoded, refusals go back as return values. It tells
the directory and the sessions, and it is who tells `Detached`, exactly once per `Opened`.
"""

import enum
import secrets
from dataclasses import dataclass, field
from typing import cast

import msgspec

from ramify.actors.gateway.port.hub import Hub
from ramify.actors.gateway.port.intake import refuse
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.protocol.credentials import NOBODY, Credential
from ramify.protocol.errors import BadRequest, Close, LimitExceeded, NoSession, Overloaded, RamifyError
from ramify.protocol.messages import Detached, Drained, Frame, OpenSession, Throttled
from ramify.protocol.wire import ClientMessage, Error, Open, ServerMessage

PENDING_FRAMES = 16  # frames that wait for the directory before reading stops
PENDING_BYTES = 64 << 10
BUSY_RETRY_MS = 100
ANSWER_S = 60.0  # from `open` to what the session says first: a process that hangs is killed after 30


class Stage(enum.Enum):
    """The state of a binding: see the module docstring."""

    WAITING = enum.auto()
    OPENING = enum.auto()
    ATTACHED = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class SessionBinding:
    """The session side of one WebSocket.

    `credential`: whom sessions that it opens belong to. `displaceable`, `saves`,
    `binds`: see `OpenSession`.
    `open_by`: when an `open` must have come (engine seconds), None unless one is awaited. `answer_by`:
    when the session must have said something since; the binding's owner sets it to None when it has.
    """

    _hub: Hub
    _socket: int
    _session: int | None = None
    _pending: list[Frame] = field(default_factory=list)
    _pending_bytes: int = 0
    _throttled: bool = False
    _resumes: bool = False  # the directory was asked for a session that is there
    credential: Credential = NOBODY
    displaceable: bool = False
    saves: bool = True
    binds: bool = False
    open_by: float | None = None
    answer_by: float | None = None
    stage: Stage = Stage.WAITING

    def __post_init__(self) -> None:
        self._await_open()

    @property
    def congested(self) -> bool:
        """True while no more frames should be read: enough of them wait for the directory, or one waits
        for room in the session's mailbox."""
        if self.stage is Stage.ATTACHED:
            return bool(self._pending)
        return len(self._pending) >= PENDING_FRAMES or self._pending_bytes >= PENDING_BYTES

    def route(
        self, ops: list[ClientMessage], size: int, place: int | None = 0, limit: Error | None = None
    ) -> list[ServerMessage]:
        """Hand a valid frame of `size` bytes on, keep it, or refuse it: returns the refusals.

        `place`, `limit`: see `messages.Frame`.
        """
        return self._route(Frame(self._socket, ops, size, place, limit))

    def late(self, now: float) -> tuple[int, str] | None:
        """Return with which code and reason to end a socket whose `open`, or the answer to it, is late.

        None: it is not; the timer is set for then.
        """
        by = self.answer_by if self.open_by is None else self.open_by
        if by is None:
            return None
        if now < by:
            self._hub.timers.schedule(self._socket, by)
            return None
        if self.open_by is not None:
            return Close.TIMEOUT, f"no open within {self._hub.limits.open_timeout_s} s"
        return Close.RESTART, f"no session has answered within {ANSWER_S:g} s: try again"

    def _route(self, frame: Frame) -> list[ServerMessage]:
        match self.stage:
            case Stage.WAITING if frame.limit is not None:
                known = frame.limit
                error = LimitExceeded(known.message, details=known.details, retry_ms=known.retry_ms)
                return self._refuse(frame.ops, error)
            case Stage.WAITING:
                return self._open(frame.ops, frame.size, frame.place)
            case Stage.ATTACHED if not self._pending:
                return self._tell(frame)
            case Stage.ATTACHED | Stage.OPENING:
                self._wait(frame)
        return []

    def retry(self) -> list[ServerMessage]:
        """Tell the waiting frames again: the session may have room. Returns refusals."""
        return self._replay() if self.stage is Stage.ATTACHED else []

    def _wait(self, frame: Frame) -> None:
        self._pending.append(frame)
        self._pending_bytes += frame.size

    def opened(self, session: int) -> list[ServerMessage]:
        """Attach the socket to `session`, which the directory has found. Returns refusals."""
        if self.stage is not Stage.OPENING:  # it ended meanwhile
            self._hub.notices.tell(session, Detached(self._socket))
            return []
        self.stage = Stage.ATTACHED
        self._session = session
        if self._throttled:
            self._hub.notices.tell(session, Throttled(self._socket))
        return self._replay()

    def failed(self, error: Error) -> list[ServerMessage]:
        """Note that directory or session refused the socket. The client may `open` anew.

        Returns refusals: none for ops behind a resume that is to be tried again. They may have run, and
        are sent again with the next `open`.
        """
        self._session = None
        if self._resumes and error.code == "overloaded":
            while self._pending and not isinstance(self._pending[0].ops[0], Open):
                self._pending_bytes -= self._pending.pop(0).size
        self._await_open()
        return self._replay()

    def throttle(self, throttled: bool) -> None:
        """Note that the socket's write buffer is above its limit, or short again."""
        self._throttled = throttled
        if self._session is not None:
            notice = Throttled(self._socket) if throttled else Drained(self._socket)
            self._hub.notices.tell(self._session, notice)

    def end(self) -> None:
        """Detach a socket that is gone, or as good as gone. May be called again."""
        session, self._session = self._session, None
        self.stage = Stage.ENDED
        self.open_by = self.answer_by = None
        if self._pending:
            self._pending.clear()
            self._hub.blocked.discard(self._socket)
        self._pending_bytes = 0
        if session is not None:
            self._hub.notices.tell(session, Detached(self._socket))

    def _open(self, ops: list[ClientMessage], size: int, place: int | None) -> list[ServerMessage]:
        if not isinstance(ops[0], Open):
            return self._refuse(ops, BadRequest("the first message must be open"))
        if any(isinstance(op, Open) for op in ops[1:]):
            return self._refuse(ops, BadRequest("a frame can hold one open, as its first message"))
        # The secret ends here, and from here on every client has a name.
        request = msgspec.structs.replace(ops[0], token=None, client=ops[0].client or made_up_name())
        try:
            who = self.credential
            self._hub.directory.tell(
                OpenSession(
                    self._socket,
                    request,
                    ops[1:],
                    owner=who.name,
                    namespace=who.namespace,
                    priority=who.limits.priority,
                    size=size,
                    place=place,
                    displaceable=self.displaceable,
                    saves=self.saves,
                    binds=self.binds,
                )
            )
        except (MailboxFull, MailboxClosed):
            behind = "the server is behind: send the frame again later"
            return self._refuse(ops, Overloaded(behind, retry_ms=BUSY_RETRY_MS))
        self.stage = Stage.OPENING
        self._resumes = request.session is not None
        self.open_by = None
        self.answer_by = self._hub.clock.now() + ANSWER_S
        self._hub.timers.schedule(self._socket, self.answer_by)
        return []

    def _tell(self, frame: Frame) -> list[ServerMessage]:
        ops = frame.ops
        for op in ops:
            if type(op) is Open:
                return self._refuse(ops, BadRequest("this socket has a session already"))
        try:
            if self._hub.sessions.tell(cast(int, self._session), frame):
                return []
        except MailboxFull:
            self._wait(frame)
            self._hub.blocked.add(self._socket)
            return []
        if self._hub.failed or self._hub.sessions.has_moved(cast(int, self._session)):
            return []  # it goes on elsewhere, and the socket is about to be closed (1012)
        self._session = None  # it is gone, so there is nobody to tell Detached
        self._await_open()
        return self._refuse(ops, NoSession("the session has ended: open anew"))

    def _await_open(self) -> None:
        self.stage = Stage.WAITING
        self.answer_by = None
        self.open_by = self._hub.clock.now() + self._hub.limits.open_timeout_s
        self._hub.timers.schedule(self._socket, self.open_by)

    def _replay(self) -> list[ServerMessage]:
        """Take up the frames that came while the directory was busy, or the session."""
        pending, self._pending = self._pending, []
        self._pending_bytes = 0
        replies: list[ServerMessage] = []
        for frame in pending:
            replies += self._route(frame)
        return replies

    def _refuse(self, ops: list[ClientMessage], error: RamifyError) -> list[ServerMessage]:
        if isinstance(ops[0], Open) and ops[0].session is not None:
            ops = ops[:1]  # a resume: the others may have run, and are sent again with the next `open`
        return refuse(ops, error, self._hub.limits.ops_per_frame)


def made_up_name() -> str:
    """Make a name for a client without one, hard to guess: its bearer can replace the client."""
    return f"c_{secrets.token_urlsafe(9)}"
