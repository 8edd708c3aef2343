"""Which back end serves a schema: the lowering to an automaton, else llguidance, else none.

llguidance serves what no automaton can (recursion, values of any depth, very long strings). It gets the
schema without formats that it does not know: these allow anything, by the standard. It refuses what it
cannot express, so nothing is weakened. Where both refuse, and only because the schema is inside itself,
the lowering writes it to a certain depth.
"""

import json
from typing import Any, NamedTuple

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.document import Schema, child
from ramify.actors.grammar.schema.errors import Unsupported
from ramify.actors.grammar.schema.limits import MAX_NOTES
from ramify.actors.grammar.schema.lower import Spacing, lower
from ramify.protocol.errors import ConstraintError

try:
    import llguidance
except ImportError:  # it has no wheel for this machine
    llguidance = None  # type: ignore[assignment]

UNROLL = 2  # how often a subschema is inside itself, where only the lowering is left

# the formats that llguidance 1.9 knows
_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    )
)
_PLAIN = frozenset({"enum", "const", "default", "example", "examples"})  # values, not schemas


class Routed(NamedTuple):
    """What a schema became: an automaton, or a grammar for llguidance (its JSON text).

    `notes`: what is left out of what the schema allows.
    """

    automaton: Automaton | None
    grammar: str | None
    notes: tuple[str, ...]


def route(schema: Schema, *, spacing: Spacing = "compact") -> Routed:
    """The back end of `schema`. Raises ConstraintError with a `pointer` if there is none."""
    try:
        lowered = lower(schema, spacing=spacing)
        return Routed(lowered.automaton, None, lowered.notes)
    except Unsupported as error:
        refused = error
    notes: dict[str, None] = {}
    other = "llguidance is not installed"
    if llguidance is not None:
        grammar = _grammar(_known_formats(schema, "", notes), spacing)
        other = _fault(grammar)
        if not other:
            return Routed(None, grammar, tuple(notes))
    if refused.recursive:
        try:
            lowered = lower(schema, spacing=spacing, unroll=UNROLL)
            return Routed(lowered.automaton, None, lowered.notes)
        except Unsupported as error:
            refused = error
    raise ConstraintError(f"{refused} (and llguidance: {other})", pointer=refused.pointer)


def _known_formats(value: Any, pointer: str, notes: dict[str, None]) -> Any:
    """`value`, a schema or a part of one, without formats that llguidance does not know."""
    if isinstance(value, list):
        return [_known_formats(inner, f"{pointer}/{i}", notes) for i, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, inner in value.items():
        if key == "format" and isinstance(inner, str) and inner not in _FORMATS:
            if len(notes) < MAX_NOTES:
                notes.setdefault(f"{pointer}/format: {inner!r} allows anything, as the standard says")
        elif key in _PLAIN:
            found[key] = inner
        else:
            found[key] = _known_formats(inner, child(pointer, key), notes)
    return found


def _grammar(schema: Schema, spacing: Spacing) -> str:
    """`schema` as llguidance takes it, in the same spelling as the lowering's."""
    comma, colon = (",", ":") if spacing == "compact" else (", ", ": ")
    text: str = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={"whitespace_flexible": False, "item_separator": comma, "key_separator": colon},
    )
    return text


def _fault(grammar: str) -> str:
    """What llguidance says against `grammar`; nothing if it can serve it."""
    text: str = llguidance.LLMatcher.validate_grammar(grammar)
    return text.strip().split("\n")[0][:300]
