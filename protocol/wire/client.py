"""What clients send: `Open`, ops, and the messages without a reply."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from ramify.protocol.errors import InvalidField
from ramify.protocol.json_value import check_json
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
from ramify.protocol.tools import check_tools
from ramify.protocol.wire.fields import (
    INT53,
    MAX_CHOICES,
    MAX_NAMES,
    MOST_PRIORITY,
    RETAIN_S,
    BranchName,
    BranchNames,
    ChatMessage,
    Choices,
    Constraint,
    Count,
    Effort,
    Images,
    JsonObject,
    LongText,
    OpId,
    Persist,
    Position,
    Role,
    Seconds,
    ShortText,
    Targets,
    Text,
    ThoughtTokens,
    TokenId,
    Tools,
)

_NAME_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-")


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
            try:
                letters = value if isinstance(value, str) else "".join(value or ())
            except TypeError:  # of a caller in Python: what it sends is checked by type
                continue
            if not _NAME_LETTERS.issuperset(letters):
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
    end: Annotated[int, Meta(ge=1, le=INT53)] | None = None
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

    n: Annotated[int, Meta(ge=-INT53, le=INT53)] = 0


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


def names(targets: Targets) -> list[str]:
    """The branch names of an op's `branch` field."""
    return [targets] if isinstance(targets, str) else list(targets)
