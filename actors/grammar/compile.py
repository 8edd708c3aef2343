"""Compiles a client's constraint to the executor's body: one call, in a worker's process. Pure.

Regexes, choices and structures become byte automata, JSON Schemas too where they can (`route`); other
schemas and grammars in Lark's form go to llguidance. With the back end "outlines", outlines-core makes
the automata of all regexes and choices, and refuses what it cannot compile.
"""

import json
import zlib

import msgspec

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.automaton_words import rows_of, words_of
from ramify.actors.grammar.expression import literal, union
from ramify.actors.grammar.forced_texts import forced_texts
from ramify.actors.grammar.fragment import TooAmbiguous
from ramify.actors.grammar.grammars import lark_grammar, regex_grammar
from ramify.actors.grammar.likely import likely_words
from ramify.actors.grammar.limits import MAX_BYTES, MAX_CELLS, MAX_CHOICES, MAX_STRUCTURE_BYTES
from ramify.actors.grammar.outlines import choices_automaton, regex_automaton
from ramify.actors.grammar.route import route
from ramify.actors.grammar.structure import structure_automaton
from ramify.protocol.constraints import (
    UNCHECKED,
    AutomatonBody,
    CompiledConstraint,
    ConstraintSpec,
    GrammarBackend,
    GrammarBody,
    JsonChecks,
    encode_body,
)
from ramify.protocol.errors import ConstraintError
from ramify.protocol.structure import decode_structure

PACKED_FROM = 1 << 14  # bytes of words that are compressed: counted text to a fiftieth, in 0.1 ms


def compile_constraint(spec: ConstraintSpec, backend: GrammarBackend = "auto") -> CompiledConstraint:
    """Raises ConstraintError, with a position in the text or a JSON pointer where there is one."""
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise ConstraintError("the constraint holds half a surrogate pair, which is no text") from None
    most = MAX_STRUCTURE_BYTES if spec.kind == "structure" else MAX_BYTES
    if size > most:
        raise ConstraintError(f"the constraint has {size} bytes: at most {most}")
    match spec.kind:
        case "regex":
            return _regex(spec.text, backend)
        case "choices":
            return _ready(_choices(spec.text, backend))
        case "json_schema":
            return _schema(spec)
        case "lark":
            return _grammar(*lark_grammar(spec.text))
        case "structure":
            built = structure_automaton(decode_structure(spec.text), backend)
            return _ready(built.automaton, built.notes, checked=built.checked)


def _regex(pattern: str, backend: GrammarBackend) -> CompiledConstraint:
    try:
        return _ready(*regex_automaton(pattern, backend))
    except TooAmbiguous as error:
        found = regex_grammar(pattern) if backend == "auto" else None
        if found is None:
            raise error from None
        return _grammar(*found)


def _choices(text: str, backend: GrammarBackend) -> Automaton:
    try:
        choices = msgspec.json.decode(text, type=list[str])
        parts = [literal(choice) for choice in choices]
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConstraintError(f"`choices` must be a JSON array of texts: {error}") from None
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ConstraintError(f"`choices` has {len(choices)} texts: 1 to {MAX_CHOICES}")
    if backend == "outlines":
        return choices_automaton(choices)
    return Automaton.from_expression(union(*parts))


def _schema(spec: ConstraintSpec) -> CompiledConstraint:
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}", pointer="") from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a schema is an object, true or false", pointer="")
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConstraintError("the schema holds half a surrogate pair, which is no text") from None
    routed = route(schema, spacing="spaced" if spec.spaced else "compact")
    if routed.automaton is not None:
        checked = JsonChecks(routed.places, ((0, 0),)) if routed.places else UNCHECKED
        return _ready(routed.automaton, routed.notes, likely_words(schema), checked)
    assert routed.grammar is not None
    return _grammar(routed.grammar, routed.notes)


def _ready(
    automaton: Automaton,
    notes: tuple[str, ...] = (),
    likely: tuple[bytes, ...] = (),
    checked: JsonChecks = UNCHECKED,
) -> CompiledConstraint:
    if automaton.is_empty():
        raise ConstraintError("the constraint allows no text at all: no output could satisfy it")
    states, columns = automaton.next.shape
    if states * columns > MAX_CELLS:
        raise ConstraintError(
            f"the constraint's automaton has {states} states and {columns} classes of bytes, a table of "
            f"more than {MAX_CELLS} cells: lower its counts, or name fewer different characters"
        )
    rows = rows_of(automaton)
    data = words_of(automaton, rows).astype("<i4", copy=False).tobytes()
    packed = len(data) > PACKED_FROM
    if packed:
        data = zlib.compress(data, 1)
    body = AutomatonBody(data, packed, forced_texts(automaton, rows), likely, checked)
    held = 8 * states * rows.kinds.shape[1]  # on a CPU: all transitions, and their offsets for the walk
    return CompiledConstraint(encode_body(body), "automaton", notes, held)


def _grammar(text: str, notes: tuple[str, ...]) -> CompiledConstraint:
    return CompiledConstraint(encode_body(GrammarBody(text)), "grammar", notes)
