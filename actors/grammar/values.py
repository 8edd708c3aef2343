"""The values inside structures: JSON by a schema, and parameters one by one. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.characters import ANY
from ramify.actors.grammar.expression import (
    ANY_TEXT,
    Chars,
    Embedded,
    Expression,
    Literal,
    Repeat,
    concat,
    literal,
    optional,
    union,
)
from ramify.actors.grammar.fragment import Fragment
from ramify.actors.grammar.free_text import free_text
from ramify.actors.grammar.limits import MAX_REPEAT
from ramify.actors.grammar.outlines import search_automaton
from ramify.actors.grammar.route import UNROLL
from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.schema.lower import Lowered, lower
from ramify.protocol.errors import ConstraintError
from ramify.protocol.structure import ParameterStyle

Value = tuple[Automaton, tuple[str, ...]]  # and notes


class _Tags(NamedTuple):
    """What stands around a parameter: up to its value, before its end, its end, and behind that."""

    begin: str
    blank: str
    end: str
    behind: str
    name: str = r'[^<>"\n]'  # what its name is made of


_TAGS: dict[ParameterStyle, _Tags] = {
    "tags": _Tags("<parameter={}>\n", "\n", "</parameter>", "\n", r"[^>\n]"),
    "glm45": _Tags("<arg_key>{}</arg_key>\n<arg_value>", "", "</arg_value>", "\n"),
    "glm47": _Tags("<arg_key>{}</arg_key><arg_value>", "", "</arg_value>", ""),
    "minimax": _Tags('<parameter name="{}">', "", "</parameter>", "\n"),
}
_BEGINS: dict[ParameterStyle, str] = {"python": "{}=", "gemma": "{}:"}
_SEPARATORS: dict[ParameterStyle, str] = {"python": ", ", "gemma": ","}
_NAME = re.compile(r"[^\W\d][\w-]*")
Encode = Callable[[str], bytes]  # text with marks in it
_BOOLEANS = [{"type": "boolean"}]
_ANNOTATIONS = {"title", "description", "default", "examples", "example"}
_SAYS_NOTHING = _ANNOTATIONS | {"$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly"}
_ROOT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_TEXT = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})


def json_value(schema: Any, *, checked: bool = False, letters: bool = False) -> Lowered:
    """The values of a schema. One that is inside itself is written to a certain depth.

    `checked`, `letters`: see `lower`. Raises UnsupportedSchema; ConstraintError for what is no schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the schema is not JSON: {error}", pointer="") from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a schema is an object, true or false", pointer="")
    try:
        return lower(schema, spacing="spaced", checked=checked, letters=letters)
    except UnsupportedSchema as error:
        if not error.recursive:
            raise
        return lower(schema, spacing="spaced", unroll=UNROLL, checked=checked, letters=letters)


def until(triggers: Sequence[bytes]) -> Automaton:
    """Free text up to the first of `triggers`, which belongs to it."""
    found = free_text(triggers)
    final = np.zeros(len(found.automaton), np.bool_)
    final[found.ends] = True
    return Automaton.of(Fragment(found.automaton.next, final), found.automaton.classes)


def parameters(
    schema: Any, style: ParameterStyle = "tags", quote: str = "", encode: Encode = str.encode
) -> Value:
    """The parameters that an object's schema has, in its order, one by one.

    Between tags and between `quote` strings stand as they are, all else as JSON. With separators those
    that are required come first. Raises `UnsupportedSchema` and ConstraintError.
    """
    if schema is None:
        return any_parameters(style, quote, encode), ()
    keywords = set(schema) - _SAYS_NOTHING
    if keywords - _ROOT:
        raise ConstraintError(f"{min(keywords - _ROOT)!r} cannot be kept where parameters have tags")
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or []
    notes: list[str] = []
    tags = _TAGS.get(style)
    if schema.get("additionalProperties", True) is not False:
        notes.append("parameters that `properties` does not list are not written")
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    written: list[tuple[Expression, bool]] = []
    for name in dict.fromkeys([*properties, *required]):
        if not (re.compile(f"{tags.name}*") if tags else _NAME).fullmatch(name):
            raise ConstraintError(f"the parameter's name {name!r} cannot stand in a call")
        value, told = _parameter(properties.get(name, {}), shared, style, quote, encode)
        notes += [f"{name}: {note}" for note in told]
        begin = encode((tags.begin if tags else _BEGINS[style]).format(name))
        written.append((concat(Literal(begin), value), name in required))
    if tags:
        each = [one if needed else optional(one) for one, needed in written]
        return Automaton.from_expression(concat(*each)), tuple(notes)
    ordered = sorted(written, key=lambda each: not each[1])
    return Automaton.from_expression(_separated(ordered, _SEPARATORS[style])), tuple(notes)


def any_parameters(
    style: ParameterStyle = "tags", quote: str = "", encode: Encode = str.encode
) -> Automaton:
    """Any parameters, one by one."""
    if tags := _TAGS.get(style):
        name = Automaton.from_regex(r'[^<>"\n]{1,64}')
        before, after = (Literal(encode(each)) for each in tags.begin.split("{}"))
        text = Embedded(_text_until(encode, tags.end))
        one = concat(before, Embedded(name), after, text, literal(tags.behind))
        return Automaton.from_expression(Repeat(one, 0, None))
    value: Expression = Embedded(_any_value())
    if style == "gemma":
        value = union(value, _quoted(None, encode(quote)))
    name = Automaton.from_regex(f"[A-Za-z_][A-Za-z0-9_-]{{0,63}}{_BEGINS[style].format('')}")
    one = concat(Embedded(name), value)
    more = Repeat(concat(literal(_SEPARATORS[style]), one), 0, None)
    return Automaton.from_expression(optional(concat(one, more)))


@cache
def _any_value() -> Automaton:
    return json_value({}).automaton


def _separated(written: Sequence[tuple[Expression, bool]], separator: str) -> Expression:
    """Each of them, or those that are required, with separators. Linear where the first is required."""
    later: Expression = literal("")  # what may follow one that is there,
    alone: Expression = later  # and what may stand where none is yet
    for one, needed in reversed(written):
        first = concat(one, later)
        behind = concat(literal(separator), one)
        later = concat(behind if needed else optional(behind), later)
        alone = first if needed else union(first, alone)
    return alone


def _parameter(
    schema: Any, shared: Mapping[str, Any], style: ParameterStyle, quote: str, encode: Encode
) -> tuple[Expression, tuple[str, ...]]:
    """A value, and what ends it where there are tags."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    notes: tuple[str, ...] = ()
    tags = _TAGS.get(style)
    if kind == "string" and style != "python":
        found = _plain_text(schema)
        if tags is None:
            return _quoted(found, encode(quote)), ()
        if found is None:
            return concat(Embedded(_text_until(encode, tags.end)), literal(tags.behind)), ()
    elif schema in _BOOLEANS and style == "python":
        return union(literal("True"), literal("False")), ()
    else:
        whole = {**shared, **schema} if isinstance(schema, dict) else schema
        found, notes, _ = json_value(whole)
    if tags is None:
        return Embedded(found), notes
    ended = Automaton.from_expression(concat(Embedded(found), Literal(encode(tags.blank + tags.end))))
    text = ended.intersect(_text_until(encode, tags.end))
    return concat(Embedded(text), literal(tags.behind)), notes


def _quoted(found: Automaton | None, quote: bytes) -> Expression:
    """Text that `found` matches, None: any, between the marks."""
    text = until([quote])
    if found is not None:
        text = text.intersect(Automaton.from_expression(concat(Embedded(found), Literal(quote))))
    return concat(Literal(quote), Embedded(text))


def _text_until(encode: Encode, end: str) -> Automaton:
    """Text up to `end`, as a token or spelled: whoever reads it cannot tell them apart."""
    ends = {encode(end), end.encode()}
    text = concat(ANY_TEXT, union(*map(Literal, sorted(ends))))
    return until(sorted(ends)).intersect(Automaton.from_expression(text))


def _plain_text(schema: Mapping[str, Any]) -> Automaton | None:
    """The strings of a schema as they are; None: any."""
    more = set(schema) - _SAYS_NOTHING - _TEXT
    if more:
        raise ConstraintError(f"{min(more)!r} of a string cannot be kept where parameters have tags")
    found: list[Automaton] = []
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None:
        texts = [literal(each) for each in listed if isinstance(each, str)]
        found.append(Automaton.from_expression(union(*texts)))
    if "pattern" in schema:
        found.append(search_automaton(schema["pattern"]))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        if max(least, most or 0) > MAX_REPEAT:
            raise ConstraintError(f"a string's length can be held to up to {MAX_REPEAT} characters")
        found.append(Automaton.from_expression(Repeat(Chars(ANY), least, most)))
    return found[0].intersect(*found[1:]) if found else None
