"""What forms read with, and values that are no JSON: Python's (LFM2) and Gemma 4's. Pure.

A literal is a string between quotes or marks, a number, a word for true, false and nothing, a list, or
an object, whose keys may stand there without quotes. JSON is read as well.
"""

import json
import math
import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from ramify.actors.calls.scanner import Broken
from ramify.protocol.json_value import MAX_DEPTH

T = TypeVar("T")
Reading: TypeAlias = Generator[None, str, T]

QUOTE = '<|"|>'  # around Gemma's strings, in which nothing is escaped
_KEY_MOST = 256
_WORD_MOST = 400  # characters of a number, or of a word
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ENDS = frozenset(",:=()[]{}<>\"'")
_CLOSES = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}


def literal(c: str, depth: int = 1) -> Reading[tuple[object, str]]:
    """The value that begins with `c`, or behind that blank; and what follows it, which is no blank."""
    if c.isspace():
        c = yield from blanks()
    if depth > MAX_DEPTH or not c:
        raise Broken
    if c in "[(":
        return (yield from _list(_CLOSES[c], depth))
    if c == "{":
        return (yield from _object(depth))
    if c in "\"'<":
        return (yield from _string(c)), (yield from blanks())
    word, c = yield from _word(c, _WORD_MOST)
    if word in _WORDS:
        return _WORDS[word], c
    number: int | float = json.loads(word) if _NUMBER.fullmatch(word) else math.nan
    if isinstance(number, float) and not math.isfinite(number):
        raise Broken
    return number, c


def key_of(c: str, between: str, most: int = _KEY_MOST) -> Reading[tuple[str, str]]:
    """A key that begins with `c`, up to `between`; and the character behind that."""
    if c and c in "\"'<":
        key = yield from _string(c)
        c = yield from blanks()
    else:
        key, c = yield from _word(c, most)
        if not key:
            raise Broken
    if c != between:
        raise Broken
    return key, (yield from blanks())


def _list(close: str, depth: int) -> Reading[tuple[object, str]]:
    values: list[object] = []
    c = yield from blanks()
    while c != close:
        value, c = yield from literal(c, depth + 1)
        values.append(value)
        if c == ",":
            c = yield from blanks()
        elif c != close:
            raise Broken
    return values, (yield from blanks())


def _object(depth: int) -> Reading[tuple[object, str]]:
    members: dict[str, object] = {}
    c = yield from blanks()
    while c != "}":
        key, c = yield from key_of(c, ":")
        members[key], c = yield from literal(c, depth + 1)
        if c == ",":
            c = yield from blanks()
        elif c != "}":
            raise Broken
    return members, (yield from blanks())


def _string(c: str) -> Reading[str]:
    """The string that the quote or mark `c` begins."""
    if c == "<":
        yield from rest(QUOTE, c)
        return (yield from until(QUOTE))
    read: list[str] = []
    quote, c = c, (yield)
    while c != quote:
        if not c:
            raise Broken
        read.append((yield from _escaped()) if c == "\\" else c)
        c = yield
    # halves of a character that were escaped one by one are one
    return "".join(read).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped() -> Reading[str]:
    c = yield
    if c not in _CODES:
        return _ESCAPES.get(c, c if c in "\\/\"'" else f"\\{c}")
    digits = ""
    for _ in range(_CODES[c]):
        digits += yield
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise Broken from None


def _word(c: str, most: int) -> Reading[tuple[str, str]]:
    """What stands there without quotes, and what follows it, no blank."""
    read: list[str] = []
    while c and c not in _ENDS and not c.isspace():
        read.append(c)
        if len(read) > most:
            raise Broken
        c = yield
    return "".join(read), ((yield from blanks()) if c.isspace() else c)


def blanks() -> Reading[str]:
    """Skip them; the first character that is none, "" at the end."""
    while True:
        c = yield
        if not c.isspace():
            return c


def rest(text: str, c: str) -> Reading[None]:
    """Exactly `text`, whose first character was read as `c`."""
    yield from either(c, text)


def either(c: str, *texts: str) -> Reading[str]:
    """One of `texts`, of which none begins another; `c` is the first character."""
    read = c
    while True:
        if read in texts:
            return read
        if not c or not any(text.startswith(read) for text in texts):
            raise Broken
        c = yield
        read += c


def closed(tag: str) -> Reading[None]:
    """Blanks and a closing tag, or the end of the text."""
    c = yield from blanks()
    if c:
        yield from rest(tag, c)


def until(mark: str, most: int | None = None) -> Reading[str]:
    """Text up to `mark`, which is read too; at most so many characters."""
    read: list[str] = []
    last = mark[-1]
    while True:
        c = yield
        if not c or (most is not None and len(read) > most + len(mark)):
            raise Broken
        read.append(c)
        if c == last and "".join(read[-len(mark) :]) == mark:
            return "".join(read[: -len(mark)])
