"""The frames of `ramify.v1`: what clients send and what servers send.

Client frames refuse unknown fields; server frames may gain fields within v1, so clients ignore
unknown ones. Fields equal to their default are left out on the wire. See docs/protocol.md.
This file knows shapes and ranges; what an op does to a branch is the session's business.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ramify.protocol.errors import Code, InvalidField
from ramify.protocol.json_value import check_json
from ramify.protocol.pictures import MOST_AT_ONCE, MOST_BYTES
from ramify.protocol.sampling import (
    FrequencyPenalty,
    Logprobs,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_temperature,
)
from ramify.protocol.tools import check_calls, check_tools

# Every number, string and list of a client has a bound, here, where it is declared. A server's own
# limits (`config.Limits`) are tighter; these are what any part of any server can rely on.
MOST_PRIORITY = 8
MAX_NAMES = 1024  # branches that one op names
MAX_TEXT = 1 << 16  # characters of what is no conversation: schemas, separators, choices
MAX_TAGS = 128  # of one structural tag, and its triggers
MAX_CHOICES = 1 << 17  # bytes of all choices of one op: what is scored is a tree of their tokens
_INT31 = 2**31 - 1
_INT53 = 2**53 - 1  # what every JSON reader keeps exactly
MONTH_S = 30 * 86400
RETAIN_S = 300.0  # of what is to be kept without a word for how long

# Not Meta(pattern=...): with it, msgspec 0.22 on Python 3.11 crashes some processes at exit.
BranchName = Annotated[str, Meta(min_length=1, max_length=64)]
BranchNames = Annotated[list[BranchName], Meta(min_length=1, max_length=MAX_NAMES)]
Targets = BranchName | BranchNames
OpId = Annotated[int, Meta(ge=0, le=_INT53)]
Position = Annotated[int, Meta(ge=0, le=_INT53)]
TokenId = Annotated[int, Meta(ge=0, le=_INT31)]
Count = Annotated[int, Meta(ge=1, le=_INT31)]
Effort = Literal["low", "medium", "high"]
ThoughtTokens = Annotated[int, Meta(ge=0, le=_INT31)]
Seconds = Annotated[float, Meta(ge=0, le=MONTH_S)]
ShortText = Annotated[str, Meta(max_length=256)]  # ids, names, keys
LongText = Annotated[str, Meta(max_length=MAX_TEXT)]
Images = Annotated[
    list[Annotated[bytes, Meta(min_length=1, max_length=MOST_BYTES)]], Meta(max_length=MOST_AT_ONCE)
]
Text = Annotated[str, Meta(max_length=1 << 26)]  # as long as a frame may be; a context is shorter
Persist = Literal["none", "lazy", "sync"]  # not saved; saved soon; saved before anybody hears of it
Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, Any]  # `json_value` says what it may hold
Tools = Annotated[list[JsonObject], Meta(max_length=1024)]
Choices = Annotated[list[LongText], Meta(min_length=1, max_length=1024)]

_NAME_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-")


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One turn, in the shape chat templates expect."""

    role: Role
    content: Text = ""
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_calls: Tools | None = None
    reasoning: Text | None = None  # an assistant's, for templates that show it

    def __post_init__(self) -> None:
        if self.tool_calls is not None:
            check_json(self.tool_calls, "tool_calls")
            check_calls(self.tool_calls, "tool_calls")


class Tag(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A constrained part of an output: between `begin` and `end`, exactly one of the others."""

    begin: Annotated[str, Meta(min_length=1, max_length=1024)]
    end: Annotated[str, Meta(max_length=1024)] = ""
    regex: LongText | None = None
    json_schema: JsonObject | LongText | None = None
    choices: Choices | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            check_json(self.json_schema, "json_schema")


class StructuralTag(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """Free text in which each of `triggers` begins one of the tags. See docs/protocol.md."""

    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_TAGS)]
    triggers: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_TAGS)
    ] = []
    at_least_one: bool = False
    stop_after_first: bool = False


CONSTRAINTS = ("regex", "json_schema", "choices", "grammar", "structural_tag")


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A constraint on an output: exactly one of `CONSTRAINTS`, or `continue` alone. See
    docs/protocol.md.

    `after_thought`: a thinking model's thought comes first, and is free. `continue_`: the output goes on
    with the constrained one that the branch ends in, or is free.
    """

    regex: LongText | None = None
    json_schema: JsonObject | LongText | None = None
    choices: Choices | None = None
    grammar: LongText | None = None
    structural_tag: StructuralTag | None = None
    after_thought: bool = False
    continue_: bool | None = msgspec.field(default=None, name="continue")

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            check_json(self.json_schema, "json_schema")

    @property
    def names_one(self) -> bool:
        """Whether it says what the output must be, not only whether it goes on."""
        return any(getattr(self, kind) is not None for kind in CONSTRAINTS)


# --- client to server -------------------------------------------------------------------------


class ClientBase(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag=str.lower,
    kw_only=True,
    gc=False,
):
    """Base of client messages: a JSON object with a `type`.

    `branch_fields`: the fields that hold branch names, whose letters are checked here;
    `json_fields`: those that hold free-form JSON.
    """

    branch_fields: ClassVar[tuple[str, ...]] = ("branch",)
    json_fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in self.branch_fields:
            value = getattr(self, field)
            if value and not _NAME_LETTERS.issuperset(
                value if isinstance(value, str) else "".join(value)
            ):
                raise InvalidField(
                    f"`{field.rstrip('_')}` {_first_bad(value)!r} is not a branch name: "
                    "use A-Z a-z 0-9 . _ / -"
                )
        for field in self.json_fields:
            value = getattr(self, field)
            if value is not None:
                check_json(value, field)


def _first_bad(names: str | Iterable[str]) -> str:
    """The one among `names` that has a letter which branch names do not have."""
    every = [names] if isinstance(names, str) else names
    return next(name for name in every if not _NAME_LETTERS.issuperset(name))


class Open(ClientBase, kw_only=True, frozen=True):
    """`client` may be left out by a client that does not plan to come back: the server makes one up."""

    branch_fields = ("have",)
    json_fields = ("tools",)

    client: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    session: ShortText | None = None
    key: ShortText | None = None
    token: Annotated[str, Meta(max_length=4096)] | None = None
    model: Annotated[str, Meta(max_length=4096)] | None = None
    have: Annotated[dict[BranchName, Position], Meta(max_length=1 << 14)] = {}
    revision: Position | None = None
    ttl_s: Seconds | None = None
    detach: Literal["run", "pause", "cancel"] = "run"
    tick_ms: Annotated[int, Meta(ge=0, le=10_000)] = 0
    tokens: bool = False
    tools: Tools | None = None
    template: Literal["append", "strict"] = "append"
    effort: Effort | None = None  # for templates that tell the model how much to think
    parts: bool = False
    usage: bool = False  # the first delta of each generation tells `prompt` and `cached`
    import_: Text | None = msgspec.field(default=None, name="import")

    def __post_init__(self) -> None:
        ClientBase.__post_init__(self)
        if self.import_ is not None and self.session is not None:
            raise InvalidField("`import` makes a new session: leave `session` out")
        if self.client is not None and not self.client.isprintable():
            raise InvalidField(
                "`client` holds a character that cannot be printed: use letters, digits, -"
            )
        if self.tools is not None:
            check_tools(self.tools, "tools")

    @property
    def who(self) -> str:
        """The `client`. Behind the gateway there always is one, because it fills it in."""
        if self.client is None:
            raise ValueError("this `open` names no client")
        return self.client


class Op(ClientBase, kw_only=True, frozen=True):
    """Base of the messages that carry an id and get a terminal reply."""

    id: OpId


class MessagePlace(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Behind the first `at` characters of a message's content. `message`: its number in an `append`."""

    message: Annotated[int, Meta(ge=0, lt=1 << 14)]
    at: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


class Append(Op, kw_only=True, frozen=True):
    branch: Targets = "main"
    text: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1 << 14)] | None = None
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 24)] | None = None
    special: bool = True  # control tokens that `text` spells count as such
    expect: Position | None = None
    marks: Annotated[list[MessagePlace], Meta(max_length=16)] = []  # `ok.result.marks`: their positions
    logprobs: Logprobs = 0  # of what is appended: the reply has each token's, and of so many likely ones
    images: Images = []  # each stands where `text`, or a message's content, has U+FFFC


class Generate(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "as_")

    branch: Targets = "main"
    max_tokens: Count = 1024
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: Logprobs = 0
    n: Annotated[int, Meta(ge=1, le=MAX_NAMES)] = 1
    as_: BranchNames | None = msgspec.field(default=None, name="as")
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    deadline_ms: Count | None = None
    quiet: bool = False  # no deltas: the text comes in `done`
    hidden: bool = False  # nor there: for what a `join` or `prune` reads
    keep_open: bool = False
    expect: Position | None = None
    tool_choice: Annotated[str, Meta(min_length=1, max_length=256)] = "auto"
    parallel_tool_calls: bool = True
    thought_tokens: ThoughtTokens | None = None  # a longer thought is ended; 0: there is none

    def __post_init__(self) -> None:
        ClientBase.__post_init__(self)
        check_temperature(self.temperature)


Method = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]


class Select(Op, kw_only=True, frozen=True):
    """All `choices` together have at most `MAX_CHOICES` bytes."""

    branch: Targets = "main"
    choices: Choices
    method: Method = "token_length_normalized"
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    deadline_ms: Count | None = None
    expect: Position | None = None

    def __post_init__(self) -> None:
        ClientBase.__post_init__(self)
        size = sum(len(each) if each.isascii() else len(each.encode()) for each in self.choices)
        if size > MAX_CHOICES:
            raise InvalidField(
                f"`choices` have {size} bytes, at most {MAX_CHOICES}: give fewer or shorter ones"
            )


class Fork(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "as_")

    branch: BranchName | None = "main"
    as_: BranchNames = msgspec.field(name="as")
    at: Position | None = None


class Join(Op, kw_only=True, frozen=True):
    """`each` may name {i}, {name} and {text} of a source. `role`: None appends raw text."""

    branch_fields = ("branch", "from_")

    from_: BranchNames = msgspec.field(name="from")
    branch: BranchName = "main"
    prefix: LongText = ""
    each: LongText = "{text}\n"
    suffix: LongText = ""
    role: Role | None = "user"
    keep: bool = False


class Prune(Op, kw_only=True, frozen=True):
    """`into`: None: the winners keep their names. `k`: None: as many as `into` names, else one."""

    branch_fields = ("into", "from_", "score_from")

    from_: BranchNames = msgspec.field(name="from")
    into: Targets | None = None
    by: Literal["first", "logprob", "number", "vote"] = "logprob"
    score_from: BranchNames | None = None
    k: Annotated[int, Meta(ge=1, le=MAX_NAMES)] | None = None
    keep: bool = False

    @property
    def targets(self) -> list[str]:
        """The names in `into`."""
        return [] if self.into is None else names(self.into)

    @property
    def winners(self) -> int:
        """The number of sources that are kept."""
        return self.k if self.k is not None else len(self.targets) or 1


class Rollback(Op, kw_only=True, frozen=True):
    branch: BranchName = "main"
    to: Position | None = None
    turns: Count | None = None


class KvAction(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One suggestion of `KvHints`. What is not served is rejected, and harms nothing."""

    action_id: ShortText
    action_type: ShortText
    action_version: ShortText
    payload: JsonObject = {}

    def __post_init__(self) -> None:
        check_json(self.payload, "payload")


class KvHints(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What an orchestrator suggests for KV, in the envelope of other engines (vLLM's RFC 53421,
    SGLang's 36224)."""

    protocol_version: Literal["0.1"]
    message_id: ShortText
    actions: Annotated[list[KvAction], Meta(max_length=16)]


class KvLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What `kv.retain` and `kv.pin` ask: tokens up to `end` (None: all, and what follows), for so long.

    `priority` 0: no longer.
    """

    start: Position = 0
    end: Annotated[int, Meta(ge=1, le=_INT53)] | None = None
    priority: Annotated[int, Meta(ge=0, le=100)] = 1
    duration: Seconds | None = None
    covers_output: bool = False

    @property
    def tokens(self) -> int | None:
        """How many are kept; None: all."""
        return None if self.covers_output else self.end

    @property
    def seconds(self) -> float:
        """How long; 0.0: no longer."""
        if not self.priority:
            return 0.0
        return RETAIN_S if self.duration is None else self.duration


class KvRetain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The same for several places."""

    directives: Annotated[list[KvLease], Meta(max_length=16)]
    scope: None = None


class Set(Op, kw_only=True, frozen=True):
    branch_fields = ("branch", "name")
    json_fields = ("meta",)

    branch: BranchName | None = None
    name: BranchName | None = None
    retain_s: Seconds | None = None
    persist: Persist | None = None
    meta: JsonObject | None = None
    hints: KvHints | None = None


class Drop(Op, kw_only=True, frozen=True):
    branch: Targets


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The end of an answer to `tree`: the next answer begins with the turns of `branch`
    at `position`.
    """

    branch: BranchName
    position: Position = 0


class Tree(Op, kw_only=True, frozen=True):
    branch: BranchName | None = None
    text: bool = False
    tokens: bool = False
    after: Place | None = None


class Export(Op, kw_only=True, frozen=True):
    """Answered by `ok` with `result.file`: what `open.import` takes."""

    branch_fields = ()


class Cancel(Op, kw_only=True, frozen=True):
    """`subtree`: with all descendants of the branches, and every op that waits on one of them."""

    branch: Targets | None = None
    ops: Annotated[list[OpId], Meta(max_length=MAX_NAMES)] | None = None
    subtree: bool = False

    def __post_init__(self) -> None:
        ClientBase.__post_init__(self)
        if self.subtree and self.ops is not None:
            raise InvalidField("`subtree` goes with `branch`, not with `ops`: leave one of them out")


class Credit(ClientBase, kw_only=True, frozen=True):
    branch: BranchName
    upto: Position


class Ping(ClientBase, kw_only=True, frozen=True):
    branch_fields = ()

    n: Annotated[int, Meta(ge=-_INT53, le=_INT53)] = 0


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
    | Export
    | Cancel
    | Credit
    | Ping
    | CloseSession
)

# --- server to client -------------------------------------------------------------------------


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


class State(ServerBase, kw_only=True, frozen=True):
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


ServerMessage = State | Ok | Delta | Done | Error | Event | Bye | Pong


def names(targets: Targets) -> list[str]:
    """The branch names of an op's `branch` field."""
    return [targets] if isinstance(targets, str) else list(targets)
