"""Takes the keys of sessions out of items that versions before this one saved with them."""

import msgspec

from ramify.protocol.saved import SavedFrame, without_key
from ramify.protocol.stored_response import PREFIX, with_key

HOLD_KEYS = ("f", "h", "o", "r")  # how the items begin that may hold one: frames, head, ops, replies
_PREFIX = PREFIX.encode()


def keyless(item: str, body: bytes) -> bytes | None:
    """The item without keys; None: it has none, or cannot be read."""
    try:
        if item[:1] == "f":
            saved = msgspec.msgpack.decode(body, type=SavedFrame)
            clean = msgspec.structs.replace(saved, opened=without_key(saved.opened))
            new = msgspec.msgpack.encode(clean)
        elif item[:1] in HOLD_KEYS and _PREFIX in body:
            new = msgspec.msgpack.encode(_cleaned(msgspec.msgpack.decode(body)))
        else:
            return None
    except (msgspec.MsgspecError, ValueError, RecursionError):  # damaged, or encrypted
        return None
    return new if new != body else None


def _cleaned(value: object) -> object:
    match value:
        case str():
            return with_key(value, "") if value.startswith(PREFIX) else value
        case list():
            return [_cleaned(each) for each in value]
        case dict():
            return {name: _cleaned(each) for name, each in value.items()}
        case _:
            return value
