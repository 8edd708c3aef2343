"""At which replica each session is, and what it says meanwhile at none. Pure.

A session is placed with its first request, when it is known what there is to compute. Until then what
it says can wait here, unless it is very much: nothing but a request needs a replica. When its replica
goes, the session is *lost*: what it says is meant for a cache that is not there any more, until it says
`Reopen` and tells of its branches anew.
"""

from collections.abc import Callable

from ramify.actors.front.core_messages import ForCore, FromCore
from ramify.actors.kit.mailbox import MailboxFull
from ramify.actors.routing.session_router import SessionRouter
from ramify.protocol.cluster import ListenKv, UnlistenKv
from ramify.protocol.messages import (
    Abandon,
    AbandonSession,
    CancelRequest,
    CancelSession,
    ChangeCore,
    Compile,
    DropBranches,
    DropSessions,
    ExtendBranch,
    Finished,
    ForkBranch,
    Inspect,
    Inspected,
    MoveBranch,
    OpenBranch,
    RenewPool,
    Reopen,
    RetainBranches,
    Settle,
    Submit,
    session_of,
)

MOST_FOLLOWED = 512  # messages in which the prompt of a request is looked for
HELD = 8192  # messages of a session that is at no replica: more than it has branches
MANY, MUCH = HELD // 2, 4 << 20  # so many messages, or bytes of tokens, are placed without a request


class _Session:
    """`running`: requests at its replica. `held`: what it said while it was at none."""

    __slots__ = ("bytes", "held", "lost", "namespace", "replica", "running")

    def __init__(self) -> None:
        self.replica: int | None = None
        self.lost = False
        self.running = 0
        self.namespace = ""
        self.held: list[ForCore] = []
        self.bytes = 0  # of tokens that are held


class Bindings:
    """`send(replica, message)` raises MailboxFull, and then nothing has happened; `must` never does.

    `answer(session, message)` tells a session.
    """

    def __init__(
        self,
        routing: SessionRouter,
        send: Callable[[int, ForCore], None],
        must: Callable[[int, ForCore], None],
        answer: Callable[[int, FromCore], None],
    ) -> None:
        self._routing = routing
        self._send = send
        self._must = must
        self._answer = answer
        self._sessions: dict[int, _Session] = {}
        self._at: dict[int, dict[int, None]] = {}  # replica -> its sessions
        self._unplaced: dict[int, None] = {}  # have tokens, but there was no replica

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def unplaced(self) -> int:
        """Sessions that wait for a replica."""
        return len(self._unplaced)

    def at(self, replica: int) -> list[int]:
        """The sessions of a replica; those first in which something runs."""
        sessions = self._at.get(replica, {})
        return sorted(sessions, key=lambda session: not self._sessions[session].running)

    def count(self, replica: int) -> int:
        """How many sessions a replica has."""
        return len(self._at.get(replica, ()))

    def of(self, session: int) -> int | None:
        """The replica of a session."""
        entry = self._sessions.get(session)
        return entry.replica if entry is not None else None

    # --- what sessions say -----------------------------------------------------------------------

    def tell(self, message: ForCore) -> None:
        """Hand a message to the replica of its session. Raises MailboxFull: nothing has happened."""
        if isinstance(message, DropSessions):
            for session in message.sessions:
                self._drop(session)
            return
        session = session_in(message)
        entry = self._sessions.get(session)
        if entry is None:
            if isinstance(
                message, CancelSession | AbandonSession | CancelRequest | Abandon | DropBranches
            ):
                return  # it is over, and was forgotten everywhere
            entry = self._sessions[session] = _Session()
        if isinstance(message, Reopen):
            self._leave(session, entry)
            entry.lost = False
        elif entry.lost:
            return
        elif entry.replica is not None:
            if isinstance(message, Submit):
                if not entry.running and self._routing.hot(session, entry.replica):
                    self._leave(session, entry)
                    entry.lost = True
                    self._answer(session, ChangeCore())
                    return
                self._send(entry.replica, message)
                self._submitted(session, entry, message)
                return
            self._send(entry.replica, message)
            if isinstance(message, ExtendBranch):
                self._routing.extended(session, len(message.tokens) // 4)
        elif isinstance(message, Inspect):
            if message.leases or message.demote:  # to be done where it will be
                self._hold(session, entry, message)
            self._answer(session, Inspected(message.id, [0] * len(message.branches)))
        else:
            self._hold(session, entry, message)

    def _hold(self, session: int, entry: _Session, message: ForCore) -> None:
        if len(entry.held) >= HELD:
            raise MailboxFull(f"{HELD} messages of the session wait for a replica")
        entry.held.append(message)
        if isinstance(message, ExtendBranch):
            entry.bytes += len(message.tokens)
        much = len(entry.held) >= MANY or entry.bytes >= MUCH
        if (much or isinstance(message, Submit | Compile)) and session not in self._unplaced:
            self._place(session, entry)

    def place(self) -> None:
        """There may be a replica now: place the sessions that wait for one."""
        for session in list(self._unplaced):
            self._place(session, self._sessions[session])

    def _place(self, session: int, entry: _Session) -> None:
        """Find a replica and tell it all. If there is none, or it is full, that is tried again."""
        replica = self._routing.place(session, *prompt(entry.held))
        if replica is None:
            self._unplaced[session] = None
            return
        try:
            self._send(replica, entry.held[0])
        except MailboxFull:
            self._unplaced[session] = None
            self._routing.left(session)
            return
        self._unplaced.pop(session, None)
        entry.replica = replica
        self._at.setdefault(replica, {})[session] = None
        held, entry.held, entry.bytes = entry.held, [], 0
        for message in held[1:]:
            self._must(replica, message)
            if isinstance(message, Submit):
                self._submitted(session, entry, message)

    def _submitted(self, session: int, entry: _Session, message: Submit) -> None:
        assert entry.replica is not None
        entry.running += 1
        self._routing.submitted(session, entry.replica, message)

    def _drop(self, session: int) -> None:
        """The session is over."""
        entry = self._sessions.pop(session, None)
        if entry is not None:
            self._leave(session, entry)

    def _leave(self, session: int, entry: _Session) -> None:
        """It is at no replica from now on; the one where it was forgets it."""
        self._unplaced.pop(session, None)
        entry.held, entry.bytes = [], 0
        entry.running = 0
        replica, entry.replica = entry.replica, None
        if replica is None:
            return
        del self._at[replica][session]
        self._routing.left(session)
        self._must(replica, CancelSession(session))
        self._must(replica, AbandonSession(session))
        self._must(replica, DropSessions([session]))

    # --- what replicas say -----------------------------------------------------------------------

    def hears(self, session: int, replica: int) -> bool:
        """Whether a session is to be told what a replica says: it may have left meanwhile."""
        entry = self._sessions.get(session)
        return entry is not None and entry.replica == replica

    def finished(self, session: int, finished: list[Finished]) -> None:
        """Requests of a session that hears of it have ended."""
        entry = self._sessions[session]
        entry.running = max(0, entry.running - len(finished))
        self._routing.finished(finished)

    def busy(self, replica: int) -> set[int]:
        """The sessions of a replica in which something runs."""
        return {session for session in self._at.get(replica, ()) if self._sessions[session].running}

    def gone(self, replica: int) -> list[int]:
        """A replica is gone: its sessions, which have to move."""
        sessions = self.at(replica)
        for session in sessions:
            entry = self._sessions[session]
            entry.replica, entry.lost, entry.running = None, True, 0
            self._routing.left(session)
        self._at.pop(replica, None)
        return sessions


def prompt(held: list[ForCore]) -> tuple[str, bytes]:
    """The namespace and the tokens of the branch of the first request among these messages.

    A constraint comes before its request: then it is the longest branch. Of very many messages it is
    what came first: that is where forks begin.
    """
    namespace = next((m.namespace for m in held if isinstance(m, OpenBranch)), "")
    if len(held) > MOST_FOLLOWED:
        return namespace, next((m.tokens for m in held if isinstance(m, ExtendBranch)), b"")
    tokens: dict[int, bytes] = {}
    for message in held:
        match message:
            case ExtendBranch(branch, more):
                tokens[branch] = tokens.get(branch, b"") + more
            case ForkBranch(branch, children, at):
                tokens.update(dict.fromkeys(children, tokens.get(branch, b"")[: 4 * at]))
            case MoveBranch(branch, to):
                tokens[branch] = tokens.get(branch, b"")[: 4 * to]
            case Submit():
                return namespace, tokens.get(message.branch, b"")
            case _:
                pass
    return namespace, max(tokens.values(), key=len, default=b"")


def session_in(message: ForCore) -> int:
    """The session that a message is about."""
    match message:
        case Submit() | CancelRequest() | Compile() | Abandon():
            return session_of(message.request)
        case CancelSession() | AbandonSession() | Reopen() | Inspect():
            return message.session
        case RetainBranches(until):
            return session_of(next(iter(until)))
        case DropBranches(branches):
            return session_of(branches[0])
        case DropSessions() | Settle() | RenewPool() | ListenKv() | UnlistenKv():
            raise ValueError(f"a {type(message).__name__} is of no one session")
        case _:
            return session_of(message.branch)
