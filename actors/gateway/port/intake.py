"""From the bytes of one client frame to the messages to act on, or to the refusal to send back.

Pure: time is an argument. This file does not know sockets, nor what an op does.

Refusals. No part of a refused frame runs, and each of its ops whose id can be read gets its one
terminal reply, all in one frame: the op at fault the error itself, the others `skipped` (where the
whole frame is refused: all of them the error). At most `ops_per_frame` are answered. A frame that
comes too fast is refused by its session, if it has one: only that knows which ops it has seen before.
"""

import msgspec

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, Close, LimitExceeded, RamifyError
from ramify.protocol.wire import ClientMessage, Error, Op, Open, Ping, ServerMessage


class Intake(msgspec.Struct, frozen=True):
    """The outcome of a frame. `pings`: their `n`. `close`: (code, reason) after the replies.

    `ops`: from the first message on that is no ping; `place`, `limit`: see `messages.Frame`.
    """

    ops: list[ClientMessage] = []
    place: int | None = 0
    pings: list[int] = []
    replies: list[ServerMessage] = []
    close: tuple[int, str] | None = None
    limit: Error | None = None


def receive(data: bytes, codec: Codec, guard: SocketLimits, limits: Limits, now: float) -> Intake:
    """Decode and admit one frame."""
    try:
        messages = codec.decode_client(data)
        if not messages:
            raise BadRequest("the frame holds no message - at `$`", details={"path": "$"})
    except BadRequest as error:
        return _unusable(data, error, codec, guard, limits, now)
    try:
        guard.admit(len(messages), now)
    except LimitExceeded as error:
        if guard.abusive:
            close = Close.RATE, "too many refused frames"
            return Intake(replies=refuse(messages, error, limits.ops_per_frame), close=close)
        return Intake(ops=messages[: limits.ops_per_frame], limit=_error(error, None))
    pings = [message.n for message in messages if type(message) is Ping]
    first = 0
    if pings:
        if len(pings) == len(messages):
            return Intake(pings=pings)
        first = next(i for i, message in enumerate(messages) if type(message) is not Ping)
    place = first if codec.is_array(data) else None
    return Intake(ops=messages[first:] if first else messages, place=place, pings=pings)


def refuse(ops: list[ClientMessage], error: RamifyError, most: int) -> list[ServerMessage]:
    """Make the terminal replies of a frame that is refused whole; an `open` has no id to answer."""
    ids = [op.id if isinstance(op, Op) else None for op in ops if isinstance(op, Op | Open)]
    return [_error(error, ident) for ident in ids[:most]] or [_error(error, None)]


def _unusable(
    data: bytes, error: BadRequest, codec: Codec, guard: SocketLimits, limits: Limits, now: float
) -> Intake:
    """Refuse an unusable frame: unparseable, it is a strike; invalid, its ops are answered."""
    details = error.details or {}
    if details.get("parse"):
        close = (Close.UNPARSEABLE, "unparseable frames") if guard.strike() else None
        return Intake(replies=[_error(error, None)], close=close)
    ids = codec.ids(data)
    try:
        guard.admit(min(len(ids), limits.ops_per_frame), now)  # refused ones count all the same
    except LimitExceeded as limit:
        close = (Close.RATE, "too many refused frames") if guard.abusive else None
        return Intake(replies=[_error(limit, None)], close=close)
    fault = _index(details.get("path", "$"))
    replies: list[ServerMessage] = [_error(error, ids[fault] if fault < len(ids) else None)]
    replies += [
        Error(code="skipped", message="another op of the frame is invalid", id=ident)
        for index, ident in enumerate(ids[: limits.ops_per_frame])
        if ident is not None and index != fault
    ]
    return Intake(replies=replies)


def _error(error: RamifyError, ident: int | None) -> Error:
    return Error(
        code=error.code,
        message=error.message,
        id=ident,
        retry_ms=error.retry_ms,
        details=error.details,
    )


def _index(path: str) -> int:
    """Find the message of the frame that a JSON path points into: `$[2].id` -> 2, `$.id` -> 0."""
    number = path[2:].partition("]")[0] if path.startswith("$[") else ""
    return int(number) if number.isdigit() else 0
