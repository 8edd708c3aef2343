"""JSON Schema to an automaton: the texts that a model may write. Pure.

The language is never more than the schema allows. It is less in what every text shares: one spelling of
each value (no escapes but those that JSON needs, integers without a fraction), one order of members (as
listed, then all others), no white space but the one that `Spacing` asks for. Whatever else it leaves out
is in `Lowered.notes`. What cannot be expressed raises `UnsupportedSchema` with a JSON pointer.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from time import process_time
from typing import Literal as OneOf
from typing import NamedTuple

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.expression import union
from ramify.actors.grammar.limits import deadline
from ramify.actors.grammar.nested import ARRAY, OBJECT, Containers, Unsettled, nested
from ramify.actors.grammar.schema.arrays import Arrays, listed_items
from ramify.actors.grammar.schema.assembly import one_of, reduced, words
from ramify.actors.grammar.schema.cases import Loss
from ramify.actors.grammar.schema.checks import Checks, checked_places
from ramify.actors.grammar.schema.document import Document, Schema
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.expand import Expander
from ramify.actors.grammar.schema.limits import ANY_DEPTHS, MAX_EXPRESSIONS, MAX_NESTING, MAX_SECONDS
from ramify.actors.grammar.schema.members import Others, Separators, objects
from ramify.actors.grammar.schema.numbers import Numbers, any_number, cut_digits, number_text
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
from ramify.protocol.constraints import CheckedPlace
from ramify.protocol.errors import ConstraintError

_MOST_CLASHES = 4  # times that a schema is lowered again

Spacing = OneOf["compact", "spaced"]
_SEPARATORS: dict[Spacing, Separators] = {
    "compact": Separators(b",", b":"),
    "spaced": Separators(b", ", b": "),
}


class Lowered(NamedTuple):
    """A schema as an automaton. `notes`: what it leaves out of what the schema allows.

    `places`: where outputs must be checked against what they have written before, too: see
    `protocol.constraints.AutomatonBody`.
    """

    automaton: Automaton
    notes: tuple[str, ...]
    places: tuple[CheckedPlace, ...] = ()


def lower(
    schema: Schema,
    *,
    spacing: Spacing = "compact",
    unroll: int = 0,
    checked: bool = False,
    letters: bool = False,
) -> Lowered:
    """The texts of `schema`. `spacing`: after commas and colons nothing, or one space.

    `unroll`: how often a subschema may be inside itself; 0 refuses recursion. `checked`: outputs can be
    checked while they are written, so names and items may be kept different by `Lowered.places`.
    `letters`: the automaton may be `Nested`, for values that no schema describes; else these are written
    out, to a small depth. Raises `UnsupportedSchema`.
    """
    settings = _LowerSettings(spacing, unroll, process_time() + MAX_SECONDS, letters)
    alone: set[Array] = set()  # arrays that the automaton must keep different by itself
    for _ in range(_MOST_CLASHES if checked else 0):
        clashes: set[Array] = set()
        lowered = _lowered(schema, settings, frozenset(alone), clashes)
        if not clashes:
            return lowered
        alone |= clashes
    return _lowered(schema, settings, None, set())


class _LowerSettings(NamedTuple):
    """Settings of `lower`. `until`: in the processor's time."""

    spacing: Spacing
    unroll: int
    until: float
    letters: bool


def _lowered(
    schema: Schema, settings: _LowerSettings, alone: frozenset[Array] | None, clashes: set[Array]
) -> Lowered:
    """`alone`: None if outputs cannot be checked. `clashes`: gets arrays that must be added to it."""
    refused = None
    free = denies_names = True
    unsettled = not settings.letters
    for by_name, letters, depth in product((True, False), (True, False), ANY_DEPTHS):
        if (depth != ANY_DEPTHS[0] and not free) or (not by_name and not denies_names):
            continue  # nothing to make smaller
        if letters == unsettled:
            continue
        document = Document(schema)
        speller = _Speller(document, settings, depth, by_name, letters, alone)
        try:
            with deadline(settings.until):
                found = speller.value((Claim("is"),))
                automaton = Automaton.from_expression(union()) if found is None else reduced(found)
                if letters:
                    automaton = nested(automaton, containers(settings.spacing))
            places = speller.places(clashes)
        except TooLarge as error:
            refused = error
        except Unsettled as error:
            refused, unsettled = TooLarge("", error.message), True
        except ConstraintError as error:
            refused = TooLarge("", error.message)
        except RecursionError:
            refused = TooLarge("", "the schema is too deep")
        else:
            if automaton.is_empty():
                pointer, reason = speller.lost or ("", "the schema allows none")
                raise UnsupportedSchema(pointer, f"no value can be written: {reason}")
            return Lowered(automaton, tuple(document.notes), places)
        free, denies_names = speller.free or unsettled, speller.denies_names
        if process_time() > settings.until:
            break
    assert refused is not None
    raise refused


class _Speller:
    """Spells values of the schemas of one document."""

    def __init__(
        self,
        document: Document,
        settings: _LowerSettings,
        depth: int,
        by_name: bool,
        letters: bool,
        alone: frozenset[Array] | None,
    ) -> None:
        """`depth`: of values that no schema describes, where they have no `letters`. `alone`: see
        `_lowered`.
        """
        self._document = document
        self._separators = separators = _SEPARATORS[settings.spacing]
        self._unroll = settings.unroll
        self._depth = depth
        self._letters = letters
        self._until = settings.until
        self.free = False  # whether values that no schema describes were written out
        self.lost: tuple[str, str] | None = None  # pointer and reason of the first values that were
        self._strings = Strings()
        self._numbers = Numbers()
        self._expander = Expander(document, self._strings, by_name)
        self._checks = Checks(alone)
        self._arrays = Arrays(self.value, self._finite, document.note, separators.comma, self._checks)
        self._objects = Objects(self.value, self._expander, self._strings, separators, self._checks)
        self._known: dict[tuple[Claims, int, bool], Automaton | None] = {}
        self._shapes: dict[tuple[Shape, int, bool, bool], Automaton | None] = {}
        self._under_way: set[tuple[Claims, int]] = set()
        self._level = 0  # how often the value under way is inside one of the same claims

    @property
    def denies_names(self) -> bool:
        """Whether the opposite of what is said of unlisted names was asked for."""
        return self._expander.denies_names

    def places(self, clashes: set[Array]) -> tuple[CheckedPlace, ...]:
        """The places at which outputs are checked. Adds arrays that cannot be checked, where others may
        stand, to `clashes`.
        """
        claims = (Claim("is"),)
        return checked_places(
            self._checks, self._expander, self.value, self._document.note, claims, clashes
        )

    def value(self, claims: Claims) -> Automaton | None:
        """The values for which `claims` hold, as JSON; None if none do. Raises UnsupportedSchema."""
        if not claims and self._letters and not self._checks.within:
            return free_value()
        if not claims:
            self.free = True
            self._document.note(f"values that no schema describes nest at most {self._depth} deep")
            self._told_of_numbers()
            return any_value(self._depth, self._separators, self._checks.within)
        level = self._level
        while (claims, level) in self._under_way:  # inside itself: one level further down
            level += 1
        if level > self._unroll:
            if not self._unroll:
                raise UnsupportedSchema(
                    claims[0].at, "recursion is not expressed by an automaton", recursive=True
                )
            self._document.note(f"recursion is written at most {self._unroll + 1} deep")
            return None
        known = (claims, level, self._checks.within)
        if known not in self._known:
            self._bound(claims)
            spelled = [part for part in self._parts(claims, level) if part is not None]
            self._known[known] = one_of(spelled) if spelled else None
        return self._known[known]

    def _bound(self, claims: Claims) -> None:
        """Raises TooLarge where enough was lowered."""
        if process_time() > self._until:
            raise TooLarge(
                claims[0].at, f"lowering takes more than {MAX_SECONDS} s: use less oneOf and anyOf"
            )
        if len(self._under_way) > MAX_NESTING or len(self._shapes) > MAX_EXPRESSIONS:
            raise TooLarge(claims[0].at, "the schema spells too many values inside each other")

    def _parts(self, claims: Claims, level: int) -> list[Automaton | None]:
        """Of each shape that the values may have; None: there is no such value."""
        key = (claims, level)
        self._under_way.add(key)
        before, self._level = self._level, level
        try:
            cases = self._expander.expand(claims)
            self._tell(cases.lost)
            parts = [self._shape(shape) for shape in cases.shapes]
            for shape, part in zip(cases.shapes, parts, strict=True):
                if part is None:
                    self._tell(self._expander.emptiness(shape, claims[0].at) or ())
                elif isinstance(shape, Number) and (cut := cut_digits(shape)):
                    self._document.note(f"{claims[0].at}: {cut}")
        finally:
            self._under_way.discard(key)
            self._level = before
        return parts

    def _tell(self, lost: Iterable[Loss]) -> None:
        """Note what no shape has: the one place where a schema may lose values without a refusal."""
        for loss in lost:
            if loss.told:
                self.lost = self.lost or (loss.pointer, loss.reason)
                self._document.note(f"{loss.pointer}: {loss.reason}")

    def _shape(self, shape: Shape) -> Automaton | None:
        outermost = len(self._under_way) == 1
        key = (shape, self._level, self._checks.within, outermost)
        if key not in self._shapes:
            self._shapes[key] = self._spelled(shape, outermost)
        return self._shapes[key]

    def _spelled(self, shape: Shape, outermost: bool) -> Automaton | None:
        match shape:
            case Null():
                return _texts(None)
            case Boolean(only):
                return _texts(*sorted(only))
            case Number():
                if not shape.integer and shape.only is None:
                    self._told_of_numbers()
                return self._numbers.spell(shape, once=self._checks.within)
            case String():
                return self._strings.spell(shape)
            case Array():
                return self._arrays.spell(shape)
            case Object():
                return self._objects.spell(shape, outermost)

    def _told_of_numbers(self) -> None:
        if self._checks.within:
            self._document.note(
                "numbers inside uniqueItems have no exponent, and beside a fraction at most 7 digits"
                " before the point and 8 behind it"
            )

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


@lru_cache(maxsize=8)
def _texts(*values: bool | None) -> Automaton:
    return words(json_text(value).data for value in values)


@lru_cache(maxsize=16)
def any_value(depth: int, separators: Separators, once: bool = False) -> Automaton:
    """Any JSON value in which arrays and objects nest at most `depth` deep. `once`: each number in one
    spelling.
    """
    found = _plain_values(once)
    if depth:
        inner = any_value(depth - 1, separators, once)
        found.append(listed_items([], inner, 0, None, separators.comma))
        found.append(objects([], [Others(any_string(), inner)], 0, None, separators))
    return reduced(one_of(found))


@lru_cache(maxsize=1)
def free_value() -> Automaton:
    """Any JSON value; arrays and objects as letters."""
    return reduced(one_of([*_plain_values(False), words([bytes((OBJECT,))]), words([bytes((ARRAY,))])]))


@lru_cache(maxsize=2)
def containers(spacing: Spacing) -> Containers:
    """Arrays and objects of any values."""
    separators = _SEPARATORS[spacing]
    objects_of_any = objects([], [Others(any_string(), free_value())], 0, None, separators)
    arrays_of_any = listed_items([], free_value(), 0, None, separators.comma)
    return Containers.of(reduced(objects_of_any), reduced(arrays_of_any))


def _plain_values(once: bool) -> list[Automaton]:
    """Strings, numbers, true, false, null."""
    return [any_string(), any_number(once), _texts(False, True), _texts(None)]
