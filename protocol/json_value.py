"""Free-form JSON inside messages (`meta`, `tools`, `tool_calls`, schemas): what it may hold.

Everything that one codec reads must be writable by the other, and by whoever the value is shown to:
the msgpack codec alone knows bytes, timestamps, extensions and keys that are no strings, the JSON
codec alone integers of any size, and Python alone NaN and lone surrogates. So all of these are
refused, and so is nesting that would exhaust a reader's stack. The check is iterative; a value with a
fault is looked through again, for its place. It does not know which message a value is part of, but
counts all those of one frame.
"""

import re
import threading
from collections.abc import Iterable
from math import isfinite
from typing import Any

from ramify.protocol.errors import InvalidField

MAX_DEPTH = 32  # objects and arrays inside each other
MAX_VALUES = 1 << 16  # members and elements, all levels together; of a frame, all its values together
MIN_INT, MAX_INT = -(2**63), 2**63 - 1  # JavaScript reads those beyond 2**53 rounded

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SHOWN = 40  # characters of any other key in a path
_TOO_MANY, _FAULTY = -1, -2
_CONTAINERS = (dict, list, tuple)

# The way from a value to the outermost one: (the way of its container, its key or index).
_Way = tuple[Any, str | int] | None


class _Decoding(threading.local):
    """The decoding state of this thread. `left`: values that the current frame may still hold; None:
    there is no frame. `checked`: what was found to be sound in it, by id.
    """

    left: int | None = None
    checked: dict[int, Any] | None = None


_decoding = _Decoding()


class OneFrame:
    """While it is entered, MAX_VALUES bounds all values that this thread checks, not each of them:
    a frame has room for hundreds of values of that size, and they are checked in one go. One that
    stands in several messages is checked and counted once."""

    def __enter__(self) -> None:
        _decoding.left, _decoding.checked = MAX_VALUES, {}

    def __exit__(self, *_: object) -> None:
        _decoding.left = _decoding.checked = None


def check_json(value: Any, field: str) -> None:
    """Raise InvalidField, which names the place in `field`, if `value` may not travel.

    Or if the frame that is being decoded (`OneFrame`) holds too many values with it.
    """
    room, checked = _decoding.left, _decoding.checked
    if checked is not None and id(value) in checked:
        return
    left = _left(value, MAX_VALUES if room is None else room)
    if room is not None:
        _decoding.left = left
    if left >= 0:
        if checked is not None:
            checked[id(value)] = value
        return
    if left == _TOO_MANY and room not in (None, MAX_VALUES):
        why = f"and the other JSON of this frame hold more than {MAX_VALUES} values: send them apart"
        raise InvalidField(f"`{field}` {why}")
    path, why = _told(value, left)
    raise InvalidField(f"`{field}{path}` {why}")


def json_fault(value: Any) -> tuple[str, str] | None:
    """A fault of `value` that keeps it off the wire, as (path below it, reason); None: there is none.

    O(size), at most MAX_VALUES.
    """
    left = _left(value, MAX_VALUES)
    return None if left >= 0 else _told(value, left)


def _told(value: Any, left: int) -> tuple[str, str]:
    """The fault for which `_left` gave a negative number."""
    fault = _fault(value) if left != _TOO_MANY else None
    return fault or ("", f"holds more than {MAX_VALUES} values: send less")


def _left(value: Any, most: int) -> int:
    """How many of `most` values are left behind this one; `_TOO_MANY`, or `_FAULTY`.

    It only looks, level by level: a frame may hold 65,536 values, and nearly none has a fault.
    """
    alone = not isinstance(value, _CONTAINERS)
    level: list[Any] = [[value]] if alone else [value]
    left = most + alone  # `value` itself is not counted
    for _ in range(MAX_DEPTH + alone):
        below: list[Any] = []
        for container in level:
            left -= len(container)
            if left < 0:
                return _TOO_MANY
            values: Iterable[Any] = container
            if isinstance(container, dict):
                if not _are_texts(container):
                    return _FAULTY
                values = container.values()
            for item in values:
                kind = type(item)  # the usual ones first
                if kind is str:
                    if not (item.isascii() or _encodable(item)):
                        return _FAULTY
                elif kind is int:
                    if not MIN_INT <= item <= MAX_INT:
                        return _FAULTY
                elif isinstance(item, _CONTAINERS):
                    below.append(item)
                elif item is not None and kind is not bool and _fault_in_scalar(item) is not None:
                    return _FAULTY
        if not below:
            return left
        level = below
    return _FAULTY


def _fault(value: Any) -> tuple[str, str] | None:
    """As `json_fault`, for a value known to have a fault: keeps the path to each of its values."""
    open_: list[tuple[Any, _Way, int]] = [([value], None, 0)]  # containers to look into
    left = MAX_VALUES + 1
    while open_:
        container, way, depth = open_.pop()
        if depth > MAX_DEPTH:
            return _path(way), f"is nested more than {MAX_DEPTH} deep: flatten it"
        left -= len(container)
        if left < 0:
            return "", f"holds more than {MAX_VALUES} values: send less"
        items: Iterable[tuple[Any, Any]] = enumerate(container)
        if isinstance(container, dict):
            for key in container:
                why = _fault_in_key(key)
                if why is not None:
                    return _path(way), why
            items = container.items()
        for key, item in items:
            below = (way, key) if depth else None
            if isinstance(item, _CONTAINERS):
                open_.append((item, below, depth + 1))
            elif item is not None and type(item) is not bool:
                why = _fault_in_scalar(item)
                if why is not None:
                    return _path(below), why
    return None


def _fault_in_key(key: Any) -> str | None:
    if not isinstance(key, str):
        return f"has a key of type {type(key).__name__!r}: keys must be strings"
    return None if _encodable(key) else "has half of a surrogate pair in a key: it is no Unicode text"


def _fault_in_scalar(item: Any) -> str | None:
    if isinstance(item, int):
        if MIN_INT <= item <= MAX_INT:
            return None
        return "is an integer of more than 64 bits: send it as a string"
    if isinstance(item, str):
        return None if _encodable(item) else "holds half of a surrogate pair: it is no Unicode text"
    if isinstance(item, float):
        return None if isfinite(item) else "is not a finite number: JSON has none such"
    return f"is of type {type(item).__name__!r}, which JSON does not have: send it as a string"


def _are_texts(keys: Iterable[Any]) -> bool:
    """Whether all are Unicode text: looked at in one go, as nearly all are."""
    try:
        return _encodable("".join(keys))
    except TypeError:  # one is no text
        return False


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path(way: _Way) -> str:
    parts: list[str] = []
    while way is not None:
        way, key = way
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif _PLAIN_KEY.fullmatch(key):
            parts.append(f".{key}")
        else:  # printable, and without the quotes that end a path in an error's text
            shown = key[:_SHOWN].replace("`", "'").encode("unicode_escape").decode("ascii")
            parts.append(f'["{shown}"]')
    return "".join(reversed(parts))
