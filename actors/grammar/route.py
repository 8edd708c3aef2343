"""Chooses the back end of a schema: the lowering to an automaton, else llguidance, else none.

llguidance serves what no automaton can (recursion, values of any depth, very long strings). It gets the
schema without formats unknown to it: these allow anything, by the standard. It refuses unknown keywords.
Where it would enforce one only for outputs without doubled names, it does not get the schema. So nothing
is weakened. Where both refuse, and only because the schema is inside itself, the lowering writes it to a
certain depth.
"""

from typing import Any, NamedTuple

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.grammars import schema_grammar
from ramify.actors.grammar.limits import MAX_CELLS
from ramify.actors.grammar.schema.document import Schema, child
from ramify.actors.grammar.schema.errors import Circular, TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_NOTES
from ramify.actors.grammar.schema.lower import Lowered, Spacing, lower
from ramify.protocol.constraints import CheckedPlace
from ramify.protocol.errors import ConstraintError

UNROLL = 2  # how often a subschema is inside itself, where only the lowering is left

# the formats that llguidance 1.9 knows
_TIMES = {"date-time", "time", "date", "duration"}
_FORMATS = _TIMES | {"email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
_PLAIN = frozenset({"enum", "const", "default", "example", "examples"})  # values, not schemas


class Routed(NamedTuple):
    """A routed schema: an automaton, or a grammar for llguidance (its JSON text).

    `notes`: allowed values that are left out. `places`: see `Lowered`.
    """

    automaton: Automaton | None
    grammar: str | None
    notes: tuple[str, ...]
    places: tuple[CheckedPlace, ...] = ()


def route(schema: Schema, *, spacing: Spacing = "compact") -> Routed:
    """The back end of `schema`. Raises ConstraintError with a `pointer` if there is none."""
    try:
        return _automaton(lower(schema, spacing=spacing, checked=True, letters=True))
    except Circular as error:  # llguidance would begin with it, and get stuck
        raise ConstraintError(str(error), pointer=error.pointer) from None
    except UnsupportedSchema as error:
        refused = error
    notes: dict[str, None] = {}
    try:
        if (weakened := _weakened(schema, "")) is not None:
            raise ConstraintError(f"{weakened} is not kept, as it may write a name twice")
        grammar, told = schema_grammar(_known_formats(schema, "", notes), spaced=spacing == "spaced")
        return Routed(None, grammar, (*notes, *told))
    except ConstraintError as error:
        other = error.message
    if refused.recursive:
        try:
            return _automaton(lower(schema, spacing=spacing, unroll=UNROLL, checked=True, letters=True))
        except UnsupportedSchema as error:
            refused = error
    raise ConstraintError(f"{refused} (llguidance: {other})", pointer=refused.pointer)


def _automaton(lowered: Lowered) -> Routed:
    states, columns = lowered.automaton.next.shape
    if states * columns > MAX_CELLS:
        raise TooLarge("", f"it needs {states} states: lower its lengths and counts, or list less")
    return Routed(lowered.automaton, None, lowered.notes, lowered.places)


def _weakened(value: Any, pointer: str) -> str | None:
    """The pointer of a minProperties in `value` that doubled names could go round: they count for
    llguidance. One name more than are required has to be another one.
    """
    inner: list[tuple[Any, Any]] = list(enumerate(value)) if isinstance(value, list) else []
    if isinstance(value, dict):
        inner = [(key, part) for key, part in value.items() if key not in _PLAIN]
        least, required = value.get("minProperties"), value.get("required")
        known = len({n for n in required if isinstance(n, str)}) if isinstance(required, list) else 0
        closed = value.get("additionalProperties") is False and not value.get("patternProperties")
        if isinstance(least, int | float) and least > known + 1 and not closed:
            return f"{pointer}/minProperties"
    for key, part in inner:
        found = _weakened(part, child(pointer, str(key)))
        if found is not None:
            return found
    return None


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
