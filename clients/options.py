"""Keyword arguments of a branch's methods, as types."""

from collections.abc import Sequence
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
)

from ramify.protocol.wire import (
    Constraint,
    JsonObject,
    Method,
    Role,
    StructuralTag,
)

PruneBy = Literal["first", "logprob", "number", "vote"]


B = TypeVar("B")


Parsed = TypeVar("Parsed")


class _Options(TypedDict, total=False):
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool
    constraint: Constraint
    logprobs: int
    priority: int
    deadline_ms: int
    quiet: bool
    hidden: bool
    keep_open: bool
    expect: int
    tool_choice: str
    parallel_tool_calls: bool
    thought_tokens: int


class _Said(TypedDict, total=False):
    """A constraint in short: one of these. `type`: whose JSON the output is to be.

    `after_thought` goes with each of them: what the model thinks first is free. `continue_constraint`
    stands alone: True goes on with the constrained output that the branch ends in (as no constraint
    does), or it is an error; False leaves the output free.
    """

    regex: str
    json_schema: JsonObject | str
    choices: Sequence[str]
    grammar: str
    structural_tag: StructuralTag | JsonObject
    type: Any
    after_thought: bool
    continue_constraint: bool


class GenerateOptions(_Options, total=False):
    """The fields of `generate` (docs/protocol.md). What is left out is the server's default."""

    stop: list[str]


class TypedOptions(GenerateOptions, _Said, total=False):
    """Options of `generate`, with short forms for a constraint: `regex`, `json_schema`, `choices`,
    `grammar`, `structural_tag`, or `type`, a Python type whose JSON the output becomes
    (`Generation.parsed` gives the object).
    """


class GapOptions(_Options, _Said, total=False):
    """Options of a gap of a program, where `stop` may be one text."""

    stop: str | list[str]


class JoinOptions(TypedDict, total=False):
    """How a join combines the last outputs of its sources, once these have ended.

    The text is `prefix` (none), `each` (the text and a line break) for each source, where {i}, {name}
    and {text} are the source's, and `suffix` (none). `role`: of the turn ("user"), None: raw text.
    `keep`: the sources live on.
    """

    prefix: str
    each: str
    suffix: str
    role: Role | None
    keep: bool


class Pruned(NamedTuple, Generic[B]):
    """The result of a prune. `branches`: the winners where they are now, the best first.

    `kept`: the sources that they were; `scores`: of each source, None without one (by "first": empty).
    """

    branches: list[B]
    kept: list[str]
    dropped: list[str]
    scores: dict[str, float | None]


class SelectOptions(TypedDict, total=False):
    """Fields of `select` beside its choices."""

    method: Method
    priority: int
    deadline_ms: int
    expect: int
