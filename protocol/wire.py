"""The frames of `ramify.v1`: what clients send and what servers send.

Client frames refuse unknown fields; server frames may gain fields within v1, so clients ignore
unknown ones. Fields equal to their default are left out on the wire. See docs/protocol.md.
This file knows shapes and ranges; what an op does to a branch is the session's business.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ramify.protocol.errors import Code, InvalidField

# Not Meta(pattern=...): with it, msgspec 0.22 on Python 3.11 crashes some processes at exit.
BranchName = Annotated[str, Meta(min_length=1, max_length=64)]
Targets = BranchName | Annotated[list[BranchName], Meta(min_length=1, max_length=1024)]
OpId = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Position = Annotated[int, Meta(ge=0, le=2**53 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, Any]

_BRANCH_NAME = re.compile(r"[A-Za-z0-9._/-]{1,64}")


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn, in the shape chat templates expect."""

    role: Role
    content: str = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[JsonObject] | None = None


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of the fields. Typed now, answered `unsupported` by this server."""

    regex: str | None = None
    json_schema: JsonObject | str | None = None
    choices: list[str] | None = None
    grammar: str | None = None


# --- client to server -------------------------------------------------------------------------


class ClientBase(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag=str.lower,
    kw_only=True,
):
    """Base of client messages: a JSON object with a `type`.

    `branch_fields`: the fields that hold branch names, whose letters are checked here.
    """

    branch_fields: ClassVar[tuple[str, ...]] = ("branch",)

    def __post_init__(self) -> None:
        for field in self.branch_fields:
            value = getattr(self, field)
            for name in (value,) if isinstance(value, str) else value or ():
                if _BRANCH_NAME.fullmatch(name) is None:
                    raise InvalidField(
                        f"`{field.rstrip('_')}` {name!r} is not a branch name: use A-Z a-z 0-9 . _ / -"
                    )


class Open(ClientBase, kw_only=True, frozen=True):
    branch_fields = ("have",)

    client: Annotated[str, Meta(min_length=1, max_length=128)]
    session: str | None = None
    key: str | None = None
    token: str | None = None
    model: str | None = None
    have: dict[BranchName, Position] = {}
    revision: int | None = None
    ttl_s: Annotated[float, Meta(ge=0, le=30 * 86400)] | None = None
    detach: Literal["run", "pause", "cancel"] = "run"
    tick_ms: Annotated[int, Meta(ge=0, le=10_000)] = 0
    tokens: bool = False
    tools: list[JsonObject] | None = None
    template: Literal["append", "strict"] = "append"


class Op(ClientBase, kw_only=True, frozen=True):
    """Base of the messages that carry an id and get a terminal reply."""

    id: OpId


class Append(Op, kw_only=True, frozen=True):
    branch: Targets = "main"
    text: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tokens: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    expect: Position | None = None


class Generate(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "as_")

    branch: Targets = "main"
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    n: Annotated[int, Meta(ge=1)] = 1
    as_: list[BranchName] | None = msgspec.field(default=None, name="as")
    priority: Annotated[int, Meta(ge=-8, le=8)] = 0
    deadline_ms: Annotated[int, Meta(ge=1)] | None = None
    quiet: bool = False
    keep_open: bool = False
    expect: Position | None = None


class Select(Op, kw_only=True, frozen=True):
    branch: Targets = "main"
    choices: Annotated[list[str], Meta(min_length=1)]
    method: Literal[
        "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
    ] = "token_length_normalized"


class Fork(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "as_")

    branch: BranchName | None = "main"
    as_: Annotated[list[BranchName], Meta(min_length=1)] = msgspec.field(name="as")
    at: Position | None = None


class Join(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "from_")

    from_: Annotated[list[BranchName], Meta(min_length=1)] = msgspec.field(name="from")
    branch: BranchName = "main"
    prefix: str = ""
    each: str = "{text}\n"
    suffix: str = ""
    role: Role = "user"
    keep: bool = False


class Prune(Op, kw_only=True, frozen=True):
    branch_fields = ("into", "from_", "score_from")

    from_: Annotated[list[BranchName], Meta(min_length=1)] = msgspec.field(name="from")
    into: Targets
    by: Literal["first", "logprob", "number", "vote"] = "logprob"
    score_from: list[BranchName] | None = None
    k: Annotated[int, Meta(ge=1)] = 1
    keep: bool = False


class Rollback(Op, kw_only=True, frozen=True):
    branch: BranchName = "main"
    to: Position | None = None
    turns: Annotated[int, Meta(ge=1)] | None = None


class Set(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "name")

    branch: BranchName | None = None
    name: BranchName | None = None
    retain_s: Annotated[float, Meta(ge=0, le=30 * 86400)] | None = None
    persist: bool | None = None
    meta: JsonObject | None = None


class Drop(Op, kw_only=True, frozen=True):
    branch: Targets


class Tree(Op, kw_only=True, frozen=True):
    branch: BranchName | None = None
    text: bool = False
    tokens: bool = False


class Cancel(Op, kw_only=True, frozen=True):
    branch: Targets | None = None
    ops: list[OpId] | None = None


class Credit(ClientBase, kw_only=True, frozen=True):
    branch: BranchName
    upto: Position


class Ping(ClientBase, kw_only=True, frozen=True):
    branch_fields = ()

    n: int = 0


class CloseSession(Op, tag="close", kw_only=True, frozen=True):
    branch_fields = ()

    keep: bool = False


ClientMessage = (
    Open
    | Append
    | Generate
    | Select
    | Fork
    | Join
    | Prune
    | Rollback
    | Set
    | Drop
    | Tree
    | Cancel
    | Credit
    | Ping
    | CloseSession
)

# --- server to client -------------------------------------------------------------------------


class ServerBase(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag=str.lower, kw_only=True
):
    """Base of server messages. Clients ignore fields they do not know."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One piece of a branch, for `tree`: input that was appended, or a generation.

    [start, end) are positions. `text` and `tokens` only where the op asked for them.
    """

    kind: Literal["input", "output"]
    start: int
    end: int
    op: int | None = None
    role: str | None = None
    text: str | None = None
    tokens: list[int] | None = None


class BranchState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
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
    persist: bool | None = None
    reason: str | None = None
    meta: JsonObject | None = None
    turns: list[Turn] | None = None


class ServerInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`epoch` changes when the server restarts: branches of another epoch are gone."""

    version: int
    epoch: str
    model: str
    context: int | None = None


class State(ServerBase, kw_only=True, frozen=True):
    session: str
    op: int
    revision: int
    branches: list[BranchState]
    key: str | None = None
    view_key: str | None = None
    resumed: bool = False
    cold: bool = False  # resumed, but (part of) the KV was evicted: the next turn prefills again
    limits: dict[str, int] | None = None
    server: ServerInfo | None = None
    meta: JsonObject | None = None
    id: int | None = None


class Ok(ServerBase, kw_only=True, frozen=True):
    id: int
    branch: str | None = None
    position: int | None = None
    revision: int | None = None
    result: JsonObject | None = None


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One output token's log-probability and the most likely alternatives, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Delta(ServerBase, kw_only=True, frozen=True):
    branch: str
    position: int
    text: str
    tokens: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    truncate: int | None = None


class Hit(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where the cached tokens were found."""

    gpu: int = 0
    host: int = 0
    disk: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
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


class Done(ServerBase, kw_only=True, frozen=True):
    id: int
    branch: str
    position: int
    reason: Literal["stop", "length", "tool", "cancelled", "deadline", "error"]
    usage: Usage
    text: str | None = None
    tool_calls: list[JsonObject] | None = None
    stop: str | int | None = None  # the stop string or token id that ended it
    scores: list[float] | None = None
    mean_logprob: float | None = None
    error: Code | None = None  # with reason "error"
    message: str | None = None


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


ServerMessage = State | Ok | Delta | Done | Error | Event | Bye | Pong


def names(targets: Targets) -> list[str]:
    """The branch names of an op's `branch` field."""
    return [targets] if isinstance(targets, str) else list(targets)
