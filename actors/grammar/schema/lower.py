"""JSON Schema to an automaton: the texts that a model may write. Pure.

The language is never more than the schema allows. It is less in what every text shares: one spelling of
each value (no escapes but those that JSON needs, integers without a fraction), one order of members (as
listed, then all others), no white space but the one that `Spacing` asks for. Whatever else it leaves out
is in `Lowered.notes`. What cannot be expressed raises `Unsupported` with a JSON pointer.
"""

from collections.abc import Iterable
from functools import lru_cache
from time import process_time
from typing import Literal as OneOf
from typing import NamedTuple

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.expression import (
    Embedded,
    union,
)
from ramify.actors.grammar.schema.arrays import Arrays, listed_items
from ramify.actors.grammar.schema.assembly import reduced
from ramify.actors.grammar.schema.document import Document, Schema
from ramify.actors.grammar.schema.errors import TooLarge, Unsupported
from ramify.actors.grammar.schema.expand import Expander, Loss
from ramify.actors.grammar.schema.limits import ANY_DEPTHS, MAX_EXPRESSIONS, MAX_NESTING, MAX_SECONDS
from ramify.actors.grammar.schema.members import Others, Separators, objects
from ramify.actors.grammar.schema.numbers import Numbers, any_number, number_text
from ramify.actors.grammar.schema.objects import Objects
from ramify.actors.grammar.schema.shapes import (
    Array,
    Boolean,
    Claim,
    Claims,
    Null,
    Number,
    Object,
    Shape,
    String,
)
from ramify.actors.grammar.schema.strings import Strings, any_string, json_text
from ramify.protocol.errors import ConstraintError

Spacing = OneOf["compact", "spaced"]
_SEPARATORS: dict[Spacing, Separators] = {
    "compact": Separators(b",", b":"),
    "spaced": Separators(b", ", b": "),
}


class Lowered(NamedTuple):
    """A schema as an automaton. `notes`: what it leaves out of what the schema allows."""

    automaton: Automaton
    notes: tuple[str, ...]


def lower(schema: Schema, *, spacing: Spacing = "compact", unroll: int = 0) -> Lowered:
    """The texts of `schema`. `spacing`: after commas and colons nothing, or one space.

    `unroll`: how often a subschema may be inside itself; 0 refuses recursion. Raises `Unsupported`.
    """
    refused = None
    until = process_time() + MAX_SECONDS
    for depth in ANY_DEPTHS:
        document = Document(schema)
        speller = _Speller(document, _SEPARATORS[spacing], unroll, depth, until)
        try:
            found = speller.value((Claim("is"),))
            automaton = Automaton.from_expression(union()) if found is None else reduced(found)
        except TooLarge as error:
            refused = error
        except ConstraintError as error:
            refused = TooLarge("", error.message)
        except RecursionError:
            refused = TooLarge("", "the schema is too deep")
        else:
            if automaton.is_empty():
                pointer, reason = speller.lost or ("", "the schema allows none")
                raise Unsupported(pointer, f"no value can be written: {reason}")
            return Lowered(automaton, tuple(document.notes))
        if not speller.free or process_time() > until:  # nothing to make smaller, or no time for it
            break
    assert refused is not None
    raise refused


class _Speller:
    """Spells values of the schemas of one document."""

    def __init__(
        self, document: Document, separators: Separators, unroll: int, depth: int, until: float
    ) -> None:
        self._document = document
        self._separators = separators
        self._unroll = unroll
        self._depth = depth
        self._until = until
        self.free = False  # whether there are values that no schema describes
        self.lost: tuple[str, str] | None = None  # pointer and reason of the first values that were
        self._strings = Strings()
        self._numbers = Numbers()
        self._expander = Expander(document, self._strings)
        self._arrays = Arrays(self.value, self._finite, document.note, separators.comma)
        self._objects = Objects(self.value, self._expander, self._strings, separators)
        self._known: dict[tuple[Claims, int], Automaton | None] = {}
        self._shapes: dict[tuple[Shape, int], Automaton | None] = {}
        self._under_way: set[tuple[Claims, int]] = set()
        self._level = 0  # how often the value under way is inside one of the same claims

    def value(self, claims: Claims) -> Automaton | None:
        """The values of which `claims` hold, as JSON. None if there are none. Raises `Unsupported`."""
        if not claims:
            self.free = True
            self._document.note(f"values that no schema describes nest at most {self._depth} deep")
            return any_value(self._depth, self._separators)
        level = self._level
        while (claims, level) in self._under_way:  # inside itself: one level further down
            level += 1
        if level > self._unroll:
            if not self._unroll:
                raise Unsupported(
                    claims[0].at, "recursion is not expressed by an automaton", recursive=True
                )
            self._document.note(f"recursion is written at most {self._unroll + 1} deep")
            return None
        key = (claims, level)
        if key in self._known:
            return self._known[key]
        if process_time() > self._until:
            raise TooLarge(
                claims[0].at, f"lowering takes more than {MAX_SECONDS} s: use less oneOf and anyOf"
            )
        if len(self._under_way) > MAX_NESTING or len(self._shapes) > MAX_EXPRESSIONS:
            raise TooLarge(claims[0].at, "the schema spells too many values inside each other")
        self._under_way.add(key)
        before, self._level = self._level, level
        try:
            cases = self._expander.expand(claims)
            self._tell(cases.lost)
            parts = [self._shape(shape) for shape in cases.shapes]
            for shape, part in zip(cases.shapes, parts, strict=True):
                if part is None:
                    self._tell(self._expander.emptiness(shape, claims[0].at) or ())
        finally:
            self._under_way.discard(key)
            self._level = before
        spelled = [part for part in parts if part is not None]
        found = self._known[key] = _any_of(spelled) if spelled else None
        return found

    def _tell(self, lost: Iterable[Loss]) -> None:
        """Note what no shape has: the one place where a schema may lose values without a refusal."""
        for loss in lost:
            if loss.told:
                self.lost = self.lost or (loss.pointer, loss.reason)
                self._document.note(f"{loss.pointer}: {loss.reason}")

    def _shape(self, shape: Shape) -> Automaton | None:
        key = (shape, self._level)
        if key not in self._shapes:
            self._shapes[key] = self._spelled(shape)
        return self._shapes[key]

    def _spelled(self, shape: Shape) -> Automaton | None:
        match shape:
            case Null():
                return _texts(None)
            case Boolean(only):
                return _texts(*sorted(only))
            case Number():
                return self._numbers.spell(shape)
            case String():
                return self._strings.spell(shape)
            case Array():
                return self._arrays.spell(shape)
            case Object():
                return self._objects.spell(shape)

    def _finite(self, claims: Claims) -> list[bytes] | None:
        """The JSON texts of `claims`, if they allow few values by listing them."""
        found: list[bytes] = []
        for shape in self._expander.expand(claims).shapes:
            match shape:
                case Null():
                    found.append(b"null")
                case Boolean(only):
                    found += [json_text(value).data for value in sorted(only)]
                case Number(only=values) if values is not None:
                    found += [number_text(value).encode() for value in values if shape.holds(value)]
                case String(only=words) if words is not None:
                    found += [json_text(v).data for v in words if self._strings.holds(shape, v)]
                case _:
                    return None
        return list(dict.fromkeys(found))


def _any_of(parts: list[Automaton]) -> Automaton:
    if len(parts) == 1:
        return parts[0]
    return Automaton.from_expression(union(*map(Embedded, parts)))


@lru_cache(maxsize=8)
def _texts(*values: bool | None) -> Automaton:
    return Automaton.from_expression(union(*map(json_text, values)))


@lru_cache(maxsize=16)
def any_value(depth: int, separators: Separators) -> Automaton:
    """Any JSON value in which arrays and objects nest at most `depth` deep."""
    found = [any_string(), any_number(), _texts(False, True), _texts(None)]
    if depth:
        inner = any_value(depth - 1, separators)
        found.append(listed_items([], inner, 0, None, separators.comma))
        found.append(objects([], [Others(any_string(), inner)], 0, None, separators))
    return _any_of(found)
