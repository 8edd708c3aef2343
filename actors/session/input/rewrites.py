"""Finds out what a chat template writes otherwise as a conversation grows. Pure.

Append mode never changes what a branch holds, so behind such turns a branch differs from what the
template makes of the whole conversation. Small conversations are tried, turn by turn and as a whole;
what differs is told to clients of that mode. No template is known by name.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from ramify.actors.calls.dialects import Dialect
from ramify.actors.session.input.stand_ins import ASKED, CALL_ID, TOOL, Asked
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage, JsonObject, Role

_Turns = Sequence[Sequence[ChatMessage]]


class Turnwise(Protocol):
    """The parts of a `ChatTemplate` that a conversation is written with."""

    def strict(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] | None, generate: bool
    ) -> str: ...

    def first(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] | None, generate: bool
    ) -> str: ...

    def delta(
        self,
        last_role: Role,
        closed: bool,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        asked: Asked = ...,
    ) -> str: ...

    def pending_end(self, role: Role) -> str: ...


class Rewrite(NamedTuple):
    """A kind of conversation whose branch differs. `tools`: only where there are some."""

    what: str
    tools: bool


def _said(role: Role, content: str) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=content)]


def _call(number: int) -> list[ChatMessage]:
    function: JsonObject = {"name": "f", "arguments": {"x": number}}
    calls: list[JsonObject] = [{"id": CALL_ID, "type": "function", "function": function}]
    return [ChatMessage(role="assistant", tool_calls=calls)]


def _result(number: int) -> list[ChatMessage]:
    return [ChatMessage(role="tool", content=str(number), tool_call_id=CALL_ID, name="f")]


_ASK, _ANSWER, _GO_ON = _said("user", "Q"), _said("assistant", "A"), _said("user", "R")
_SYSTEM = [*_said("system", "S"), *_ASK]
_CALLED = [_call(1), _result(1)]
_KINDS: dict[Rewrite, tuple[_Turns, ...]] = {
    Rewrite("answers that turns follow", False): ([_ASK, _ANSWER, _GO_ON],),
    Rewrite("a system turn that others follow", False): ([_SYSTEM, _ANSWER, _GO_ON],),
    Rewrite("tools that turns follow", True): ([_ASK, _ANSWER, _GO_ON],),
    Rewrite("calls that results follow", True): ([_ASK, *_CALLED], [_SYSTEM, *_CALLED]),
    Rewrite("calls behind results", True): ([_ASK, *_CALLED, _call(2), _result(2)],),
    Rewrite("calls that answers follow", True): ([_ASK, *_CALLED, _ANSWER, _GO_ON],),
}
_THOUGHTS = Rewrite("thoughts of earlier answers", False)
_THOUGHT = "ramifyf3a9c1thought"


def rewrites(template: Turnwise, dialect: Dialect) -> list[Rewrite]:
    """What differs, once for a model: a few dozen small renderings."""
    found = [_THOUGHTS] if dialect.thought is not None and _forgets(template, dialect) else []
    for kind, conversations in _KINDS.items():
        if any(_differs(template, turns, [TOOL] if kind.tools else None) for turns in conversations):
            found.append(kind)
    return found


def note(found: Sequence[Rewrite], *, tools: bool) -> str | None:
    """What a client of append mode is told. `tools`: its session has some."""
    kinds = [each.what for each in found if tools or not each.tools]
    if not kinds:
        return None
    return (
        f"this model's chat template rewrites {', '.join(kinds)}; a branch keeps what it holds: "
        "open with template 'strict' to have the conversation rendered anew at each turn"
    )


def _forgets(template: Turnwise, dialect: Dialect) -> bool:
    """Whether a thought is left out once the user goes on."""
    assert dialect.thought is not None
    begin, end = dialect.thought
    for answer in (
        ChatMessage(role="assistant", content="A", reasoning=_THOUGHT),
        ChatMessage(role="assistant", content=f"{begin}\n{_THOUGHT}\n{end}\n\nA"),
    ):
        try:
            if _THOUGHT in template.strict([*_ASK, answer, *_GO_ON], None, False):
                return False
        except BadRequest:  # it takes no such message
            continue
    return True


def _differs(template: Turnwise, turns: _Turns, tools: Sequence[JsonObject] | None) -> bool:
    """Whether the turns one by one are another text than all at once; no, if they are refused."""
    try:
        whole = template.strict([message for turn in turns for message in turn], tools, False)
        return _one_by_one(template, turns, tools) != whole
    except BadRequest:
        return False


def _one_by_one(template: Turnwise, turns: _Turns, tools: Sequence[JsonObject] | None) -> str:
    text = template.first(turns[0], tools, False)
    results = 0
    for before, turn in pairwise(turns):
        role = before[-1].role
        end = template.pending_end(role)
        pending = end != "" and text.endswith(end)
        if pending:
            text = text[: len(text) - len(end)]
        asked = ASKED._replace(again=results > 0) if turn[0].role == "tool" else Asked()
        text += template.delta(role, not pending, turn, tools, False, asked)
        results += turn[0].role == "tool"
    return text
