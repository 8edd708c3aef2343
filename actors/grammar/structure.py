"""Structures (`protocol.structure`) to automata: free text, tags, calls of tools. Pure.

Free text is an automaton that searches for the triggers, so the whole of a structure is one automaton,
and runs as any other. Schemas inside are lowered; what no automaton can hold is refused, or where it may
be, any object is allowed instead, and a note says so. JSON whose names or items must differ is checked
while it is written, from where it begins (`begins`).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.begins import (
    NOTHING_BEGUN,
    Begun,
    begin,
    behind,
    taken_out,
    without_begins,
)
from ramify.actors.grammar.characters import SPACE
from ramify.actors.grammar.expression import (
    Chars,
    Concat,
    Embedded,
    Expression,
    Literal,
    Repeat,
    concat,
    literal,
    union,
)
from ramify.actors.grammar.fragment import Fragment, reduce
from ramify.actors.grammar.free_text import free_text
from ramify.actors.grammar.marks import Marks
from ramify.actors.grammar.nested import Unsettled, may_hold, nested
from ramify.actors.grammar.network import Exit, ends, network
from ramify.actors.grammar.outlines import regex_automaton
from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_PLACES
from ramify.actors.grammar.schema.lower import Lowered, containers
from ramify.actors.grammar.values import any_parameters, json_value, parameters, until
from ramify.protocol.constraints import UNCHECKED, CheckedPlace, GrammarBackend, JsonChecks
from ramify.protocol.errors import ConstraintError
from ramify.protocol.structure import (
    JsonPart,
    ListPart,
    Part,
    RegexPart,
    SequencePart,
    Structure,
    StructureTag,
    TagsPart,
    TextPart,
    ThoughtPart,
    UnionPart,
    UnlessPart,
    UntilPart,
    XmlPart,
)

T = TypeVar("T")

BLANKS = Repeat(Chars(SPACE), 0, None)
ANYTHING = Automaton.of(  # any bytes, tokens that are no text too
    Fragment(np.zeros((1, 1), np.int32), np.ones(1, np.bool_)), np.zeros(256, np.uint8)
)
ANY_OBJECT = {"type": "object"}


class Built(NamedTuple):
    """A structure as an automaton. `checked`: see `protocol.constraints.AutomatonBody`."""

    automaton: Automaton
    notes: tuple[str, ...]
    checked: JsonChecks


def structure_automaton(structure: Structure, backend: GrammarBackend = "auto") -> Built:
    """`backend`: of regexes inside. Raises ConstraintError that says where."""
    try:
        return _built_in_some_way(structure, backend, letters=True)
    except Unsettled:
        return _built_in_some_way(structure, backend, letters=False)


def _built_in_some_way(structure: Structure, backend: GrammarBackend, *, letters: bool) -> Built:
    """`letters`: of values that no schema describes; raises Unsettled where these are not possible."""
    found = _built(structure, backend, checked=True, letters=letters)
    if found is None:
        found = _built(structure, backend, checked=False, letters=letters)
    assert found is not None  # without places nothing is uncertain
    return found


def _built(
    structure: Structure, backend: GrammarBackend, *, checked: bool, letters: bool
) -> Built | None:
    """`checked`: values may be; None: not here, as it is not certain where they begin."""
    builder = _Builder(Marks(structure.marks), backend, checked=checked, letters=letters)
    whole = builder.automaton(structure.root)
    try:
        rest, begun = builder.behind(whole, structure.after)
    except ConstraintError as error:
        if letters:  # it may end inside of such a value
            raise Unsettled(error.message) from None
        if not builder.places:
            raise
        return None
    found = taken_out(rest)
    if found is None:
        return None
    automaton, begins = found
    if letters:
        automaton = nested(automaton, containers("spaced"), as_it_is=bool(begins))
    checks = JsonChecks(tuple(builder.places), begins, begun) if builder.places else UNCHECKED
    return Built(automaton, tuple(dict.fromkeys(builder.notes)), checks)


class _Builder:
    """Builds the parts of one structure. `places`: of all its values."""

    def __init__(self, marks: Marks, backend: GrammarBackend, *, checked: bool, letters: bool) -> None:
        self._marks = marks
        self._backend: GrammarBackend = backend
        self._checked = checked
        self._letters = letters
        self._values: dict[bytes, Expression] = {}  # by their parts, as JSON
        self._firsts: dict[bytes, int] = {}  # of equal places, as JSON, the number of the first
        self.notes: list[str] = []
        self.places: list[CheckedPlace] = []

    def automaton(self, part: Part) -> Automaton:
        """The texts of `part`."""
        found = self._expression(part)
        return found.automaton if isinstance(found, Embedded) else Automaton.from_expression(found)

    def behind(self, whole: Automaton, after: str) -> tuple[Automaton, Begun]:
        """The automaton of what may follow `after` in `whole`, and the value that `after` begins."""
        if not after:
            return whole, NOTHING_BEGUN
        for data in (self._marks.encode(after), after.encode()):
            state, begun = behind(whole, data)
            if state >= 0:
                rest = reduce(Fragment(whole.next, whole.final, state))
                return Automaton.of(rest, whole.classes), begun
        raise ConstraintError(f"what stands there already cannot be gone on with: {after[-80:]!r}")

    def _expression(self, part: Part) -> Expression:
        match part:
            case TextPart(text):
                return Literal(self._marks.encode(text))
            case RegexPart(regex, at):
                found, notes = _at(at, lambda: regex_automaton(regex, self._backend))
                self.notes += [f"{at}: {note}" if at else note for note in notes]
                return Embedded(found)
            case JsonPart() | XmlPart():
                key = msgspec.json.encode(part)
                if key not in self._values:
                    self._values[key] = self._value(part)
                return self._values[key]
            case SequencePart(parts):
                return Concat(tuple(map(self._expression, parts)))
            case UnionPart(parts):
                return union(*map(self._expression, parts))
            case ListPart(inner, separator):
                return Embedded(self._list(self.automaton(inner), separator))
            case UntilPart(marks):
                return Embedded(self._until(marks))
            case UnlessPart(inner, openings):
                return Embedded(self._unless(self.automaton(inner), openings))
            case ThoughtPart():
                return Embedded(self._thought(part))
            case TagsPart():
                return Embedded(self._tags(part))

    def _value(self, part: JsonPart | XmlPart) -> Expression:
        try:
            found = _at(part.at, lambda: self._lowered(part))
        except ConstraintError as error:
            if part.strict:
                raise
            self.notes.append(f"{error.message}: any object is allowed there")
            if isinstance(part, XmlPart):
                return Embedded(any_parameters(part.style, part.quote, self._marks.encode))
            return Embedded(json_value(ANY_OBJECT, letters=self._letters).automaton)
        self.notes += [f"{part.at}: {note}" if part.at else note for note in found.notes]
        if not found.places:
            return Embedded(found.automaton)
        key = msgspec.json.encode(found.places)
        first = self._firsts.setdefault(key, len(self.places))
        if first == len(self.places):
            self.places += [place.moved(first) for place in found.places]
        return concat(begin(first), Embedded(found.automaton))

    def _lowered(self, part: JsonPart | XmlPart) -> Lowered:
        if isinstance(part, XmlPart):
            return Lowered(*parameters(part.schema, part.style, part.quote, self._marks.encode))
        checked = self._checked and len(self.places) < MAX_PLACES
        return json_value(part.schema, checked=checked, letters=self._letters)

    def _list(self, inner: Automaton, separator: str) -> Automaton:
        if not separator:
            return network([inner], [Exit(0, ends(inner), [0])], [0])
        between = Automaton.from_expression(Literal(self._marks.encode(separator)))
        exits = [Exit(0, ends(inner), [1]), Exit(1, ends(between), [0])]
        return network([inner, between], exits, [0])

    def _until(self, marks: list[str]) -> Automaton:
        spellings = [data for mark in marks for data, _ in self._marks.triggers(mark, mark)]
        return without_begins(until(spellings))

    def _unless(self, inner: Automaton, openings: list[str]) -> Automaton:
        if self._letters and any(may_hold(containers("spaced"), each) for each in openings):
            raise Unsettled("what the text may not begin with is a value")
        begins = union(
            *(literal(each) for each in openings),
            *(Literal(self._marks.encode(each)) for each in openings),
        )
        return inner.minus(Automaton.from_expression(concat(BLANKS, begins, Embedded(ANYTHING))))

    def _thought(self, part: ThoughtPart) -> Automaton:
        begin = Literal(self._marks.encode(part.begin))
        thought = Automaton.from_expression(
            concat(BLANKS, begin, Embedded(self._until([part.end])), BLANKS)
        )
        answer = self._unless(self.automaton(part.part), [part.begin])
        return network([answer, thought], [Exit(1, ends(thought), [0, 1])], [0], [0, 1])

    def _tags(self, part: TagsPart) -> Automaton:
        triggers = part.triggers or [tag.begin for tag in part.tags]
        rests: dict[bytes, list[Expression]] = {}
        contents: list[Expression] = []
        for i, tag in enumerate(part.tags):
            own = [each for each in triggers if tag.begin.startswith(each) and each]
            if not own:
                raise ConstraintError(f"tag {i} begins with none of the triggers: {tag.begin[:64]!r}")
            contents.append(self._content(tag))
            for trigger in own:
                for head, rest in self._marks.triggers(trigger, tag.begin):
                    rests.setdefault(head, []).append(concat(Literal(rest), contents[-1]))
        unused = [each for each in triggers if not any(t.begin.startswith(each) for t in part.tags)]
        if unused:
            raise ConstraintError(f"no tag begins with the trigger {unused[0][:64]!r}")
        return _searching(rests, part)

    def _content(self, tag: StructureTag) -> Expression:
        content = self._expression(tag.content)
        return concat(content, Literal(self._marks.encode(tag.end)))


def _searching(rests: dict[bytes, list[Expression]], part: TagsPart) -> Automaton:
    """Free text, in which each trigger goes on with one of its rests."""
    free = free_text(list(rests))
    text = without_begins(free.automaton)
    alike: dict[tuple[int, ...], list[bytes]] = {}  # triggers that go on in the same way share it
    for trigger, each in rests.items():
        alike.setdefault(tuple(map(_key, each)), []).append(trigger)
    parts = [text]
    exits = []
    order = list(rests)
    last = [0] if not part.at_least_one else []  # where the text may end
    behind = 0  # the free text behind a tag
    if part.at_least_one and not part.stop_after_first:
        parts.append(text)
        last, behind = [1], 1
    for triggers in alike.values():
        at = len(parts)
        parts.append(Automaton.from_expression(union(*rests[triggers[0]])))
        states = np.array([free.ends[order.index(each)] for each in triggers])
        exits += [Exit(each, states, [at]) for each in {0, behind}]
        if part.stop_after_first:
            last.append(at)
        else:
            exits.append(Exit(at, ends(parts[at]), [behind]))
    return network(parts, exits, last)


def _key(rest: Expression) -> int:
    """A key that is equal for rests that are put together of the same parts."""
    assert isinstance(rest, Concat)
    head, content = rest.parts
    assert isinstance(head, Literal)
    return hash((head.data, id(content)))


def _at(place: str, make: Callable[[], T]) -> T:
    """Call `make`; its error names `place`."""
    try:
        return make()
    except UnsupportedSchema as error:
        raise ConstraintError(
            f"{place}: {error}" if place else str(error), pointer=error.pointer
        ) from None
    except ConstraintError as error:
        if not place:
            raise
        raise ConstraintError(f"{place}: {error.message}", **(error.details or {})) from None
