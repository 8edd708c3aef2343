"""The client half of `ramify.v1`, without sockets or tasks: server messages in, frames out.

The shell (`connect.py`) feeds it what it reads and sends what `next_frame` gives. One object lives
as long as the session, over as many connections as it takes:

    CLOSED --connected(), state--> OPEN --disconnected()--> CLOSED ... ENDED

Ops get their ids when they are first sent, so ids rise in the order of sending; an op without a
terminal reply is sent again, same id, after every resume, and the server runs it once. This file
does not know the time, what runs on a branch besides its own ops, or who waits for a reply.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import cast

import msgspec

from ramify.clients.errors import Internal, SessionLost, from_done, from_message
from ramify.clients.events import (
    Changed,
    ConnectionRefused,
    CoreEvent,
    Foreign,
    Noted,
    SessionEnded,
    SessionOpened,
)
from ramify.clients.heads import Heads
from ramify.clients.reconnect import Action, Verdict, after_close
from ramify.clients.stream import Stream, Ticket
from ramify.protocol.codec import Codec
from ramify.protocol.errors import BadRequest, Conflict, LimitExceeded, RamifyError
from ramify.protocol.wire import (
    BranchState,
    Bye,
    Cancel,
    ClientMessage,
    CloseSession,
    Credit,
    Delta,
    Done,
    Error,
    Event,
    Fork,
    Generate,
    Ok,
    Op,
    Open,
    Pong,
    Prune,
    ServerInfo,
    ServerMessage,
    Set,
    StateReply,
)

_JSON = Codec("json")
_LONGEST_ID = 2**53 - 1  # an op's id is not known when the size of its frame is checked


class SessionPhase(Enum):
    """The state of the connection."""

    CLOSED = "closed"
    OPEN = "open"
    ENDED = "ended"


class ClientCore:
    """The state machine. `settings`: the `open` message of the first connection."""

    def __init__(self, settings: Open) -> None:
        self.settings = settings
        self.client = settings.who
        self.session: str | None = settings.session
        self.key: str | None = settings.key
        self.view_key: str | None = None
        self.tool_names: list[str] = []  # of those in force, as the server says
        self.notes: list[str] = []  # of the server, on how the session was opened
        self.token: str | None = settings.token
        self.server: ServerInfo | None = None
        self.limits: dict[str, int] = {}
        self.keeping: tuple[float | None, str | None] = None, None
        self.heads = Heads(settings.revision)
        self.phase = SessionPhase.CLOSED
        self.error: RamifyError | None = None  # why it ended
        self.known = False  # a `state` was received: the next one is a resume
        self._next_id = 1
        self._queue: deque[list[Ticket]] = deque()  # frames that were not sent yet
        self._urgent: deque[list[Ticket]] = deque()
        self._again: deque[list[Ticket]] = deque()  # frames to send again
        self._sent: dict[int, Ticket] = {}  # by op id, in the order of ids
        self._running: dict[str, list[tuple[Ticket, Stream]]] = {}  # by branch, in the order of ids
        self._credits: dict[str, int] = {}
        self._posts: deque[Credit] = deque()
        self._guessed: set[str] = set()

    # --- the connection ---------------------------------------------------------------------

    def connected(self) -> list[ClientMessage]:
        """Note that a connection was made. Returns the frame to send first."""
        have = self.settings.have
        if self.known:
            unborn = self._unborn()
            have = self.heads.have() | dict.fromkeys(unborn, 0)
            self._guessed = unborn | self._moving()
        return [
            msgspec.structs.replace(
                self.settings,
                session=self.session,
                key=self.key,
                token=self.token,
                have=have,
                revision=self.heads.revision,
                import_=None if self.known else self.settings.import_,
            )
        ]

    def _unborn(self) -> set[str]:
        """Find the branches that ops without a reply make: the server may have made them already.

        Text may be waiting on them. Nothing of them was received, so the resume starts at 0, and
        `started_at` and `usage.prompt` tell a generation's text from what was inherited.
        """
        made: set[str] = set()
        for ticket in self._sent.values():
            if isinstance(ticket.op, Fork) or (isinstance(ticket.op, Generate) and ticket.op.as_):
                made.update(ticket.op.as_ or ())
            elif isinstance(ticket.op, Set) and ticket.op.name is not None:
                made.add(ticket.op.name)
        return (made | self._moving()) - self.heads.by_name.keys()

    def _moving(self) -> set[str]:
        """Find the branches that a prune without a reply moves to where a winner is, if it has run."""
        prunes = (ticket.op for ticket in self._sent.values() if isinstance(ticket.op, Prune))
        return {name for op in prunes for name in op.targets}

    def disconnected(self, code: int | None, reason: str = "") -> tuple[Verdict, list[CoreEvent]]:
        """Note that the connection ended with a close code (None: without one). Returns what to do now.

        On STOP the session is over; the caller calls `end` with the verdict's error.
        """
        verdict = after_close(code, reason)
        if self.phase is SessionPhase.ENDED:
            return Verdict(Action.STOP, self.error or verdict.error), []
        self.phase = SessionPhase.CLOSED
        return verdict, self._drop_biggest(verdict.error) if verdict.action is Action.SPLIT else []

    def _drop_biggest(self, cause: RamifyError) -> list[CoreEvent]:
        """Fail the biggest frame: it is too big for the path to the server, and would loop for ever."""
        frames = {id(ticket.frame): ticket.frame for ticket in self._sent.values()}
        sizes = {key: sum(_size(ticket.op) for ticket in frame) for key, frame in frames.items()}
        if not sizes:
            return []
        frame = frames[max(sizes, key=lambda key: sizes[key])]
        error = LimitExceeded(f"{cause.message}: send it in smaller pieces", details=cause.details)
        for ticket in frame:
            self._fail(ticket, error)
        return [Changed(ticket) for ticket in frame]

    def end(self, error: RamifyError) -> list[CoreEvent]:
        """End the session here: fail every op that has no reply."""
        if self.phase is SessionPhase.ENDED:
            return []
        self.phase, self.error = SessionPhase.ENDED, error
        waiting = [*self._sent.values()]
        for frames in (self._urgent, self._queue):
            waiting += [ticket for frame in frames for ticket in frame]
        for ticket in waiting:
            self._fail(ticket, error)
        return [*(Changed(ticket) for ticket in waiting), SessionEnded(error)]

    # --- sending ------------------------------------------------------------------------------

    def submit(self, ops: Sequence[Op]) -> list[Ticket]:
        """Queue one frame of ops, whose `id` fields are filled in when it is sent.

        Raises BadRequest that names the field (a client checks what the server would),
        LimitExceeded for a frame over `limits`, or the error that ended the session.
        """
        if self.error is not None:
            raise self.error
        if not ops:
            raise BadRequest("a frame needs at least one op")
        data = _JSON.encode([_with_id(op, _LONGEST_ID) for op in ops])
        _JSON.decode_client(data)
        self._check("ops_per_frame", len(ops), "ops in a frame: send several frames")
        self._check("frame_bytes", len(data), "bytes in a frame: append in several pieces")
        frame: list[Ticket] = []
        frame.extend(Ticket(op, frame) for op in ops)
        urgent = all(isinstance(op, Cancel | CloseSession) for op in ops)
        (self._urgent if urgent else self._queue).append(frame)
        return list(frame)

    def _check(self, limit: str, value: int, what: str) -> None:
        most = self.limits.get(limit)
        if most is not None and value > most:
            raise LimitExceeded(f"{value} {what}; the server takes {most}", details={"max": most})

    def credit(self, branch: str, upto: int) -> None:
        """Let the server deliver `branch` up to position `upto`; repeated after a resume."""
        self._credits[branch] = upto
        self._posts.append(Credit(branch=branch, upto=upto))

    def next_frame(self) -> list[ClientMessage] | None:
        """Take the next frame to send now; None if there is none or too many ops wait for a reply.

        At most `limits.replies_kept` ops are under way: the server keeps that many replies, so
        after a resume none is missing. `cancel` and `close` pass.
        """
        if self.phase is not SessionPhase.OPEN:
            return None
        if self._posts:
            posts: list[ClientMessage] = list(self._posts)
            self._posts.clear()
            return posts
        if self._again:
            again = [t for t in self._again.popleft() if t.id in self._sent]
            return [_numbered(ticket) for ticket in again] or self.next_frame()
        if self._urgent:
            return self._number(self._urgent.popleft())
        if not self._queue:
            return None
        most = min(self.limits.get(name, 256) for name in ("ops_in_flight", "replies_kept"))
        if self._sent and len(self._sent) + len(self._queue[0]) > most:
            return None
        return self._number(self._queue.popleft())

    def _number(self, frame: list[Ticket]) -> list[ClientMessage]:
        for ticket in frame:
            ticket.id = self._next_id
            self._next_id += 1
            self._sent[ticket.id] = ticket
            for name, stream in ticket.streams.items():
                self._running.setdefault(name, []).append((ticket, stream))
        return [_numbered(ticket) for ticket in frame]

    def withdraw(self, ticket: Ticket, error: RamifyError) -> bool:
        """Take back an op that was not sent yet, with the rest of its frame; True if it was so."""
        if ticket.frame not in self._queue:
            return False
        self._queue.remove(ticket.frame)
        for each in ticket.frame:
            self._fail(each, error)
        return True

    # --- receiving ----------------------------------------------------------------------------

    def receive(self, message: ServerMessage) -> list[CoreEvent]:
        """Take one message of the server. Raises Internal if it breaks the protocol."""
        if self.phase is SessionPhase.ENDED:
            return []
        if not (self.phase is SessionPhase.OPEN or isinstance(message, StateReply | Error | Bye | Pong)):
            raise Internal(f"the server sent {type(message).__name__.lower()!r} before `state`")
        match message:
            case Delta():
                return self._text(message)
            case StateReply(id=None):
                return self._attached(message)
            case StateReply() | Ok() | Done():
                return self._reply(message)
            case Error():
                return self._failed(message)
            case Event():
                return self._noted(message)
            case Bye():
                return [Noted(message)]
            case Pong():
                return []

    def _attached(self, state: StateReply) -> list[CoreEvent]:
        resumed = self.known
        if resumed and state.session != self.session:
            return self.end(SessionLost("the server answered with another session; this one is gone"))
        self.session = state.session
        self.key = state.key or self.key
        self.view_key = state.view_key or self.view_key
        self.tool_names = state.tools or []
        self.notes = state.notes or []
        self.server = state.server or self.server
        self.limits = state.limits or self.limits
        self.keeping = state.ttl_s, state.persist
        self._next_id = max(self._next_id, state.op + 1)
        self.known = True
        self.phase = SessionPhase.OPEN
        self.heads.attached(state.branches, state.revision, self._guessed)
        for branch in state.branches:
            if branch.branch in self._guessed:
                self._place(branch, state.op)
        self._again = deque(self._frames(self._sent.values()))
        for ticket in self._sent.values():
            ticket.resumed = True
        self._posts = deque(Credit(branch=name, upto=upto) for name, upto in self._credits.items())
        return [SessionOpened(state, resumed)]

    def _place(self, branch: BranchState, seen: int) -> None:
        """Note where generations start on a branch whose text includes inherited text."""
        for ticket, stream in self._running.get(branch.branch, ()):
            assert ticket.id is not None
            if ticket.id > seen:
                stream.begin_at(branch.position)
            elif ticket.id == branch.running and branch.started_at is not None:
                stream.begin_at(branch.started_at)
            else:
                stream.held = True  # it has ended: `done` will tell

    def _frames(self, tickets: Iterable[Ticket]) -> list[list[Ticket]]:
        """Group tickets by the frames they were sent in."""
        frames: dict[int, list[Ticket]] = {}
        for ticket in tickets:
            frames.setdefault(id(ticket.frame), []).append(ticket)
        return list(frames.values())

    def _text(self, delta: Delta) -> list[CoreEvent]:
        head = self.heads.get(delta.branch)
        head.received = delta.position
        head.position = max(head.position, delta.position)  # after a resume `state` knew it already
        for ticket, stream in self._running.get(delta.branch, ()):
            # Cut back or not, what comes now is its text; if it had ended and was rolled back while
            # this client was away, its `done` is sent again and carries the whole text.
            stream.add(delta)
            return [Changed(ticket)]
        return [Foreign(delta)]

    def _reply(self, message: Ok | Done | StateReply) -> list[CoreEvent]:
        branch = message.branch if isinstance(message, Ok | Done) else None
        ticket = self._sent.get(message.id) if message.id is not None else None
        if ticket is None or not ticket.owes(branch):
            return []  # a stored reply that was received before
        ticket.replies.append(message)
        events: list[CoreEvent] = [Changed(ticket)]
        if isinstance(message, Done):
            events += self._finish(ticket, message)
        elif ticket.streams:
            raise Internal(f"op {message.id} generates: only `done` or `error` answers it")
        elif isinstance(message, Ok):
            self.heads.applied(ticket.op, message)
        ticket.settle(branch)
        self._forget(ticket)
        return events

    def _finish(self, ticket: Ticket, done: Done) -> list[CoreEvent]:
        stream = ticket.streams.get(done.branch)
        if stream is None:
            raise Internal(
                f"op {done.id} got `done` for branch {done.branch!r}, which it does not target"
            )
        self.heads.ended(done)
        running = self._running.get(done.branch, [])
        later = running[running.index((ticket, stream)) + 1 :]
        over = stream.finish(done, done.text)
        error = from_done(done)
        hidden = isinstance(ticket.op, Generate) and ticket.op.hidden
        if error is None and done.text is None and not hidden and _lacks(ticket, stream, done):
            error = Conflict(
                "the branch was cut back, renamed or dropped before this text was delivered",
                details={"branch": done.branch, "text": stream.text},
            )
        if error is not None:
            stream.fail(error)
            ticket.error = ticket.error or error
        if not over or not later:
            return []
        later[0][1].parts.extend(over)
        return [Changed(later[0][0])]

    def _failed(self, message: Error) -> list[CoreEvent]:
        error = from_message(message)
        if self.phase is not SessionPhase.OPEN and message.id is None:
            if message.code == "no_session" and self.known:
                return self.end(
                    SessionLost(f"{message.message}. Its branches are gone", details=message.details)
                )
            return [ConnectionRefused(error, message.code in ("overloaded", "limit", "internal"))]
        ticket = self._sent.get(message.id) if message.id is not None else None
        if ticket is None:
            return [Noted(message)] if message.id is None else []
        if not ticket.owes(message.branch):
            return []
        if message.code == "skipped":
            error.__cause__ = next((t.error for t in ticket.frame if t.error is not None), None)
        for name, stream in ticket.streams.items():
            if message.branch in (None, name) and not stream.settled:
                self._disown(ticket, stream)
        self._fail(ticket, error, message.branch)
        return [Changed(ticket)]

    def _noted(self, event: Event) -> list[CoreEvent]:
        position = self.heads.noted(event)
        if event.op == "generate" and event.branch is not None and position is not None:
            for _, stream in self._running.get(event.branch, ())[:1]:
                stream.begin_at(position)  # the text so far was another client's
        return [Noted(event)]

    def _disown(self, ticket: Ticket, stream: Stream) -> None:
        """Take the text from a generation that ended with `error`: it is what its branch inherited.

        After a resume it comes with the branch's whole text; or it is a later generation's.
        """
        over = stream.cut_back(0)
        running = self._running.get(stream.branch, [])
        for _, later in running[running.index((ticket, stream)) + 1 :][:1]:
            later.parts.extend(over)

    def _fail(self, ticket: Ticket, error: RamifyError, branch: str | None = None) -> None:
        ticket.fail(error, branch)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """Drop what is settled from the tables."""
        for name, stream in ticket.streams.items():
            running = self._running.get(name)
            if running is not None and stream.settled:
                running[:] = [entry for entry in running if entry[1] is not stream]
                if not running:
                    del self._running[name]
        if ticket.settled and ticket.id is not None:
            self._sent.pop(ticket.id, None)


def _lacks(ticket: Ticket, stream: Stream, done: Done) -> bool:
    """Whether text was lost with a connection: its branch was gone before the resume.

    The token that stops a generation need not be announced; after a stop string the count of
    sampled tokens says nothing.
    """
    if not ticket.resumed or isinstance(done.stop, str) or not done.usage.output:
        return False
    announced = done.usage.output - (done.reason in ("stop", "tool"))
    return stream.end < done.usage.prompt + announced


def _numbered(ticket: Ticket) -> ClientMessage:
    assert ticket.id is not None
    return _with_id(ticket.op, ticket.id)


def _with_id(op: Op, ident: int) -> ClientMessage:
    return as_message(msgspec.structs.replace(op, id=ident))


def _size(op: Op) -> int:
    return len(_JSON.encode([as_message(op)]))


def as_message(op: Op) -> ClientMessage:
    """Return the op as a client message, which it is: the type checker cannot see that."""
    return cast(ClientMessage, op)
