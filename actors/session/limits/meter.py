"""How much of the host's memory sessions hold, and how much they may: one session, a credential, all.

What a client makes a session keep is added when it is made and taken off when it goes: input and output
with their text, branches, what they carry as `meta`, ops that wait, replies that are kept or that nobody
reads. A segment that branches share counts once, until the last of them drops it
(`Held`). Numbers are estimates of what the objects take, good to a factor of two.

New work is refused while any of the three is full. Output that is being generated cannot be refused: a
generation ends where its own session is full (`Meter.full`); no session ends another one's.

Pure. It does not know what a session does.
"""

from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded

SEGMENT = 800  # a segment and what the radix tree needs for it
TOKEN = 8  # here and in the radix tree
MARK = 110  # of an output segment: a text and a number
LOGPROB = 120  # of a token, and of each alternative
BRANCH = 1_500
SESSION = 24 << 10


class Budget:
    """The bytes that a credential's or the process' sessions hold. `what` names them in errors."""

    __slots__ = ("advice", "held", "most", "most_sessions", "sessions", "what")

    def __init__(self, what: str, advice: str, most: int, most_sessions: int) -> None:
        self.what = what
        self.advice = advice
        self.most = most
        self.most_sessions = most_sessions
        self.held = 0
        self.sessions = 0

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
