"""Arrays: automata of their items, by count and place. Pure.

An item is spelled by `spell`, which is given claims and returns None where no value is possible.
"""

from collections.abc import Callable

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.expression import (
    Concat,
    Embedded,
    Expression,
    Literal,
    Repeat,
    optional,
    union,
)
from ramify.actors.grammar.schema.assembly import Assembly
from ramify.actors.grammar.schema.checks import Checks
from ramify.actors.grammar.schema.errors import TooLarge, Unchecked, UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_COUNT
from ramify.actors.grammar.schema.shapes import Array, Claims, joined
from ramify.actors.grammar.schema.unique import apart, different, how_many, longest


class Arrays:
    """Spells arrays. `finite`: the JSON texts of claims that allow few values, else None."""

    def __init__(
        self,
        spell: Callable[[Claims], Automaton | None],
        finite: Callable[[Claims], list[bytes] | None],
        note: Callable[[str], None],
        comma: bytes,
        checks: Checks,
    ) -> None:
        self._spell = spell
        self._checks = checks
        self._finite = finite
        self._note = note
        self._comma = comma

    def spell(self, shape: Array) -> Automaton | None:
        """The arrays of `shape` as JSON. None if there are none. Raises `UnsupportedSchema`."""
        for bound in (shape.least, shape.most or 0):
            if bound > MAX_COUNT:
                raise TooLarge("", f"a count of {bound}: at most {MAX_COUNT} items are counted")
        if shape.unique is not None and (shape.most is None or shape.most > 1):
            return self._unique(shape)
        if shape.contains:
            return _bracketed(self._containing(shape))
        first = max((len(items.first) for items in shape.items), default=0)
        places = [_claims(shape, i) for i in range(first)]
        return self._listed(places, _claims(shape, first), shape.least, shape.most)

    def _listed(
        self, places: list[Claims], rest: Claims, least: int, most: int | None
    ) -> Automaton | None:
        """Items each by its place, then any number of `rest`."""
        items: list[Automaton] = []
        for claims in places[:most]:
            item = self._spell(claims)
            if item is None:
                most = len(items)
                break
            items.append(item)
        other = self._spell(rest) if most is None or most > len(places) else None
        if other is None:
            most = len(items) if most is None else min(most, len(items))
        if most is not None and most < least:
            return None
        return listed_items(items, other, least, most, self._comma)

    def _containing(self, shape: Array) -> Expression | None:
        """Arrays that must hold a certain item: it is first, second, ... of all."""
        wanted = shape.contains[0]
        if len(shape.contains) > 1 or wanted.most is not None or wanted.least > 1:
            raise UnsupportedSchema(wanted.pointer, "only one contains of one item is supported")
        if any(items.first for items in shape.items):
            raise UnsupportedSchema(wanted.pointer, "contains is not supported beside prefixItems")
        rest = _claims(shape, 0)
        found, other = self._spell(joined(rest, wanted.claims)), self._spell(rest)
        if found is None or other is None or shape.most == 0:
            return None
        least, most = max(shape.least, 1), shape.most
        places = least if most is None else most
        if places > 64:
            raise TooLarge(wanted.pointer, "contains beside a minItems or maxItems over 64")
        before = Concat((Embedded(other), Literal(self._comma)))
        behind = Concat((Literal(self._comma), Embedded(other)))
        cases: list[Expression] = []
        for i in range(places):
            last = most is None and i == places - 1
            ahead = Repeat(before, i, None if last else i)
            rest_of_it = Repeat(behind, max(least - i - 1, 0), None if most is None else most - i - 1)
            cases.append(Concat((ahead, Embedded(found), rest_of_it)))
        return union(*cases)

    def _unique(self, shape: Array) -> Automaton | None:
        """Arrays of different items: of few possible values by the automaton, else by a check of what is
        written, or short.
        """
        if self._checks.may_check(shape) and not self._has_few(shape):
            outer, self._checks.within = self._checks.within, True
            try:
                found = self._checked(shape, outer)
                self._checks.arrays.add((shape, outer))
                return found
            except Unchecked:
                pass
            finally:
                self._checks.within = outer
        return _bracketed(self._different(shape))

    def _has_few(self, shape: Array) -> bool:
        """Whether the automaton alone can hold all arrays of `shape`."""
        if shape.contains or any(items.first for items in shape.items):
            return False
        texts = self._finite(_claims(shape, 0))
        if texts is None:
            return False
        return longest(texts) >= min(len(texts), len(texts) if shape.most is None else shape.most)

    def _checked(self, shape: Array, inner: bool) -> Automaton | None:
        """Arrays of items that are checked to be different. `inner`: the array is itself inside an item
        of such. Raises `Unchecked` where the items before could leave none for a place.
        """
        first = max((len(items.first) for items in shape.items), default=0)
        languages: list[Automaton] = []
        room: int | None = None  # items
        for index in range(first + 1):
            item = self._spell(_claims(shape, index))
            count = 0 if item is None else how_many(item)
            if count is not None and inner:
                raise Unchecked(shape.unique or "", "few items, in items that have to differ")
            if item is None:
                room = index
                break
            if count is not None and any(item.overlaps(other) for other in languages):
                raise Unchecked(shape.unique or "", "items of few values, which others may have too")
            if count is not None and index == first:
                room = first + count
            languages.append(item)
        if room is not None and shape.least > room:
            return None
        if shape.contains:
            return _bracketed(self._containing(shape))
        places = [_claims(shape, i) for i in range(first)]
        return self._listed(places, _claims(shape, first), shape.least, shape.most)

    def _different(self, shape: Array) -> Expression | None:
        """Arrays of different items: exact where few values are possible, else short."""
        pointer = shape.unique or ""
        if shape.contains:
            raise UnsupportedSchema(pointer, "uniqueItems is not supported beside contains")
        first = max((len(items.first) for items in shape.items), default=0)
        texts = None if first else self._finite(_claims(shape, 0))
        if first:
            raise UnsupportedSchema(pointer, "uniqueItems is not supported beside prefixItems")
        if texts is None:
            return self._apart(shape, pointer)
        most = len(texts) if shape.most is None else min(shape.most, len(texts))
        room = longest(texts)
        if shape.least > min(most, room):
            if shape.least > most:
                return None
            raise TooLarge(pointer, f"different items out of {len(texts)} values: at most {room}")
        if room < most:
            most = room
            self._note(f"{pointer}: at most {most} items are written")
        if most == 0:
            return Concat(())
        found = Embedded(different(texts, max(shape.least, 1), most, self._comma))
        return found if shape.least else optional(found)

    def _apart(self, shape: Array, pointer: str) -> Expression | None:
        """Arrays of items that differ in how they begin: few of them, or only one."""
        item = self._spell(_claims(shape, 0))
        if item is None:
            return None if shape.least else Concat(())
        found, most = apart(item, max(shape.least, 1), shape.most, self._comma)
        if shape.least > most:
            raise UnsupportedSchema(
                pointer,
                f"of items that are not listed at most {most} can be kept different: give an enum",
            )
        same = f"more than {most} items, and items that begin with near letters,"
        self._note(f"{pointer}: {same if most > 1 else 'more than one item'} cannot be written")
        return Embedded(found) if shape.least else optional(Embedded(found))


def _bracketed(inside: Expression | None) -> Automaton | None:
    if inside is None:
        return None
    return Automaton.from_expression(Concat((Literal(b"["), inside, Literal(b"]"))))


def _claims(shape: Array, index: int) -> Claims:
    found: Claims = ()
    for items in shape.items:
        found = joined(found, items.at(index))
    return found


def listed_items(
    items: list[Automaton], other: Automaton | None, least: int, most: int | None, comma: bytes
) -> Automaton:
    """Arrays of `items`, then any number of `other`; at least `least` items and at most `most`."""
    count = max(len(items) + 1, least) if most is None else most
    if other is not None:
        items = items + [other] * (count - len(items))
    whole = Assembly(items, b"[]" + comma)
    start, closed = whole.state(), whole.state()
    whole.final(closed)
    behind = [whole.state() for _ in range(count + 1)]  # so many items
    whole.edge(start, whole.symbol(ord("[")), behind[0])
    closing = whole.symbol(ord("]"))
    for i, state in enumerate(behind):
        if i >= least:
            whole.edge(state, closing, closed)
    entry = -1
    for i, item in enumerate(items):
        entry = whole.place(item, behind[i + 1])
        if i:
            whole.text(behind[i], comma, entry)
        else:
            whole.begin_as(behind[0], entry)
    if most is None:
        whole.text(behind[count], comma, entry)
    return whole.finish()
