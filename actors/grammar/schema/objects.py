"""Objects: which members they have, by name and by what names match. Pure.

Members that a schema names come first, in the order in which it names them; then those that only have to
be there; then all others. A value is spelled by `spell`, which is given claims and returns None where no
value is possible.
"""

from collections.abc import Callable
from math import inf

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.assembly import without
from ramify.actors.grammar.schema.checks import Checks
from ramify.actors.grammar.schema.errors import TooLarge, Unchecked, UnsupportedSchema
from ramify.actors.grammar.schema.expand import Expander
from ramify.actors.grammar.schema.members import Listed, Others, Separators, objects
from ramify.actors.grammar.schema.order import merged
from ramify.actors.grammar.schema.shapes import Check, Claims, Object, String, joined
from ramify.actors.grammar.schema.strings import Strings, any_string, any_text, json_text, quoted
from ramify.actors.grammar.schema.unique import how_many
from ramify.protocol.errors import ConstraintError

_MAX_KINDS = 64  # of names, by the patterns that they match
_MAX_COUNTED = 256  # members times counts


class Objects:
    """Spells objects."""

    def __init__(
        self,
        spell: Callable[[Claims], Automaton | None],
        expander: Expander,
        strings: Strings,
        separators: Separators,
        checks: Checks,
    ) -> None:
        self._spell = spell
        self._checks = checks
        self._expander = expander
        self._strings = strings
        self._separators = separators

    def spell(self, shape: Object, outermost: bool = False) -> Automaton | None:
        """The objects of `shape` as JSON. None if there are none. Raises `UnsupportedSchema`.

        `outermost`: they are the whole value, in which other members may come first: `$schema` does.
        """
        names = merged([[name for name, _ in members.named] for members in shape.members])
        names = list(dict.fromkeys((*names, *shape.required)))
        listed = self._listed(shape, names)
        if listed is None:
            return None
        others = self._others(shape, names)
        required_ones = sum(member.required for member in listed)
        bounds = _bounds(shape, required_ones, len(listed), bool(others))
        if bounds is None:
            return None
        least, most = bounds
        free = least > required_ones + 1 and bool(others)
        different: float | None = None  # names of `others`, if none is written twice
        if others and (free or self._checks.within) and self._checks.possible:
            different = self._different_names(shape, others)
        if free and different is None and most is not None:
            found = None
        else:
            found = objects(listed, others, least, most, self._separators, different, outermost)
        if found is None or found.is_empty():
            if free and different is None:
                raise UnsupportedSchema(
                    shape.pointer,
                    "minProperties is not supported here where two names or more are free: list them",
                )
            return None
        return found

    def _listed(self, shape: Object, names: list[str]) -> list[Listed] | None:
        """The members that have one of `names`; None if a required one has no value."""
        listed: list[Listed] = []
        for name in names:
            value = self._spell(self._expander.member(shape, name))
            required = name in shape.required
            if value is not None:
                listed.append(Listed(json_text(name).data, value, required))
            elif required:
                return None
        return listed

    def _different_names(self, shape: Object, others: list[Others]) -> float:
        """Have the names of `others` checked to be different; how many there are."""
        counts = [how_many(each.keys) for each in others]
        names = inf if None in counts else sum(count or 0 for count in counts)
        if self._checks.within and (names < inf or shape.most is not None):
            raise Unchecked(shape.pointer, "few members of any name, in items that have to differ")
        self._checks.objects.add((shape, self._checks.within))
        return names

    # ---- names that the schema does not list ----

    def _others(self, shape: Object, listed: list[str]) -> list[Others]:
        """Members of other names."""
        if shape.most is not None and shape.most <= len(shape.required):
            return []
        patterns = list(dict.fromkeys(p for members in shape.members for p in members.patterns))
        plain: Claims = ()
        for members in shape.members:
            plain = joined(plain, members.others)
        if not patterns and self._spell(plain) is None:
            return []
        try:
            kinds = self._kinds(shape, [(p, pointer) for p, _, pointer in patterns])
        except ConstraintError as error:
            raise TooLarge(shape.pointer, error.message) from None
        taken = [json_text(name).data for name in dict.fromkeys((*listed, *sorted(shape.forbidden)))]
        by_claims: dict[Claims, list[Automaton]] = {}
        for language, matched in kinds:
            claims: Claims = ()
            for members in shape.members:
                mine = [c for p, c, pointer in members.patterns if (p, pointer) in matched]
                for part in mine or [members.others]:
                    claims = joined(claims, part)
            by_claims.setdefault(claims, []).append(language)
        found: list[Others] = []
        self._checks.others[shape, self._checks.within] = tuple(by_claims)
        for claims, languages in by_claims.items():
            value = self._spell(claims)
            if value is not None:
                keys = quoted_union(languages)
                found.append(Others(without(keys, taken) if taken else keys, value))
        return found

    def _kinds(
        self, shape: Object, patterns: list[tuple[str, str]]
    ) -> list[tuple[Automaton, frozenset[tuple[str, str]]]]:
        """All names, taken apart by which of `patterns` they match."""
        names = any_text()
        if shape.names:
            languages = [
                self._strings.language(case)
                for case in self._expander.expand(shape.names).shapes
                if isinstance(case, String)
            ]
            if not languages:
                return []
            names = languages[0].union(*languages[1:])
        kinds = [(names, frozenset[tuple[str, str]]())]
        for pattern in patterns:
            language = self._strings.language(String(tests=(Check("pattern", *pattern),)))
            split = []
            for part, matched in kinds:
                for piece, now in (
                    (part.intersect(language), matched | {pattern}),
                    (part.minus(language), matched),
                ):
                    if not piece.is_empty():
                        split.append((piece, now))
            kinds = split
            if len(kinds) > _MAX_KINDS:
                raise TooLarge(pattern[1], f"patterns tell more than {_MAX_KINDS} kinds of names apart")
        return kinds


def quoted_union(languages: list[Automaton]) -> Automaton:
    """Strings that mean the texts of any of `languages`, as JSON."""
    if languages == [any_text()]:
        return any_string()
    return quoted(languages[0].union(*languages[1:]))


def _bounds(shape: Object, required: int, listed: int, others: bool) -> tuple[int, int | None] | None:
    """How many members at least and at most, where that is to be counted; None if no number will do."""
    least = shape.least if shape.least > required else 0
    most = shape.most
    if not others:
        if least > listed:
            return None
        most = most if most is not None and most < listed else None
    if most is not None and max(required, least) > most:
        return None
    counts = max(least, 1) if most is None else most
    if (least > 1 or most is not None) and counts * (listed + 1) > _MAX_COUNTED:
        raise TooLarge(shape.pointer, f"members times counts: at most {_MAX_COUNTED}")
    return least, most
