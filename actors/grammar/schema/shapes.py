"""Shapes: sets of JSON values of one type, and what two of them have in common. Pure.

A schema is expanded into a union of shapes (`expand.py`). What lies inside an array or an object stays a
conjunction of claims about subschemas until it is spelled, so that recursion is no trouble here.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar
from typing import Literal as OneOf

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """A claim about a value.

    `is`, `not`: the schema at the pointer `at`; `equals`, `differs`: the JSON text `at`; `never`: no
    value.
    """

    kind: OneOf["is", "not", "equals", "differs", "never"]
    at: str = ""


Claims = tuple[Claim, ...]  # all of them hold; none: any value
ANYTHING: Claims = ()
NEVER: Claims = (Claim("never"),)


class Check(msgspec.Struct, frozen=True):
    """A test of a string, or its opposite. `pattern`: contains a match of it; `format`:
    has that format.
    """

    kind: OneOf["pattern", "format"]
    text: str
    pointer: str = msgspec.field(default="")
    positive: bool = True


class Null(msgspec.Struct, frozen=True):
    """null."""


class Boolean(msgspec.Struct, frozen=True):
    """true, false, or both."""

    only: frozenset[bool] = frozenset({True, False})


class Number(msgspec.Struct, frozen=True):
    """Numbers between bounds. `integer`: True only integers, False only others, None both.

    `others`: steps of which no number is a multiple.
    """

    integer: bool | None = None
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    multiples: frozenset[Fraction] = frozenset()
    only: tuple[Fraction, ...] | None = None
    excluded: frozenset[Fraction] = frozenset()
    others: frozenset[Fraction] = frozenset()

    def holds(self, value: Fraction) -> bool:
        """Whether `value` is one of them."""
        if self.integer is not None and (value.denominator == 1) != self.integer:
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if any((value / m).denominator != 1 for m in self.multiples) or value in self.excluded:
            return False
        if any((value / m).denominator == 1 for m in self.others):
            return False
        return self.only is None or value in self.only


class String(msgspec.Struct, frozen=True):
    """Strings. `least`, `most`: lengths in characters."""

    only: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()
    tests: tuple[Check, ...] = ()
    least: int = 0
    most: int | None = None


class Items(msgspec.Struct, frozen=True):
    """One schema's claims about an array's items: about each of the first ones, then
    about all others.
    """

    first: tuple[Claims, ...] = ()
    rest: Claims = ANYTHING

    def at(self, index: int) -> Claims:
        """The claims about item `index`."""
        return self.first[index] if index < len(self.first) else self.rest


class Contains(msgspec.Struct, frozen=True):
    """At least `least` and at most `most` items fulfil `claims`."""

    claims: Claims
    least: int = 1
    most: int | None = None
    pointer: str = ""


class Array(msgspec.Struct, frozen=True):
    """Arrays. Every one of `items` holds; `unique`: the pointer of a uniqueItems."""

    items: tuple[Items, ...] = ()
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: str | None = None


class Members(msgspec.Struct, frozen=True):
    """One schema's claims about an object's members: by name, by pattern of names, about all others.

    `patterns`: (regex, claims, pointer). `evaluates`: `unevaluatedProperties` beside or above the schema
    does not apply to the members that it describes.
    """

    named: tuple[tuple[str, Claims], ...] = ()
    patterns: tuple[tuple[str, Claims, str], ...] = ()
    others: Claims = ANYTHING
    evaluates: bool = False


class Some(msgspec.Struct, frozen=True):
    """A member that must be there, by any name that is none of `listed`, passes all of `tests` and is as
    `names` say; its value is as `claims` say. `pointer`: of the keyword that asks for it.
    """

    listed: frozenset[str] = frozenset()
    tests: tuple[Check, ...] = ()
    names: Claims = ANYTHING
    claims: Claims = ANYTHING
    pointer: str = ""


class Object(msgspec.Struct, frozen=True):
    """Objects. Every one of `members` holds; `names`: what is said of each name, as a string; each of
    `some` is there.
    """

    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    forbidden: frozenset[str] = frozenset()
    names: Claims = ANYTHING
    least: int = 0
    most: int | None = None
    pointer: str = ""  # of the schema that it comes from first
    some: tuple[Some, ...] = ()


Shape = Null | Boolean | Number | String | Array | Object
UNIVERSE: tuple[Shape, ...] = (Null(), Boolean(), Number(), String(), Array(), Object())

_T = TypeVar("_T")


def joined(a: tuple[_T, ...], b: tuple[_T, ...]) -> tuple[_T, ...]:
    """`a`, then what only `b` has."""
    if not a or not b:
        return a or b
    return tuple(dict.fromkeys((*a, *b)))


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def meet(a: Shape, b: Shape) -> Shape | None:
    """The values of both, or None if there are none for sure."""
    if type(a) is not type(b):
        return None
    if a == b:
        return a
    return _MEETS[type(a)](a, b)


def _numbers(a: Number, b: Number) -> Number | None:
    if a.integer is not None and b.integer is not None and a.integer != b.integer:
        return None
    interval = _interval(a, b)
    if interval is None:
        return None
    found = Number(
        a.integer if b.integer is None else b.integer,
        *interval,
        a.multiples | b.multiples,
        None,
        a.excluded | b.excluded,
        a.others | b.others,
    )
    only = a.only if a.only is not None else b.only
    if only is None:
        return found
    both = b.only if a.only is not None and b.only is not None else only
    left = tuple(v for v in only if v in both and found.holds(v))
    return Number(only=left) if left else None


def _interval(a: Number, b: Number) -> tuple[Fraction | None, bool, Fraction | None, bool] | None:
    """`low`, `low_open`, `high` and `high_open` of both; None: no number is in both."""
    low = max(((s.low, s.low_open) for s in (a, b) if s.low is not None), default=(None, False))
    high = min(((s.high, not s.high_open) for s in (a, b) if s.high is not None), default=(None, True))
    apart = low[1] or not high[1]  # bounds that meet leave nothing
    if low[0] is not None and high[0] is not None and (low[0], apart) > (high[0], False):
        return None
    return low[0], low[1], high[0], not high[1]


def _strings(a: String, b: String) -> String | None:
    least = max(a.least, b.least)
    most = _smaller(a.most, b.most)
    if most is not None and least > most:
        return None
    tests = joined(a.tests, b.tests)
    excluded = a.excluded | b.excluded
    only = a.only if a.only is not None else b.only
    if only is not None:
        both = frozenset(only if a.only is None or b.only is None else b.only)
        only = tuple(
            v
            for v in only
            if v in both and v not in excluded and least <= len(v) and (most is None or len(v) <= most)
        )
        if not only:
            return None
        return String(only=only, tests=tests)
    return String(None, excluded, tests, least, most)


def _arrays(a: Array, b: Array) -> Array | None:
    least = max(a.least, b.least)
    most = _smaller(a.most, b.most)
    if most is not None and least > most:
        return None
    return Array(
        joined(a.items, b.items), least, most, joined(a.contains, b.contains), a.unique or b.unique
    )


def _objects(a: Object, b: Object) -> Object | None:
    required = joined(a.required, b.required)
    forbidden = a.forbidden | b.forbidden
    least = max(a.least, b.least)
    most = _smaller(a.most, b.most)
    if not forbidden.isdisjoint(required) or (most is not None and max(least, len(required)) > most):
        return None
    return Object(
        joined(a.members, b.members),
        required,
        forbidden,
        joined(a.names, b.names),
        least,
        most,
        a.pointer or b.pointer,
        joined(a.some, b.some),
    )


_MEETS: dict[type, Callable[[Any, Any], Shape | None]] = {
    Null: lambda a, b: a,
    Boolean: lambda a, b: Boolean(a.only & b.only) if a.only & b.only else None,
    Number: _numbers,
    String: _strings,
    Array: _arrays,
    Object: _objects,
}
