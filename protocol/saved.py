"""What a store keeps of a session: its items, and the records in them.

A session is a set of *items*, each a short key and some bytes (`msgpack` of a record here), so any store
that maps keys to bytes can keep it, and a save writes only what has changed:

| key | record | written |
|---|---|---|
| `head` | `SavedHead` | at each change that is no text |
| `s<n>` | `SavedInput`, `SavedOutput` | once; an output that is being written, at each save |
| `r<op>:<client>` | list of replies | when the op is answered |
| `o<n>` | `SavedOp` | once, for an op that waits or runs; gone once it is answered |
| `f<n>` | `SavedFrame` | once, with the first such op of its frame |
| `c<n>` | `SavedRule` | once, with the first complete output under that constraint |
| `t<n>` | list of tools | once, while a client has declared them |

Segments are a stack that branches share (`actors/session/branches/branch.py`): each names the one before
it, so a history that a hundred forks have in common is kept once.

Positions and counts are tokens, times are seconds since 1970.
"""

import hashlib
import hmac
import time

import msgspec

from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.pictures import Picture
from ramify.protocol.sampling import TokenLogprobs
from ramify.protocol.wire import (
    ChatMessage,
    ClientMessage,
    JsonObject,
    Open,
    Part,
    PartKind,
    Persist,
    Role,
    Usage,
)

FORMAT = 1  # of the records; a store of a newer one is refused, of an older one migrated
HEAD = "head"
HISTORY = "history "  # begins the name of what is kept of a stateless history: it is no session
CHECK = 16  # bytes of the checksum that stands before a history


class SavedInput(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """An `InputSegment`. `before`: the number of the segment before it, 0: it is the first.

    `history`: of the conversation behind the segment of that number (0: from its start), these messages.
    """

    before: int
    start: int
    tokens: bytes
    text: str
    raw: str | None
    tail: str
    role: Role | None
    op: int | None
    messages: list[ChatMessage]
    turn: int
    chat: bool
    history: tuple[int, list[ChatMessage]] | None
    picture: Picture | None = None


class SavedRule(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that outputs stand under: what is compiled of it. `thinks`: behind a thought."""

    spec: ConstraintSpec
    thinks: bool


class SavedOutput(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An `OutputSegment`. One that is being written (`ended` is False) has its tokens only.

    `sizes`: characters of each chunk of `text`. `rule`: the number of its `SavedRule` (0: none), which
    its output stands under since position `since`; `complete`: it has come to its end by itself.
    """

    before: int
    start: int
    tokens: bytes
    ended: bool
    counts: list[int]
    sizes: list[int]
    text: str
    labels: list[PartKind | list[Part]] | None
    logprobs: list[TokenLogprobs] | None
    spoken: ChatMessage | None
    mean: float | None
    op: int | None
    client: str | None
    quiet: bool
    tail: str
    role: Role | None
    lead: int
    eos_text: str
    rule: int = 0
    since: int = 0
    complete: bool = False


SavedSegment = SavedInput | SavedOutput


class SavedLabel(msgspec.Struct, frozen=True, array_like=True):
    """A branch's name. `above`: the place in the list of the one it was forked off, -1: none."""

    name: str
    above: int
    gone: bool


class SavedBranch(msgspec.Struct, frozen=True, array_like=True):
    """A `Branch`. `handle`: its count in the session; `top`: the number of its last segment (0: none).

    `label`, `of`: places in `SavedHead.labels` (-1: none).
    """

    handle: int
    top: int
    label: int
    of: int
    at: int
    own: int
    born: int
    cuts: list[tuple[int, int]]
    retain_s: float | None
    meta: JsonObject | None
    reason: str | None
    persist: Persist | None
    usage: Usage | None = None  # of the generation that ended for `reason`


class SavedClient(msgspec.Struct, frozen=True, array_like=True):
    """A client: `last`, its highest op id; `due`: op id -> replies still to come; `tools`: the number of
    those that it declared (0: none).
    """

    name: str
    last: int
    due: dict[int, int]
    tools: int = 0


class SavedRun(msgspec.Struct, frozen=True, array_like=True):
    """A generation that runs or waits. `place`: of its task among the op's; `segment`: its number.

    `opened`: where the text stands that its output was made to begin with, if any. `logprob`: the sum of
    its tokens' log-probabilities, `scored`: of how many of them. `ttft`: from the op's arrival to its
    first token; None: there is none, or an older version wrote the record.
    """

    place: int
    segment: int
    seed: int
    opened: int | None
    forced: int
    accepted: int
    logprob: float
    scored: int
    ttft: float | None = None


class SavedWait(msgspec.Struct, frozen=True, array_like=True):
    """An op that is not done. `left`: the places of its tasks that are not."""

    number: int
    left: list[int]
    runs: list[SavedRun]


class SavedOp(msgspec.Struct, frozen=True, array_like=True):
    """An op as it came, and the number of its frame."""

    frame: int
    arrived: float
    op: ClientMessage


class SavedFrame(msgspec.Struct, frozen=True, array_like=True):
    """The `open` of a frame's client, `without_key`."""

    client: str
    opened: Open


class SavedError(msgspec.Struct, frozen=True, array_like=True):
    """An error that no reply has told yet."""

    code: str
    message: str
    retry_ms: int | None = None
    details: JsonObject | None = None


class SavedHead(msgspec.Struct, frozen=True, array_like=True):
    """Everything of a session that is no text.

    `key`, `view_key`: SHA-256 of them; no item has the keys themselves. `model`: whose tokens these
    are. `lives`: the last revision that was saved in each life of the session, on the servers before
    this one. `handles`, `segments`: how many were numbered. `failed`: of each frame with ops that
    wait: branches on which one failed, with those errors that no reply has told. `tools`: the number
    of those that the client declared which opened the session last (0: none).
    """

    format: int
    session: str
    key: bytes
    view_key: bytes
    owner: str
    namespace: str
    priority: int
    displaceable: bool
    model: str
    revision: int
    lives: list[int]
    handles: int
    segments: int
    created: float
    ttl_s: float | None
    persist: Persist
    meta: JsonObject | None
    branches: list[SavedBranch]
    labels: list[SavedLabel]
    clients: list[SavedClient]
    waits: list[SavedWait]
    failed: dict[int, dict[str, SavedError | None]]
    tools: int = 0


class Changes(msgspec.Struct, frozen=True):
    """Changes to a session in the store, written all or not at all.

    - `size`: bytes of all its items then, before encryption.
    - `expires`: when it may be forgotten; None: when the store decides.
    - `busy`: ops wait or run, so the session goes on by itself after a restart.
    - `live`: it is in a server's memory.
    - `sync`: it must be on the disk before any client hears of it.
    - `fence`: from the store, when this server took the session. A write with an older one changes
      nothing.
    - `count`: the number of this save under that fence. One that does not follow the save before it is
      not written, because the store has lost some.
    - `whole`: these are all of its items, whatever the store has: for a new session, or one of which the
      store has lost saves.
    """

    session: str
    owner: str
    put: dict[str, bytes]
    drop: list[str]
    size: int
    used: float
    expires: float | None
    busy: bool
    live: bool = True
    sync: bool = False
    fence: int = 0
    count: int = 0
    whole: bool = False


class StoredSession(msgspec.Struct, frozen=True):
    """A session in a store, as lists show it. `size`: bytes of its items, about. `live`: a server has
    it.
    """

    session: str
    owner: str
    used: float
    expires: float | None
    busy: bool
    size: int
    live: bool = False


class SavedHistory(msgspec.Struct, frozen=True, array_like=True):
    """Of an answer to a stateless request, by fingerprints: `pieces`, text and its tokens in int32,
    behind the first `kept` pieces of the history `before`, if any. `model`: as in `SavedHead`."""

    asked: bytes
    model: str
    before: bytes | None
    kept: int
    pieces: list[tuple[str, bytes]]

    def changes(self, owner: str) -> Changes:
        """That put it into a store for a day, under its own name: all who have it write the same."""
        packed, now, name = msgspec.msgpack.encode(self), time.time(), f"{HISTORY}{self.asked.hex()}"
        body = hashlib.blake2b(packed, digest_size=CHECK).digest() + packed
        made = Changes(name, owner, {HISTORY: body}, [], len(body), now, now + 86_400.0, busy=False)
        return msgspec.structs.replace(made, live=False, fence=next_fence(), whole=True)

    @classmethod
    def of(cls, body: bytes) -> "SavedHistory | None":
        """What was saved; None: the bytes are damaged, and none of its tokens may reach a model."""
        check, packed = body[:CHECK], body[CHECK:]
        if hashlib.blake2b(packed, digest_size=CHECK).digest() != check:
            return None
        return msgspec.msgpack.decode(packed, type=cls)


def without_key(opened: Open) -> Open:
    """The part of `open` that a frame with waiting ops needs: without anything that grants access."""
    return msgspec.structs.replace(
        opened, session=None, key=None, token=None, model=None, have={}, revision=None, import_=None
    )


def next_fence(before: int = 0) -> int:
    """A fence above `before`. It follows the clock: one that was forgotten is not given again."""
    return max(before + 1, time.time_ns() // 1000)


EXPORT = "ramify session"


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """A session as a file, in msgpack. `what`: `EXPORT`; `format`: of its items."""

    what: str
    format: int
    session: str
    owner: str
    items: dict[str, bytes]


def key_hash(key: str) -> bytes:
    """The hash of a key that stores keep. Keys are random, so a plain hash reveals nothing."""
    return hashlib.sha256(key.encode()).digest()


def same_key(key: str, hashed: bytes) -> bool:
    """Whether `key` has this hash, in constant time."""
    return hmac.compare_digest(key_hash(key), hashed)
