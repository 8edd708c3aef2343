"""What a chat template makes of messages, found out with small conversations. Pure.

Templates differ in the shape in which they read calls (`shape_of`): whether the arguments are an object
or its JSON text (DeepSeek-V3), and whether a call without a content has "" or null there (null:
DeepSeek-V3 and R1, which else lose the call, or write an empty turn).

Some write earlier turns otherwise as a conversation grows (`rewrites`). Append mode never changes what a
branch holds, so behind such turns a branch differs from what the template makes of the whole. That is
told to clients of that mode. No template is known by name.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from ramify.actors.calls.dialects import Dialect
from ramify.protocol.errors import BadRequest
from ramify.protocol.json_value import json_fault
from ramify.protocol.wire import ChatMessage, JsonObject, Role

CALL_ID = "call00001"  # nine letters and digits, as Mistral wants them
MARKER = "ramifyf3a9c1marker"
QUESTION: JsonObject = {"role": "user", "content": "Q"}
ANSWER: JsonObject = {"role": "assistant", "content": "A"}
RESULT: JsonObject = {"role": "tool", "content": "R", "tool_call_id": CALL_ID, "name": "f"}
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "F",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


class Asked(NamedTuple):
    """What a branch has asked of tools."""

    calls: tuple[tuple[str, str], ...] = ()  # that it ends with, or whose results, as (name, id)
    ends: tuple[str, ...] = ()  # tokens that end outputs: the branch lacks the one that ended the calls
    again: bool = False  # there are results of earlier calls


ASKED = Asked((("f", CALL_ID),))
NOTHING_ASKED = Asked()


def stand_in(role: Role) -> list[JsonObject]:
    """The shortest usual conversation that ends with a turn of `role`; its content is the marker.

    A result is without its call, which templates want in different shapes (see `calling`).
    """
    turn: JsonObject = {"role": role, "content": MARKER}
    match role:
        case "system" | "user":
            return [turn]
        case "assistant":
            return [QUESTION, turn]
        case "tool":
            return [QUESTION, {**turn, "tool_call_id": CALL_ID, "name": "f"}]


def calling(asked: Asked, argument: object) -> ChatMessage:
    """A turn with these calls; `argument` instead of their own."""
    calls: list[JsonObject] = [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": {"x": argument}}}
        for name, ident in asked.calls
    ]
    return ChatMessage(role="assistant", tool_calls=calls)


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
THOUGHTS = Rewrite("thoughts of earlier answers", False)
_THOUGHT = "ramifyf3a9c1thought"


def rewrites(template: Turnwise, dialect: Dialect) -> list[Rewrite]:
    """What differs, once for a model: a few dozen small renderings."""
    found = [THOUGHTS] if dialect.thought is not None and _forgets(template, dialect) else []
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


_NAME, _KEY = "ramifyf3a9c1f", "ramifyf3a9c1x"
_TRIAL = (
    ChatMessage(role="user", content="Q"),
    ChatMessage(
        role="assistant",
        tool_calls=[
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": _NAME, "arguments": {_KEY: 1}},
            }
        ],
    ),
)


class Shape(NamedTuple):
    """How a template wants tool calls."""

    text_arguments: bool = False
    null_content: bool = False


def shape_of(render: Callable[[Sequence[JsonObject]], str]) -> Shape:
    """The shape in which a template shows a call, the shortest way if there are several.

    `render` raises BadRequest for what the template refuses. The usual shape, if it shows no calls.
    """
    best, least = Shape(), 0
    for text_arguments in (False, True):
        for null_content in (False, True):
            shape = Shape(text_arguments, null_content)
            try:
                text = render(as_dicts(_TRIAL, shape))
            except BadRequest:
                continue
            if _NAME in text and _KEY in text and (not least or len(text) < least):
                best, least = shape, len(text)
    return best


def as_dicts(messages: Sequence[ChatMessage], shape: Shape = Shape()) -> list[JsonObject]:  # noqa: B008
    """Messages as chat templates read them: no absent fields, tool arguments as `shape` says."""
    return [_as_dict(message, shape) for message in messages]


def _as_dict(message: ChatMessage, shape: Shape) -> JsonObject:
    content = (
        None if shape.null_content and message.tool_calls and not message.content else message.content
    )
    data: JsonObject = {"role": message.role, "content": content}
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        data["tool_calls"] = [_with_arguments(call, shape) for call in message.tool_calls]
    if message.reasoning is not None:
        data["reasoning_content"] = data["thinking"] = message.reasoning
    return data


def _with_arguments(call: JsonObject, shape: Shape) -> JsonObject:
    """OpenAI's `arguments` are a JSON string; most templates write objects and would quote it twice."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if shape.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not shape.text_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        if json_fault(arguments) is not None:  # too deep for a template, or half a surrogate pair
            return call
    return {**call, "function": {**function, "arguments": arguments}}
