"""Short conversations that stand in for a branch when a chat template is tried. Pure data."""

from typing import NamedTuple

from ramify.protocol.wire import ChatMessage, JsonObject, Role

CALL_ID = "call00001"  # nine letters and digits, as Mistral wants them
MARKER = "ramifyf3a9c1marker"
QUESTION: JsonObject = {"role": "user", "content": "Q"}
ANSWER: JsonObject = {"role": "assistant", "content": "A"}
_CALL: JsonObject = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    ],
}


TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "F",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


class Asked(NamedTuple):
    """The calls that a branch ends with, as (name, id).

    `ends`: the tokens that end an output; the one that ended the calls may not be on the branch.
    """

    calls: tuple[tuple[str, str], ...]
    ends: tuple[str, ...]


def stand_in(role: Role) -> list[JsonObject]:
    """The shortest usual conversation that ends with a turn of `role`; its content is the marker."""
    turn: JsonObject = {"role": role, "content": MARKER}
    match role:
        case "system" | "user":
            return [turn]
        case "assistant":
            return [QUESTION, turn]
        case "tool":
            return [QUESTION, _CALL, {**turn, "tool_call_id": CALL_ID, "name": "f"}]


def calling(asked: Asked, argument: object) -> ChatMessage:
    """A turn with these calls; `argument` instead of their own."""
    calls: list[JsonObject] = [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": {"x": argument}}}
        for name, ident in asked.calls
    ]
    return ChatMessage(role="assistant", tool_calls=calls)
