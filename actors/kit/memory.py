"""How much of the host's memory sessions hold, and how much they may: one session, a credential, all.

What a client makes a session keep is added when it is made and taken off when it goes: input and output
with their text, branches, what they carry as `meta`, ops that wait, replies that are kept or that nobody
reads. A segment that branches share counts once, until the last of them drops it
(`Held`). Numbers are estimates of what the objects take, good to a factor of two. A string takes about
its length; each object beside it some hundred bytes, so lists are counted by their entries.

New work is refused while any of the three is full. Output that is being generated cannot be refused: a
generation ends where its own session is full (`Meter.full`); no session ends another one's.

Pure. It does not know what a session does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded
from ramify.protocol.wire import Delta, Done, Ok, ServerMessage

SEGMENT = 800  # a segment and what the radix tree needs for it
TOKEN = 8  # here and in the radix tree
MARK = 110  # of an output segment: a text and a number
LOGPROB = 120  # of a token, and of each alternative
BRANCH = 1_500
SESSION = 24 << 10
MESSAGE = 600
OPENED = 4 * MESSAGE  # how a socket opened the session, while it is attached; its tools count apart
TARGET = 400  # a branch name, and the task that an op has for it
NUMBER = 40  # a number in a list
JSON = 8  # objects for each byte of JSON, at worst of what people send

SHARE = 2  # displaceable sessions have half of those that an owner may have
ALMOST = 7 / 8  # of the bytes
AT_ONCE = 4  # go for one that comes, at most: where the bound was lowered, or bytes are short
LOOKED_AT = 64  # at most, from the oldest on: those in use are passed over


@dataclass(slots=True, eq=False)
class Budget:
    """The bytes that a credential's or the process' sessions hold. `what` names them in errors."""

    what: str
    advice: str
    most: int
    most_sessions: int
    held: int = 0
    sessions: int = 0

    def require(self, more: int) -> None:
        """Raises LimitExceeded if there is no room for `more` bytes."""
        if self.held + more > self.most:
            raise LimitExceeded(
                f"{self.what} hold {self.held} bytes, and {more} more pass the limit of {self.most}: "
                f"{self.advice}",
                details={"max": self.most, "held": self.held},
            )

    def require_session(self) -> None:
        """Raises LimitExceeded if there is no room for one more."""
        if self.sessions >= self.most_sessions:
            raise LimitExceeded(
                f"{self.what} are {self.sessions}, the most there may be: {self.advice}",
                details={"max": self.most_sessions},
            )
        self.require(SESSION)


class Meter:
    """The bytes that one session holds; they count for its credential and for the process too."""

    __slots__ = ("_owner", "_process", "full", "held", "most")

    def __init__(self, most: int, owner: Budget, process: Budget) -> None:
        self.most = most
        self.held = 0
        self.full = False  # whether it holds more than it may: asked for with each token
        self._owner = owner
        self._process = process

    def add(self, count: int) -> None:
        """`count` bytes more; negative: less. O(1)."""
        owner, process = self._owner, self._process
        # One statement: whatever goes wrong around it, the three agree.
        self.held, owner.held, process.held = (
            self.held + count,
            owner.held + count,
            process.held + count,
        )
        self.full = self.held > self.most

    def require(self, more: int = 0) -> None:
        """Raises LimitExceeded if there is no room for `more` bytes."""
        if self.held + more > self.most:
            raise LimitExceeded(
                f"the session holds {self.held} bytes, and {more} more pass its limit of {self.most}: "
                "drop branches, roll back, or wait for replies and read them",
                details={"max": self.most, "held": self.held},
            )
        for budget in (self._owner, self._process):
            if budget.held + more > budget.most:
                budget.require(more)

    def close(self) -> None:
        """The session has ended: nothing of it counts any more."""
        self.add(-self.held)
        self._owner = self._process = Budget("", "", 0, 0)


class Holdings:
    """The budgets of one process: its own (`sessions`, `most` bytes), and each credential's while it has
    sessions.

    Sessions of nobody (a server without tokens) have the process' budget alone.
    """

    def __init__(self, limits: Limits, *, sessions: int = 1 << 20, most: int = 1 << 40) -> None:
        self.process = Budget(
            "the server's sessions",
            "close sessions, or try again later",
            most,
            sessions,
        )
        self._limits = limits
        self._owners: dict[str, Budget] = {}

    @property
    def held(self) -> int:
        """Bytes of all sessions."""
        return self.process.held

    def budget(self, owner: str) -> Budget:
        """Of one credential; a new one where it has no session."""
        return self._owners.get(owner) or Budget(
            "this client's sessions",
            "close some of them, or drop branches there",
            self._limits.client_bytes if owner else self.process.most,
            self._limits.client_sessions if owner else self.process.most_sessions,
        )

    def open(self, owner: str) -> Meter:
        """A new session's meter. Raises LimitExceeded."""
        budget = self.budget(owner)
        budget.require_session()
        self.process.require_session()
        self._owners[owner] = budget
        meter = Meter(self._limits.session_bytes, budget, self.process)
        budget.sessions += 1
        self.process.sessions += 1
        meter.add(SESSION)
        return meter

    def close(self, owner: str, meter: Meter) -> None:
        """A session has ended."""
        meter.close()
        budget = self._owners[owner]
        budget.sessions -= 1
        self.process.sessions -= 1
        if not budget.sessions:
            del self._owners[owner]


class Held:
    """An object that several branches may share. It counts once, until it is freed."""

    __slots__ = ("_bytes", "_meter")

    def charge(self, meter: Meter | None, count: int) -> None:
        """Count `count` bytes, from now until this object is gone. `meter`: None counts nothing."""
        self._bytes = 0
        self._meter = meter
        self.grow(count)

    def grow(self, count: int) -> None:
        """`count` bytes more."""
        try:  # with each token of an output
            meter = self._meter
        except AttributeError:  # nobody counts it yet
            return
        if meter is not None:
            self._bytes += count
            meter.add(count)

    @property
    def meter(self) -> Meter | None:
        """The owner of these bytes."""
        return getattr(self, "_meter", None)

    def __del__(self) -> None:
        meter: Meter | None = getattr(self, "_meter", None)
        if meter is not None:
            meter.add(-self._bytes)


def json_size(value: Any) -> int:
    """As JSON, on the wire."""
    return len(msgspec.json.encode(value)) if value else 0


def json_bytes(value: Any) -> int:
    """Of a value that came as JSON."""
    return JSON * len(msgspec.json.encode(value)) if value else 0


def reply_bytes(message: ServerMessage) -> int:
    """Of a reply that is kept, or waits for a socket."""
    match message:
        case Done():
            told = len(message.text or "") + len(message.content or "") + len(message.reasoning or "")
            told += sum(map(len, message.notes or ()))
            size = 2 * MESSAGE + told + json_bytes(message.tool_calls)
            return size + NUMBER * len(message.scores or ())
        case Delta():
            return MESSAGE + len(message.text) + NUMBER * len(message.tokens or ())
        case Ok():
            return MESSAGE + json_bytes(message.result)
        case _:
            return MESSAGE


class Displacement:
    """Sessions that make room for newer ones: those of stored responses, which nobody closes.

    By owner, longest unused first. Where they are half of the owner's sessions, or its sessions are
    almost out of bytes, a new one displaces the oldest.
    """

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[str, None]] = {}

    def count(self, owner: str) -> int:
        """How many there are."""
        return len(self._by_owner.get(owner, ()))

    def use(self, owner: str, session: str) -> None:
        """Note a use: the owner's other sessions are older now."""
        sessions = self._by_owner.setdefault(owner, {})
        sessions.pop(session, None)
        sessions[session] = None

    def drop(self, owner: str, session: str) -> None:
        """Forget a session that has ended."""
        sessions = self._by_owner.get(owner)
        if sessions is not None:
            sessions.pop(session, None)
            if not sessions:
                del self._by_owner[owner]

    def make_room(self, owner: str, budget: Budget, in_use: Callable[[str], bool]) -> Iterator[str]:
        """Take out, and name, the sessions that have to go before another one begins."""
        most = max(1, budget.most_sessions // SHARE)
        sessions = self._by_owner.get(owner, {})
        much = budget.held > ALMOST * budget.most
        over = max(len(sessions) + 1 - most, 1 if much else 0)
        old = [name for _, name in zip(range(LOOKED_AT), sessions, strict=False) if not in_use(name)]
        for name in old[: min(over, AT_ONCE)]:
            self.drop(owner, name)
            yield name
