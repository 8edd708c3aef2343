"""The values that keywords of one type allow, and those that they do not allow. Pure.

Each function of `TYPED` gets a schema's pointer and its keywords, and finds the values that those of its
group allow. The function of a `no_` group finds the values that they do not allow.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from ramify.actors.grammar.schema.cases import UNDENIED, Cases, Loss, claim_at, others_of
from ramify.actors.grammar.schema.document import Document
from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.schema.formats import FORMATS
from ramify.actors.grammar.schema.keywords import count, fraction
from ramify.actors.grammar.schema.limits import MAX_NUMBER_DIGITS
from ramify.actors.grammar.schema.shapes import (
    Array,
    Boolean,
    Check,
    Claim,
    Contains,
    Items,
    Null,
    Number,
    Object,
    Shape,
    String,
    meet,
)

_TYPES: dict[str, Shape] = {
    "null": Null(),
    "boolean": Boolean(),
    "integer": Number(integer=True),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}
FORMATTED = (
    "what is not of a format, or of two at once, is not written: by the standard any string is of it"
)


def _of_types(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    return Cases(tuple(dict.fromkeys(_TYPES[name] for name in _types(pointer, keywords))))


def _no_types(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    types = _types(pointer, keywords)
    found: list[Shape] = []
    for name, shape in _TYPES.items():
        if name in types or name == "integer":
            continue
        if name == "number":
            shape = Number(integer=False) if "integer" in types else Number()
        found.append(shape)
    return Cases(tuple(found))


def _types(pointer: str, keywords: dict[str, Any]) -> list[str]:
    types = keywords["type"]
    types = types if isinstance(types, list) else [types]
    for name in types:
        if not isinstance(name, str) or name not in _TYPES:
            raise UnsupportedSchema(f"{pointer}/type", f"{name!r} is no type: {', '.join(_TYPES)} are")
    return [t for t in types if t != "integer" or "number" not in types]


def _strings(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    least = count(pointer, keywords, "minLength") or 0
    most = count(pointer, keywords, "maxLength")
    tests = list(_tests(pointer, keywords))
    lost: tuple[Loss, ...] = ()
    if "format" in keywords:
        name = keywords["format"]
        if name in FORMATS:
            tests.append(Check("format", name))
            # by the standard a format allows anything: it is an annotation
            lost = (Loss(String, f"{pointer}/format", FORMATTED, told=False),)
        else:
            document.note(f"{pointer}/format: {name!r} is unknown, so it allows anything")
    if most is not None and least > most:
        return Cases(others_of(String()))
    return Cases((*others_of(String()), String(None, frozenset(), tuple(tests), least, most)), lost)


def _tests(pointer: str, keywords: dict[str, Any]) -> Iterator[Check]:
    if "pattern" in keywords:
        pattern = keywords["pattern"]
        if not isinstance(pattern, str):
            raise UnsupportedSchema(f"{pointer}/pattern", "a pattern is a string")
        yield Check("pattern", pattern, f"{pointer}/pattern")


def _no_strings(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    found: list[Shape] = []
    least = count(pointer, keywords, "minLength") or 0
    most = count(pointer, keywords, "maxLength")
    if least:
        found.append(String(most=least - 1))
    if most is not None:
        found.append(String(least=most + 1))
    for test in _tests(pointer, keywords):
        found.append(String(tests=(Check(test.kind, test.text, test.pointer, False),)))
    if keywords.get("format") in FORMATS:  # who asserts formats means what is not of this one
        return Cases(tuple(found), (Loss(String, f"{pointer}/format", FORMATTED),))
    return Cases(tuple(found))


def _numbers(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    found: Shape | None = Number()
    for shape in _bounds(pointer, keywords, document.note):
        found = meet(found, shape) if found is not None else None
    if "multipleOf" in keywords and found is not None:
        found = meet(found, Number(multiples=frozenset({_step(pointer, keywords)})))
    others = others_of(Number())
    return Cases(others if found is None else (*others, found))


def _no_numbers(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    found: list[Shape] = []
    for shape in _bounds(pointer, keywords):
        if shape.low is not None:
            found.append(Number(high=shape.low, high_open=not shape.low_open))
        else:
            found.append(Number(low=shape.high, low_open=not shape.high_open))
    if "multipleOf" in keywords:
        found.append(Number(others=frozenset({_step(pointer, keywords)})))
    return Cases(tuple(found))


def _step(pointer: str, keywords: dict[str, Any]) -> Fraction:
    step = fraction(pointer, keywords, "multipleOf")
    if step <= 0:
        raise UnsupportedSchema(f"{pointer}/multipleOf", "a number over 0 must stand here")
    return step


def _arrays(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    least = count(pointer, keywords, "minItems") or 0
    most = count(pointer, keywords, "maxItems")
    first, rest = document.items(pointer)
    items = Items(tuple(map(claim_at, first)), () if rest is None else claim_at(rest))
    contains: tuple[Contains, ...] = ()
    if "contains" in keywords:
        at_least = count(pointer, keywords, "minContains")
        at_most = count(pointer, keywords, "maxContains")
        wanted = Contains(
            claim_at(f"{pointer}/contains"),
            1 if at_least is None else at_least,
            at_most,
            f"{pointer}/contains",
        )
        if wanted.least or at_most is not None:
            contains = (wanted,)
    unique = f"{pointer}/uniqueItems" if keywords.get("uniqueItems") is True else None
    if "unevaluatedItems" in keywords:
        raise UnsupportedSchema(f"{pointer}/unevaluatedItems", "not supported: use items")
    if most is not None and least > most:
        return Cases(others_of(Array()))
    shape = Array((items,) if items != Items() else (), least, most, contains, unique)
    return Cases((*others_of(Array()), shape))


def _no_arrays(document: Document, pointer: str, keywords: dict[str, Any]) -> Cases:
    found: list[Shape] = []
    lost = [
        Loss(Array, f"{pointer}/{key}", UNDENIED)
        for key, does in (("unevaluatedItems", True), ("uniqueItems", keywords.get("uniqueItems")))
        if key in keywords and does is True
    ]
    if least := count(pointer, keywords, "minItems") or 0:
        found.append(Array(most=least - 1))
    most = count(pointer, keywords, "maxItems")
    if most is not None:
        found.append(Array(least=most + 1))
    first, rest = document.items(pointer)
    for index, at in enumerate(first):
        items = Items((*((),) * index, (Claim("not", at),)))
        found.append(Array((items,), least=index + 1))
    if rest is not None:
        if not first:
            found.append(Array(contains=(Contains((Claim("not", rest),), pointer=rest),)))
        elif document.at(rest) is False:
            found.append(Array(least=len(first) + 1))
        elif document.at(rest) not in (True, {}):
            lost.append(Loss(Array, rest, UNDENIED))
    if "contains" in keywords:
        if count(pointer, keywords, "minContains") in (None, 1) and "maxContains" not in keywords:
            found.append(Array((Items((), (Claim("not", f"{pointer}/contains"),)),)))
        else:
            lost.append(Loss(Array, f"{pointer}/contains", UNDENIED))
    return Cases(tuple(found), tuple(lost))


def _bounds(
    pointer: str, keywords: dict[str, Any], note: Callable[[str], None] | None = None
) -> Iterator[Number]:
    """The bounds, one by one. `note`: is told of numbers that are not written because they have too many
    digits; without it such bounds are refused.
    """
    for key, strict in (("minimum", False), ("exclusiveMinimum", True)):
        if key in keywords:
            far = note is not None and _is_far(keywords[key], -1)
            if far and note is not None:
                note(f"{pointer}/{key}: no numbers below -1e{MAX_NUMBER_DIGITS - 1} are written")
            low = -_FAR if far else fraction(pointer, keywords, key)
            yield Number(low=low, low_open=strict)
    for key, strict in (("maximum", False), ("exclusiveMaximum", True)):
        if key in keywords:
            far = note is not None and _is_far(keywords[key], 1)
            if far and note is not None:
                note(f"{pointer}/{key}: no numbers over 1e{MAX_NUMBER_DIGITS - 1} are written")
            high = _FAR if far else fraction(pointer, keywords, key)
            yield Number(high=high, high_open=strict)


_FAR = Fraction(10 ** (MAX_NUMBER_DIGITS - 1))


def _is_far(value: object, sign: int) -> bool:
    """Whether a bound leaves room for more digits than are written, as that of all doubles does."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value * sign > _FAR


TYPED: dict[str, Callable[[Document, str, dict[str, Any]], Cases]] = {
    "type": _of_types,
    "no_type": _no_types,
    "string": _strings,
    "no_string": _no_strings,
    "number": _numbers,
    "no_number": _no_numbers,
    "array": _arrays,
    "no_array": _no_arrays,
}
