"""Checks of outputs while they are written: names and items that must differ. Pure.

While a schema is spelled, arrays and objects that the automaton alone cannot hold are noted here. Then
their places in the value are found, from the whole value down, by names and indices. A place may have
values of several shapes. If only some of its arrays need checks, all are checked where each can still be
continued; otherwise the automaton has to do it alone (`clashes`).
"""

from collections.abc import Callable

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.expand import Expander
from ramify.actors.grammar.schema.limits import MAX_PLACES
from ramify.actors.grammar.schema.shapes import UNIVERSE, Array, Claims, Object, Shape, joined
from ramify.actors.grammar.schema.unique import how_many
from ramify.protocol.constraints import CheckedPlace

# what may be said of a value, and whether it is inside a checked array
_Alternatives = tuple[frozenset[Claims], bool]


class Checks:
    """Notes on shapes that were spelled. `within`: what is spelled now is inside a checked array, so
    each value must have one text, but for the order of members of free names.
    """

    def __init__(self, alone: frozenset[Array] | None) -> None:
        """`alone`: arrays that are not checked; None: nothing is."""
        self.possible = alone is not None
        self.within = False
        self.arrays: set[tuple[Array, bool]] = set()  # these, within a checked one or not
        self.objects: set[tuple[Object, bool]] = set()
        self.others: dict[tuple[Object, bool], tuple[Claims, ...]] = {}  # claims of free names' values
        self._alone = alone or frozenset()

    def may_check(self, shape: Array) -> bool:
        """Whether the items of `shape` may be kept different by a check."""
        return self.possible and shape not in self._alone


def checked_places(
    checks: Checks,
    expander: Expander,
    spell: Callable[[Claims], Automaton | None],
    note: Callable[[str], None],
    root: Claims,
    clashes: set[Array],
) -> tuple[CheckedPlace, ...]:
    """The places of what `checks` notes in the value of `root`; the first is the value's own.

    `clashes`: gets arrays that cannot be checked.
    """
    if not checks.arrays and not checks.objects:
        return ()
    return _pruned(_Places(checks, expander, spell, note, clashes).all(root))


class _Places:
    def __init__(
        self,
        checks: Checks,
        expander: Expander,
        spell: Callable[[Claims], Automaton | None],
        note: Callable[[str], None],
        clashes: set[Array],
    ) -> None:
        self._spell = spell
        self._note = note
        self._checks = checks
        self._expander = expander
        self._clashes = clashes
        self._numbers: dict[_Alternatives, int] = {}
        self._order: list[_Alternatives] = []

    def all(self, root: Claims) -> list[CheckedPlace]:
        self._number({root}, False)
        return [self._place(claims, within) for claims, within in self._order]  # grows

    def _number(self, claims: set[Claims], within: bool) -> int:
        if not claims:
            return -1
        key = (frozenset(claims), within)
        if key not in self._numbers:
            if len(self._order) >= MAX_PLACES:
                if any(not inside for _, inside in self._checks.objects):
                    raise TooLarge("", f"values are checked at more than {MAX_PLACES} places")
                self._clashes |= {array for array, _ in self._checks.arrays}
                return -1
            self._numbers[key] = len(self._order)
            self._order.append(key)
        return self._numbers[key]

    def _place(self, claims: frozenset[Claims], within: bool) -> CheckedPlace:
        shapes: dict[Shape, None] = {}
        for each in claims:
            shapes.update(dict.fromkeys(self._expander.expand(each).shapes if each else UNIVERSE))
        arrays = [shape for shape in shapes if isinstance(shape, Array)]
        checked = {shape for shape in arrays if (shape, within) in self._checks.arrays}
        if checked and not all(self._may_differ(shape, within) for shape in arrays):
            self._clashes |= checked
        inside = within or bool(checked)
        items, rest = self._items(arrays, inside)
        objects = [shape for shape in shapes if isinstance(shape, Object)]
        distinct = any((shape, within) in self._checks.objects for shape in objects)
        distinct = distinct or (within and Object() in shapes)
        names, others = self._members(objects, within)
        return CheckedPlace(distinct, bool(checked), names, others, items, rest)

    def _may_differ(self, shape: Array, within: bool) -> bool:
        """Whether `shape` may be checked too: there are items enough for each place of it."""
        if shape.unique is not None or (shape.most is not None and shape.most <= 1):
            return True
        first = max((len(items.first) for items in shape.items), default=0)
        try:
            counts = [self._count(self._expander.item(shape, i), within) for i in range(first + 1)]
        except UnsupportedSchema:
            return False
        if first == 0 and counts[0] is not None and counts[0] < shape.least:
            return False
        if first and any(count is not None for count in counts):
            return False
        self._note("where only some arrays of a place have uniqueItems, items of the others differ too")
        return True

    def _count(self, claims: Claims, within: bool) -> int | None:
        before, self._checks.within = self._checks.within, within
        try:
            language = self._spell(claims)
        finally:
            self._checks.within = before
        return 0 if language is None else how_many(language)

    def _items(self, arrays: list[Array], inside: bool) -> tuple[tuple[int, ...], int]:
        longest = max((len(items.first) for shape in arrays for items in shape.items), default=0)
        at: list[set[Claims]] = [set() for _ in range(longest + 1)]
        for shape in arrays:
            for index, claims in enumerate(at):
                own = self._expander.item(shape, index)
                claims.add(own)
                claims.update(joined(own, wanted.claims) for wanted in shape.contains)
        numbers = [self._number(claims, inside) for claims in at]
        return tuple(numbers[:-1]), numbers[-1]

    def _members(self, objects: list[Object], within: bool) -> tuple[dict[str, int], int]:
        listed: dict[str, None] = {}
        for shape in objects:
            listed.update((name, None) for members in shape.members for name, _ in members.named)
            listed.update(dict.fromkeys(shape.required))
        others = {claims for shape in objects for claims in self._free(shape, within)}
        names: dict[str, int] = {}
        for name in listed:
            own = {self._expander.member(shape, name) for shape in objects}
            names[name] = self._number(own, within)
        return names, self._number(others, within)

    def _free(self, shape: Object, within: bool) -> tuple[Claims, ...]:
        if shape == Object():
            return ((),)
        return self._checks.others.get((shape, within), ())


def _pruned(places: list[CheckedPlace]) -> tuple[CheckedPlace, ...]:
    """Without the places below which nothing is checked."""
    needed = [place.distinct or place.unique for place in places]
    above: list[list[int]] = [[] for _ in places]
    for number, place in enumerate(places):
        for inner in (*place.names.values(), place.others, *place.items, place.rest):
            if inner >= 0:
                above[inner].append(number)
    todo = [number for number, is_needed in enumerate(needed) if is_needed]
    for number in todo:  # grows
        for outer in above[number]:
            if not needed[outer]:
                needed[outer] = True
                todo.append(outer)
    if not needed[0]:
        return ()
    kept = [number for number, is_needed in enumerate(needed) if is_needed]
    new = {number: i for i, number in enumerate(kept)}
    new[-1] = -1

    def inside(number: int) -> int:
        return new.get(number, -1)

    return tuple(
        CheckedPlace(
            place.distinct,
            place.unique,
            {name: inside(number) for name, number in place.names.items()},
            inside(place.others),
            tuple(map(inside, place.items)),
            inside(place.rest),
        )
        for place in (places[number] for number in kept)
    )
