"""At which replica each session is, and what it says meanwhile at none. Pure.

A session is placed with its first request, when it is known what there is to compute. Until then what
it says can wait here, unless it is very much: nothing but a request needs a replica. When its replica
goes, the session is *lost*: what it says is meant for a cache that is not there any more, until it says
`Reopen` and tells of its branches anew.

A session that leaves a replica which lives keeps its handles there until its KV has moved (`moves.py`).
Meanwhile what it says is held, but for what made its branches. A held request can be cancelled here.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial

from ramify.actors.cluster.moves import KvMoves
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
    CompareResult,
    Compile,
    DiskResult,
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
    Tokens,
    session_of,
)

MOST_FOLLOWED = 512  # messages in which the prompt of a request is looked for
HELD = 8192  # messages of a session that is at no replica: more than it has branches
MANY, MUCH = HELD // 2, 4 << 20  # so many messages, or bytes of tokens, are placed without a request


@dataclass(slots=True, eq=False, repr=False)
class _Session:
    """`running`: requests at its replica. `held`: what it said while it was at none, or its KV moves.
    `wanted`: the requests in it that were not cancelled. `source`: the replica that it has left and
    that has its handles still. `begun`: requests with a token, at a replica for prompts; `going`: it was
    told to leave that.
    """

    replica: int | None = None
    lost: bool = False
    running: int = 0
    begun: set[int] = field(default_factory=set)
    going: bool = False
    namespace: str = ""
    held: list[ForCore] = field(default_factory=list)
    wanted: dict[int, Submit] = field(default_factory=dict)
    bytes: int = 0  # of tokens that are held
    source: int | None = None


class Bindings:
    """`send(replica, message)` raises MailboxFull, and then nothing has happened; `must` never does.

    `answer(session, message)` tells a session. `now`: the time in seconds. `shared`: see
    `KvMoves`.
    """

    def __init__(
        self,
        routing: SessionRouter,
        send: Callable[[int, ForCore], None],
        must: Callable[[int, ForCore], None],
        answer: Callable[[int, FromCore], None],
        now: Callable[[], float] = lambda: 0.0,
        *,
        shared: bool = False,
    ) -> None:
        self._routing = routing
        self._send = send
        self._must = must
        self._answer = answer
        self._now = now
        self._sessions: dict[int, _Session] = {}
        self._at: dict[int, dict[int, None]] = {}  # replica -> its sessions
        self._unplaced: dict[int, None] = {}  # have tokens, but there was no replica
        self._leaving: dict[int, dict[int, None]] = {}  # replica -> sessions whose `source` it is
        self.moves = KvMoves(now, must, routing.rate, shared=shared)

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

    def leaving(self, replica: int) -> int:
        """How many sessions have left a replica whose KV may move yet."""
        return len(self._leaving.get(replica, ()))

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
        elif entry.replica is not None and session not in self.moves:
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
        elif isinstance(message, CancelRequest):
            if (submit := entry.wanted.pop(message.request, None)) is not None:
                self._answer(session, Tokens([], [_unbegun(submit, message, self._now())]))
        else:
            self._hold(session, entry, message)

    def _hold(self, session: int, entry: _Session, message: ForCore) -> None:
        if len(entry.held) >= HELD:
            raise MailboxFull(f"{HELD} messages of the session wait for a replica")
        entry.held.append(message)
        if isinstance(message, Submit):
            entry.wanted[message.request] = message
        if session in self.moves:
            return
        if isinstance(message, ExtendBranch):
            entry.bytes += len(message.tokens)
        much = len(entry.held) >= MANY or entry.bytes >= MUCH
        if (much or isinstance(message, Submit | Compile)) and session not in self._unplaced:
            self._place(session, entry)

    def place(self) -> None:
        """There may be a replica now: place the sessions that wait for one."""
        for session in list(self._unplaced):
            self._place(session, self._sessions[session])

    def bring(self) -> None:
        """Place sessions that have left a replica and told of their branches: their KV moves before it
        is wanted.
        """
        for session in [each for leaving in self._leaving.values() for each in leaving]:
            entry = self._sessions[session]
            if entry.replica is None and session not in self._unplaced:
                if entry.held:
                    self._place(session, entry)
                elif not entry.lost:  # it has no branches
                    self._part(session, entry)

    def _place(self, session: int, entry: _Session) -> None:
        """Find a replica and tell it all. If there is none, or it is full, that is tried again."""
        replica = self._routing.place(session, *prompt(entry.held))
        if replica is None:
            self._unplaced[session] = None
            return
        if entry.source == replica:
            self._part(session, entry)
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
        if entry.source is not None:
            at = next((i for i, each in enumerate(held) if isinstance(each, Submit)), len(held))
            if at:
                for message in held[1:at]:
                    self._must(replica, message)
                entry.held = held[at:]
                branches = [each for message in held[:at] for each in handles_in(message)]
                done = partial(self._moved, session)
                if self.moves.begin(session, entry.source, replica, branches, done):
                    return
                self._moved(session)
                return
            self._part(session, entry)
        self._tell_all(session, entry, held[1:])

    def _tell_all(self, session: int, entry: _Session, held: list[ForCore]) -> None:
        assert entry.replica is not None
        wanted, entry.wanted = entry.wanted, {}
        for message in held:
            if isinstance(message, Submit):
                if message.request not in wanted:
                    continue
                self._submitted(session, entry, message)
            self._must(entry.replica, message)

    def _moved(self, session: int) -> None:
        """Its KV has moved, as far as it does: what it wanted meanwhile is told."""
        entry = self._sessions[session]
        self._part(session, entry)
        held, entry.held, entry.bytes = entry.held, [], 0
        if entry.replica is not None:
            self._tell_all(session, entry, held)

    def _part(self, session: int, entry: _Session) -> None:
        """The replica that it has left forgets it."""
        source, entry.source = entry.source, None
        if source is not None:
            self._leaving.get(source, {}).pop(session, None)
            self._must(source, DropSessions([session]))

    def _submitted(self, session: int, entry: _Session, message: Submit) -> None:
        assert entry.replica is not None
        entry.running += 1
        self._routing.submitted(session, entry.replica, message)

    def _drop(self, session: int) -> None:
        """The session is over."""
        entry = self._sessions.get(session)
        if entry is not None:
            self._leave(session, entry, over=True)
            self._part(session, entry)
            self._routing.over(session)
            del self._sessions[session]

    def _leave(self, session: int, entry: _Session, *, over: bool = False) -> None:
        """It is at no replica from now on; the one where it was forgets it, or its KV moves first.

        `over`: it goes to no other.
        """
        entry.held, entry.wanted, entry.bytes = [], {}, 0
        moving = session in self.moves
        self.moves.end(session)
        self._unplaced.pop(session, None)
        entry.running, entry.going = 0, False
        entry.begun.clear()
        replica, entry.replica = entry.replica, None
        if replica is None:
            return
        del self._at[replica][session]
        self._routing.left(session)
        self._must(replica, CancelSession(session))
        self._must(replica, AbandonSession(session))
        if over or moving or not self.moves.gives(replica):
            self._must(replica, DropSessions([session]))
        else:
            entry.source = replica
            self._leaving.setdefault(replica, {})[session] = None

    # --- what replicas say -----------------------------------------------------------------------

    def here(self, replica: int) -> Container[int]:
        """The sessions of a replica, which are to be told what it says."""
        return self._at.get(replica, ())

    def finished(self, session: int, finished: list[Finished]) -> None:
        """Requests of a session that hears of it have ended."""
        entry = self._sessions[session]
        entry.running = max(0, entry.running - len(finished))
        self._routing.finished(finished)

    def goes_on(self, session: int, replica: int, message: Tokens) -> bool:
        """Whether a session that hears `message` is to leave a replica for prompts: all are computed."""
        entry = self._sessions[session]
        entry.begun.update(each.request for each in message.progress)
        entry.begun.difference_update(each.request for each in message.finished)
        if entry.going or len(entry.begun) < entry.running or not self._routing.goes_on(replica):
            return False
        entry.going = True
        return True

    def busy(self, replica: int) -> set[int]:
        """The sessions of a replica in which something runs."""
        return {session for session in self._at.get(replica, ()) if self._sessions[session].running}

    def gone(self, replica: int) -> list[int]:
        """A replica is gone: its sessions, which have to move."""
        self.moves.gone(replica)
        self.stay(replica)
        sessions = self.at(replica)
        for session in sessions:
            entry = self._sessions[session]
            entry.replica, entry.lost, entry.running = None, True, 0
            self._routing.left(session)
        self._at.pop(replica, None)
        return sessions

    def stay(self, replica: int) -> None:
        """No more KV moves from a replica."""
        for session in self._leaving.pop(replica, {}):
            self.moves.end(session)
            entry = self._sessions[session]
            if entry.source is not None:
                entry.source = None
                self._must(replica, DropSessions([session]))


def _unbegun(submit: Submit, cancel: CancelRequest, now: float) -> Finished:
    """The end of a request that no replica has heard of."""
    told = submit.request, cancel.reason, 0, submit.prompt, 0, 0, submit.arrived, now, 0.0, now
    return Finished(*told, spare=submit.spare)


def handles_in(message: ForCore) -> list[int]:
    """The branches that a message makes."""
    match message:
        case OpenBranch(branch):
            return [branch]
        case ForkBranch(_, children):
            return list(children)
        case _:
            return []


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
        case DiskResult() | CompareResult():
            raise ValueError(f"a {type(message).__name__} is of no one session")
        case _:
            return session_of(message.branch)
