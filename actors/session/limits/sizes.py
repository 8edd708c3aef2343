"""What messages take in memory while a session keeps them: estimates in bytes. Pure.

A string takes about its length; each object beside it some hundred bytes, however short it was on
the wire, so lists are counted by their entries.
"""

from typing import Any

import msgspec

from ramify.protocol.wire import (
    Append,
    Cancel,
    ClientMessage,
    Delta,
    Done,
    Drop,
    Fork,
    Generate,
    Join,
    Ok,
    Op,
    Prune,
    Select,
    ServerMessage,
    Set,
)

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
    return JSON * json_size(value)


def named(op: ClientMessage) -> int:
    """How many names and texts of lists it brings, about."""
    match op:
        case Append():
            return _count(op.branch) + len(op.messages or ())
        case Fork() | Generate():
            return len(op.as_ or ()) + (_count(op.branch) if op.branch is not None else 0)
        case Select():
            return _count(op.branch) + len(op.choices)
        case Join():
            return len(op.from_)
        case Prune():
            return 3 * len(op.from_) + len(op.targets)
        case Cancel():
            return _count(op.branch or "") + len(op.ops or ())
        case Drop():
            return _count(op.branch)
        case _:
            return 1


def _count(targets: str | list[str]) -> int:
    return len(targets) if isinstance(targets, list) else 1


def op_bytes(op: ClientMessage) -> int:
    """Of a client's message."""
    if not isinstance(op, Op):
        return MESSAGE
    targets = getattr(op, "branch", None)
    size = MESSAGE + TARGET * (len(targets) if isinstance(targets, list) else 1)
    match op:
        case Append():
            size += len(op.text or "") + TOKEN * len(op.tokens or ())
            for message in op.messages or ():
                size += MESSAGE + len(message.content) + len(message.reasoning or "")
                size += json_bytes(message.tool_calls)
        case Generate():
            size += TARGET * (op.n + len(op.as_ or ())) + TOKEN * len(op.stop_token_ids)
            size += sum(map(len, op.stop)) + json_bytes(op.constraint)
        case Fork():
            size += TARGET * len(op.as_)
        case Set():
            size += json_bytes(op.meta)
        case Select():
            size += TOKEN * len(op.choices) + sum(map(len, op.choices))
        case Join():
            size += TARGET * len(op.from_) + len(op.prefix) + len(op.each) + len(op.suffix)
        case Prune():
            size += TARGET * (len(op.from_) + len(op.score_from or ()) + len(op.targets))
        case _:
            pass
    return size


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
