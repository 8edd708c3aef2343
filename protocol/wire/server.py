"""What servers send: state, replies to ops, deltas, events."""

from typing import Literal

import msgspec

from ramify.protocol.errors import Code
from ramify.protocol.wire.client import Place
from ramify.protocol.wire.fields import (
    ChatMessage,
    JsonObject,
    Persist,
)


class ServerBase(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    tag_field="type",
    tag=str.lower,
    kw_only=True,
    gc=False,
):
    """Base of server messages. Clients ignore fields they do not know."""


class SegmentState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One segment of a branch, for `tree`: input that was appended, or a generation.

    [start, end) are positions. `text` and `tokens` only where the op asked for them; `messages`, with
    `text`, where input was appended as messages (`text` is what the template made of them).
    """

    kind: Literal["input", "output"]
    start: int
    end: int
    op: int | None = None
    role: str | None = None
    text: str | None = None
    tokens: list[int] | None = None
    messages: list[ChatMessage] | None = None


class BranchState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A branch as `state` shows it. `at`: where it was forked off `parent`.

    `running`: the id of the generation that runs or waits; `started_at`: its first position.
    `kv`: where the KV of most of it is; `resident`: how many of its tokens have KV.
    """

    branch: str
    position: int
    parent: str | None = None
    at: int | None = None
    running: int | None = None
    started_at: int | None = None
    kv: Literal["gpu", "host", "disk", "none"] = "none"
    resident: int | None = None
    retain_s: float | None = None
    persist: Persist | None = None  # None: as the session
    reason: str | None = None
    usage: "Usage | None" = None  # of the generation that ended so; in a `tree` of one branch
    meta: JsonObject | None = None
    turns: list[SegmentState] | None = None
    turns_from: int | None = None  # `turns` begin here: those before are `parent`'s


class ServerInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """`epoch` changes when the server restarts. What it had saved, it has again: see `state.resumed`."""

    version: int
    epoch: str
    model: str
    context: int | None = None


class StateReply(ServerBase, tag="state", kw_only=True, frozen=True):
    session: str
    op: int
    revision: int
    branches: list[BranchState]
    client: str | None = None  # as `open` named it, or what the server made up; in answers to `open`
    key: str | None = None
    view_key: str | None = None
    resumed: bool = False
    cold: bool = False  # resumed, but (part of) the KV was evicted: the next turn prefills again
    limits: dict[str, int] | None = None
    server: ServerInfo | None = None
    meta: JsonObject | None = None
    id: int | None = None
    ttl_s: float | None = None  # how long the session is kept without sockets; in the answer to `open`
    persist: Persist | None = None  # how it is saved; in the answer to `open`, of a server that saves
    tools: list[str] | None = None  # names of those in force for this client; in the answer to `open`
    lost: bool = False  # the server restarted without what this client has seen last
    notes: list[str] | None = None  # on `open.template`; in the answer to `open`
    next: Place | None = None  # there is more: ask for `tree` again, `after` this


class Ok(ServerBase, kw_only=True, frozen=True):
    id: int
    branch: str | None = None
    position: int | None = None
    revision: int | None = None
    result: JsonObject | None = None


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One output token's log-probability and the most likely alternatives, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


PartKind = Literal["text", "reasoning", "call", "markup"]


class Part(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A part of a delta's text, with its kind. `markup`: tags around the others.

    Of a call: `call` is its number in the generation; `id` and `name` come once, when they are known;
    the `arguments` of all its parts are the JSON text of an object.
    """

    kind: PartKind
    text: str
    call: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Delta(ServerBase, kw_only=True, frozen=True):
    branch: str
    position: int
    text: str
    parts: list[Part] | None = None
    tokens: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    truncate: int | None = None
    prompt: int | None = None  # this and the next, with `open.usage`: as `Usage`, in the first delta
    cached: int | None = None


class Hit(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Where cached tokens were found."""

    gpu: int = 0
    host: int = 0
    disk: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`prompt == cached + computed`, `computed >= 1`; times in milliseconds."""

    prompt: int
    cached: int
    computed: int
    output: int
    forced: int
    hit: Hit
    queue_ms: float
    ttft_ms: float | None
    total_ms: float
    accepted: int = 0  # of `output`: tokens that were guessed, and right
    thought: int = 0  # of `output`: tokens of thoughts


class Miss(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Why tokens of a history that an HTTP request brought were computed again: about `tokens`.

    `message`: the first one that is otherwise than in requests before.
    """

    reason: Literal["new", "edited", "evicted", "expired"]
    message: int | None = None
    tokens: int = 0


class Done(ServerBase, kw_only=True, frozen=True):
    id: int
    branch: str
    position: int
    reason: Literal["stop", "length", "tool", "cancelled", "deadline", "error"]
    usage: Usage
    revision: int | None = None
    text: str | None = None
    tool_calls: list[JsonObject] | None = None
    stop: str | int | None = None  # the stop string or token id that ended it
    choice: int | None = None  # of a `select`: which of its choices; `text` is that choice
    scores: list[float] | None = None  # of all its choices
    rebased: int | None = None  # the branch was moved back to there before the choice was appended
    mean_logprob: float | None = None
    error: Code | None = None  # with reason "error"
    message: str | None = None
    notes: list[str] | None = None  # what the `constraint` was read as, where that needs a word
    content: str | None = None  # where `open.parts` is set: the answer without thoughts and calls
    reasoning: str | None = None
    miss: Miss | None = None  # to an HTTP API alone: of a history that is not as it was


class Error(ServerBase, kw_only=True, frozen=True):
    code: Code
    message: str
    id: int | None = None
    branch: str | None = None
    retry_ms: int | None = None
    details: JsonObject | None = None


class Event(ServerBase, kw_only=True, frozen=True):
    revision: int
    op: str
    branch: str | None = None
    by: str | None = None
    details: JsonObject | None = None


class Bye(ServerBase, kw_only=True, frozen=True):
    reason: str
    after_ms: int


class Pong(ServerBase, kw_only=True, frozen=True):
    n: int
    load: dict[str, float]


ServerMessage = StateReply | Ok | Delta | Done | Error | Event | Bye | Pong
