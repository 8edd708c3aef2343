"""The values inside structures: JSON by a schema, and parameters between tags (Qwen3-Coder). Pure."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.characters import ANY
from ramify.actors.grammar.expression import (
    ANY_TEXT,
    Chars,
    Embedded,
    Expression,
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

Value = tuple[Automaton, tuple[str, ...]]  # and notes

_END = "</parameter>"
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


def xml_parameters(schema: Any) -> Value:
    """The parameters that an object's schema has, in its order, each between tags of its own.

    Strings stand there as they are, all else as JSON. Raises `UnsupportedSchema` and ConstraintError.
    """
    if schema is None:
        return any_parameters(), ()
    keywords = set(schema) - _SAYS_NOTHING
    if keywords - _ROOT:
        raise ConstraintError(f"{min(keywords - _ROOT)!r} cannot be kept where parameters have tags")
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or []
    notes: list[str] = []
    if schema.get("additionalProperties", True) is not False:
        notes.append("parameters that `properties` does not list are not written")
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    written: list[Expression] = []
    for name in dict.fromkeys([*properties, *required]):
        if ">" in name or "\n" in name:
            raise ConstraintError(f"the parameter's name {name!r} cannot stand in a tag")
        value, told = _parameter(properties.get(name, {}), shared)
        notes += [f"{name}: {note}" for note in told]
        one = concat(literal(f"<parameter={name}>\n"), value, literal("\n"))
        written.append(one if name in required else optional(one))
    return Automaton.from_expression(concat(*written)), tuple(notes)


@cache
def any_parameters() -> Automaton:
    """Any parameters, each between tags of its own."""
    name = Automaton.from_regex("<parameter=[^<>\n]{1,64}>\n")
    one = concat(Embedded(name), Embedded(_text_until_end()), literal("\n"))
    return Automaton.from_expression(Repeat(one, 0, None))


def _parameter(schema: Any, shared: Mapping[str, Any]) -> tuple[Expression, tuple[str, ...]]:
    """A value and the end of its tag."""
    notes: tuple[str, ...] = ()
    if isinstance(schema, dict) and schema.get("type") == "string":
        found = _plain_text(schema)
        if found is None:
            return Embedded(_text_until_end()), ()
    else:
        whole = {**shared, **schema} if isinstance(schema, dict) else schema
        found, notes, _ = json_value(whole)
    ended = Automaton.from_expression(concat(Embedded(found), literal(f"\n{_END}")))
    return Embedded(ended.intersect(_text_until_end())), notes


def _text_until_end() -> Automaton:
    return until([_END.encode()]).intersect(Automaton.from_expression(ANY_TEXT))


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
