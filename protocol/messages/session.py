"""What a session is told: frames of its sockets, tokens, answers of cache, grammar and store."""

from typing import Literal

import msgspec

from ramify.protocol.cluster import (
    MoveAnswer,
)
from ramify.protocol.errors import Code
from ramify.protocol.messages.base import Base
from ramify.protocol.sampling import TokenLogprobs
from ramify.protocol.wire import (
    ClientMessage,
    Error,
    Open,
)


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output tokens of one request, in order. `logprobs`: empty, or one for each token.

    `forced`, `accepted`: of them, as in `Finished`: the engine may be gone before it tells the end.
    `cached`: with a request's first tokens, as in `Finished`; -1 with all others.
    """

    request: int
    tokens: bytes
    logprobs: list[TokenLogprobs | None] = []
    forced: int = 0
    accepted: int = 0
    cached: int = -1


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one end of a request.

    `output`: tokens of this request that are in the branch now; `accepted` of them came as drafts (at
    most: where the output was cut, some of those may have gone). `reason` "length": max_tokens
    or the context is used up; "error": `error` says what happened.
    Times in seconds on the engine's clock; `first_token` 0.0: there was none.
    `scores`: float32, one for each of `Submit.targets`, or with `tops` as in `StepResult`;
    all of them with reason "length" only.
    `forced`: tokens of `output` that the constraint left no choice for. `stale`: nothing has run, for
    the constraint is not there (any more): compile it again and submit anew. `spare`: as submitted.
    `replayed`: see `Granted`, over all grants. `host`, `disk`: of `cached`, see there.
    """

    request: int
    reason: Literal["stop", "length", "cancelled", "deadline", "error"]
    output: int
    prompt: int
    cached: int
    computed: int
    arrived: float
    started: float
    first_token: float
    ended: float
    error: Code | None = None
    message: str = ""
    scores: bytes = b""
    forced: int = 0
    stale: bool = False
    accepted: int = 0
    spare: bool = False
    replayed: int = 0
    host: int = 0
    disk: int = 0


class Tokens(Base, frozen=True):
    """One message per session and step: the tokens that its requests sampled, then their ends."""

    progress: list[Progress]
    finished: list[Finished]


class Compiled(Base, frozen=True):
    """Answer to `Compile`. `notes`: what the constraint says in other words than the client's."""

    request: int
    constraint: int
    notes: list[str] = []


class NotCompiled(Base, frozen=True):
    """The other answer to `Compile`. `details`: see `errors.ConstraintError`."""

    request: int
    code: Code
    message: str
    details: dict[str, int | str] | None = None


class Inspected(Base, frozen=True):
    """Answer to `Inspect`: resident tokens of each branch, in the order asked (-1: unknown), and those
    that each lease keeps.

    `tiers`: of each branch, where the first block behind its resident tokens is (1: host memory,
    2: the disk); 0: nowhere, or not known. Empty: as many zeros.
    """

    id: int
    resident: list[int]
    tiers: list[int] = []


class ChangeCore(Base, frozen=True):
    """Continue this session with another engine: see `Reopen`. No text is lost.

    `quietly`: once nothing runs.
    """

    quietly: bool = False


class Lost(Base, frozen=True):
    """A message to this session could not be brought to it: it cannot go on. `reason`: for the log."""

    reason: str


class Attach(Base, frozen=True):
    """A client's `open` that reached this session. `ops`: the rest of the same frame.

    `place`: see `Frame`.
    """

    socket: int
    open: Open
    ops: list[ClientMessage]
    write: bool  # False: attached with the view key
    size: int = 0  # bytes of the frame
    place: int = 1
    saves: bool = True  # see `OpenSession`


class Frame(Base, frozen=True):
    """One frame from an attached socket, decoded and validated. The first error wins.

    `ops` may hold pings, which the gateway has answered. `place`: where `ops` begin in the array that
    the client sent; None: it sent the one op alone. Errors name JSON paths of that frame.

    `limit`: the gateway found it too much, so none of its ops runs. The session answers it, because an
    op that a client sends again after a resume may have run: it has its own reply, and gets no second.
    """

    socket: int
    ops: list[ClientMessage]
    size: int = 0  # bytes, as it came
    place: int | None = 0
    limit: Error | None = None


class Detached(Base, frozen=True):
    """The socket is gone (for whatever reason)."""

    socket: int


class Throttled(Base, frozen=True):
    """The socket has over its limit of bytes queued: hold its deltas back until `Drained`."""

    socket: int


class Drained(Base, frozen=True):
    """The socket's queue is short again: deltas may flow."""

    socket: int


class Tick(Base, frozen=True):
    """Time has passed: expiry, tick_ms flushes, deadlines. Sent by the session's own timer."""


class Shutdown(Base, frozen=True):
    """The server drains: refuse new sessions, with `reason` and when to come back."""

    reason: str
    after_ms: int


class Saved(Base, frozen=True):
    """The store has all that the session's `Save` with this ticket brought."""

    ticket: int


class NotSaved(Base, frozen=True):
    """The store cannot be written. The session's `Save` with this ticket is tried again until it can."""

    ticket: int


class Unsaved(Base, frozen=True):
    """The store has lost some of what it had of the session, up to the `Save` with this ticket: it is to
    be saved whole.
    """

    ticket: int


class Moved(Base, frozen=True):
    """Another server has the session, or wants it: it leaves this server's memory, and clients
    reconnect.

    `taken`: the other server has it, and nothing can be saved any more; otherwise it waits for the last
    save.
    """

    taken: bool


SessionMessage = (
    Attach
    | Frame
    | Detached
    | Throttled
    | Drained
    | Tokens
    | Inspected
    | Compiled
    | NotCompiled
    | Lost
    | ChangeCore
    | MoveAnswer  # for its front, where a session has several replicas
    | Saved
    | NotSaved
    | Unsaved
    | Moved
    | Tick
)
