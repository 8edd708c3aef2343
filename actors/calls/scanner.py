"""Reads one JSON object, character by character. Pure.

It finds the object's end, and the first character that cannot be JSON, as soon as they are there;
and it tells which characters are the value of one of the object's own members. Line breaks inside
strings are allowed: models write them. Whether escapes and numbers are good is left to whoever decodes
the object, which is short by then.
"""

import json
import re
from typing import Final

from ramify.protocol.json_value import MAX_DEPTH

_SCALAR = frozenset("+-.0123456789Eaeflnrstu")  # of numbers, true, false and null
_WHOLE = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_MOST = 400  # characters of a number


class Broken(Exception):
    """What was read is no tool call."""


# What comes next. Plain numbers: they are compared for each character.
_VALUE: Final = 0
_FIRST_VALUE: Final = 1  # or "]"
_KEY: Final = 2
_FIRST_KEY: Final = 3  # or "}"
_COLON: Final = 4
_COMMA: Final = 5  # or the end
_STRING: Final = 6  # its next character
_ESCAPED: Final = 7
_IN_SCALAR: Final = 8


class Scanner:
    """`key`: the member whose value is being read; `ended`: the object is complete."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.ended = False
        self._stack: list[str] = []
        self._want: int = _VALUE
        self._is_key = False
        self._name: list[str] = []  # the key that is being read, of the outermost object
        self._scalar: list[str] = []
        self._inside = False

    def push(self, c: str) -> bool:
        """Read one character; whether it is a part of the value of `key`. Raises Broken."""
        want = self._want
        if want == _STRING:
            return self._in_string(c)
        if want == _ESCAPED:
            self._want = _STRING
            return self._in_string(c, escaped=True)
        if want == _IN_SCALAR:
            if c in _SCALAR and len(self._scalar) < _MOST:
                self._scalar.append(c)
                return self._inside
            if _WHOLE.fullmatch("".join(self._scalar)) is None:
                raise Broken
            self._value_ended()
            want = self._want
        inside = self._inside
        if c.isspace():
            return inside
        if want in (_KEY, _FIRST_KEY):
            self._key(c)
        elif want == _COLON:
            if c != ":":
                raise Broken
            self._want = _VALUE
        elif want == _COMMA:
            self._comma(c)
        else:
            return self._value(c)
        return inside

    @property
    def in_string(self) -> bool:
        """Whether it is in a string that is no key: what is neither a quote nor "\\" changes nothing."""
        return self._want == _STRING and not self._is_key

    def _in_string(self, c: str, *, escaped: bool = False) -> bool:
        inside = self._inside
        if escaped or c not in '\\"':
            if self._is_key and len(self._stack) == 1:
                self._name.append(c)
        elif c == "\\":
            self._want = _ESCAPED
            if self._is_key and len(self._stack) == 1:
                self._name.append(c)
        elif not self._is_key:
            self._value_ended()
        else:
            self._is_key, self._want = False, _COLON
            if len(self._stack) == 1:
                self.key = _text(self._name)
        return inside

    def _key(self, c: str) -> None:
        if c == '"':
            self._is_key, self._want = True, _STRING
            self._name.clear()
        elif c == "}" and self._want == _FIRST_KEY:
            self._close(c)
        else:
            raise Broken

    def _comma(self, c: str) -> None:
        if c != ",":
            self._close(c)
            return
        if len(self._stack) == 1:
            self.key = None
        self._want = _KEY if self._stack[-1] == "{" else _VALUE

    def _value(self, c: str) -> bool:
        if len(self._stack) == 1:
            self._inside = True
        inside = self._inside
        if c == '"' and self._stack:
            self._want = _STRING
        elif c == "{" or (c == "[" and self._stack):
            if len(self._stack) > MAX_DEPTH:
                raise Broken
            self._stack.append(c)
            self._want = _FIRST_KEY if c == "{" else _FIRST_VALUE
        elif c == "]" and self._want == _FIRST_VALUE:
            self._close(c)
        elif c in _SCALAR and self._stack:
            self._scalar, self._want = [c], _IN_SCALAR
        else:
            raise Broken
        return inside

    def _close(self, c: str) -> None:
        if not self._stack or (self._stack[-1] == "{") != (c == "}") or c not in "}]":
            raise Broken
        self._stack.pop()
        if self._stack:
            self._value_ended()
        else:
            self.ended = True

    def _value_ended(self) -> None:
        if len(self._stack) == 1:
            self._inside = False
        self._want = _COMMA


def _text(raw: list[str]) -> str:
    """The string that was written so, without its quotes. Raises Broken."""
    try:
        found = json.loads(f'"{"".join(raw)}"', strict=False)
    except ValueError:
        raise Broken from None
    assert isinstance(found, str)
    return found
