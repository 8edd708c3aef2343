"""Fields of frames: names, numbers, texts, messages and constraints, each with its bound."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ramify.protocol.json_value import check_json
from ramify.protocol.pictures import MOST_AT_ONCE, MOST_BYTES
from ramify.protocol.tools import check_calls

# Every number, string and list of a client has a bound, here, where it is declared. A server's own
# limits (`config.Limits`) are tighter; these are what any part of any server can rely on.
MOST_PRIORITY = 8
MAX_NAMES = 1024  # branches that one op names
MAX_TEXT = 1 << 16  # characters of what is no conversation: schemas, separators, choices
MAX_TAGS = 128  # of one structural tag, and its triggers
MAX_CHOICES = 1 << 17  # bytes of all choices of one op: what is scored is a tree of their tokens
INT31 = 2**31 - 1
INT53 = 2**53 - 1  # what every JSON reader keeps exactly
MONTH_S = 30 * 86400
RETAIN_S = 300.0  # of what is to be kept without a word for how long

# Not Meta(pattern=...): with it, msgspec 0.22 on Python 3.11 crashes some processes at exit.
BranchName = Annotated[str, Meta(min_length=1, max_length=64)]
BranchNames = Annotated[list[BranchName], Meta(min_length=1, max_length=MAX_NAMES)]
Targets = BranchName | BranchNames
OpId = Annotated[int, Meta(ge=0, le=INT53)]
Position = Annotated[int, Meta(ge=0, le=INT53)]
TokenId = Annotated[int, Meta(ge=0, le=INT31)]
Count = Annotated[int, Meta(ge=1, le=INT31)]
Effort = Literal["low", "medium", "high"]
ThoughtTokens = Annotated[int, Meta(ge=0, le=INT31)]
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
