"""Short conversations that stand in for a branch when a chat template is tried. Pure data."""

from typing import NamedTuple

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
