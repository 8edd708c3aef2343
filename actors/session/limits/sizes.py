"""What messages take in memory while a session keeps them: estimates in bytes. Pure.

A string takes about its length; each object beside it some hundred bytes, however short it was on
the wire, so lists are counted by their entries. What an op has of each, its own file says (`ops/`).
"""

from typing import Any

import msgspec

from ramify.protocol.wire import Delta, Done, Ok, ServerMessage

MESSAGE = 600
OPENED = (
    4 * MESSAGE
)  # how a socket opened the session, as long as it is attached; tools count by themselves
TARGET = 400  # a branch name, and the task that an op has for it
TOKEN = 40  # a number in a list
JSON = 8  # objects for each byte of JSON, at worst of what people send


def json_size(value: Any) -> int:
    """As JSON, on the wire."""
    return len(msgspec.json.encode(value)) if value else 0


def json_bytes(value: Any) -> int:
    """Of a value that came as JSON."""
    return JSON * len(msgspec.json.encode(value)) if value else 0


def reply_bytes(message: ServerMessage) -> int:
    """Of a reply that is kept, or waits for a socket."""
    match message:
        case Done():
            told = len(message.text or "") + len(message.content or "") + len(message.reasoning or "")
            told += sum(map(len, message.notes or ()))
            size = 2 * MESSAGE + told + json_bytes(message.tool_calls)
            return size + TOKEN * len(message.scores or ())
        case Delta():
            return MESSAGE + len(message.text) + TOKEN * len(message.tokens or ())
        case Ok():
            return MESSAGE + json_bytes(message.result)
        case _:
            return MESSAGE
