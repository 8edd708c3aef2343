"""Claims about schemas become unions of shapes. Pure.

What is found is never more than the schema allows. It is less where a keyword cannot be said by shapes,
or not denied: `Cases.lost` tells which. A schema is denied by denying its keywords one by one, down to
the leaves: less than all of a set is never turned into more than all of its complement. What keywords of
one type say stands in `typed.py`, what others say in `applicators.py`, what unions are in `cases.py`.

It does not know how values are spelled.
"""

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from ramify.actors.grammar.schema.applicators import APPLICATORS, KEYWORDS, UNLISTED
from ramify.actors.grammar.schema.cases import (
    EVERYTHING,
    NOTHING,
    Cases,
    Loss,
    claim_at,
    constants,
    differing,
    inside,
)
from ramify.actors.grammar.schema.document import Document, child
from ramify.actors.grammar.schema.errors import Circular, TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_CASES, MAX_CLAIMS
from ramify.actors.grammar.schema.shapes import (
    ANYTHING,
    NEVER,
    UNIVERSE,
    Array,
    Check,
    Claim,
    Claims,
    Members,
    Object,
    Shape,
    Some,
    String,
    joined,
    meet,
)
from ramify.actors.grammar.schema.strings import Strings
from ramify.actors.grammar.schema.typed import FORMATTED, TYPED

_REFUSED = {
    "$dynamicRef": "dynamic references are not supported: use $ref",
    "$recursiveRef": "dynamic references are not supported: use $ref",
}
_MOST_COMPARED = 32  # shapes


class Expander:
    """Expands claims about the schemas of one document. `by_name`: objects that break what is said of
    names that are not listed are written, by each name that is; else they are lost. `denies_names`:
    whether there were such.
    """

    def __init__(self, document: Document, strings: Strings, by_name: bool = True) -> None:
        self.denies_names = False
        self.by_name = by_name
        self.document = document
        self._strings = strings
        self._known: dict[Claims, Cases] = {}
        self._claims: dict[Claim, Cases] = {}
        self._under_way: list[Claim] = []
        self._looking: set[Claims] = set()

    # ---- conjunctions ----

    def expand(self, claims: Claims) -> Cases:
        """The values of which all `claims` hold."""
        found = self._known.get(claims)
        if found is None:
            if len(self._known) > MAX_CLAIMS:
                raise TooLarge("", f"the schema has more than {MAX_CLAIMS} combinations of subschemas")
            found = EVERYTHING
            for claim in claims:
                found = self.both(found, self._claim(claim), claim)
            found = self._known[claims] = self._with_names(found, claims)
        return found

    def both(self, a: Cases, b: Cases, at: Claim | str) -> Cases:
        """The values of both unions. `at`: the claim or pointer that an error names."""
        lost = joined(a.losses(b), b.losses(a))
        if a.shapes is UNIVERSE:
            return Cases(b.shapes, lost)
        if b.shapes is UNIVERSE:
            return Cases(a.shapes, lost)
        found: dict[Shape, None] = {}
        for left in a.shapes:
            for right in b.shapes:
                shape = meet(left, right)
                if shape is None or shape in found:
                    continue
                if shape != left and shape != right:
                    empty = self.emptiness(shape, at if isinstance(at, str) else at.at)
                    if empty is not None:
                        lost = joined(lost, empty)
                        continue
                found[shape] = None
                self._check(found, at)
        return Cases(tuple(found), lost)

    def either(self, parts: Iterable[Cases], at: Claim | str) -> Cases:
        """The values of any of the unions."""
        found: dict[Shape, None] = {}
        lost: tuple[Loss, ...] = ()
        for part in parts:
            found.update(dict.fromkeys(part.shapes))
            lost = joined(lost, part.lost)
            self._check(found, at)
        if all(shape in found for shape in UNIVERSE):
            return Cases(UNIVERSE)
        return Cases(tuple(found), tuple(loss for loss in lost if _TYPE_OF[loss.type] not in found))

    @staticmethod
    def _check(found: dict[Shape, None], at: Claim | str) -> None:
        if len(found) > MAX_CASES:
            pointer = at if isinstance(at, str) else at.at
            raise TooLarge(pointer, f"it is a union of more than {MAX_CASES} cases")

    def emptiness(self, shape: Shape, at: str) -> tuple[Loss, ...] | None:
        """None if `shape` spells something; else what it means nevertheless. `at`: where that shows."""
        match shape:
            case String():
                empty, certain = self._strings.is_empty(shape)
                if empty:
                    return () if certain else (Loss(String, at, FORMATTED),)
            case Object():
                for name in shape.required:
                    lost = self.is_empty(self.member(shape, name))
                    if lost is not None:
                        return inside(Object, lost)
            case Array():
                for index in range(min(shape.least, 8)):
                    lost = self.is_empty(self.item(shape, index))
                    if lost is not None:
                        return inside(Array, lost)
        return None

    def is_empty(self, claims: Claims) -> tuple[Loss, ...] | None:
        """None if some value has all `claims`, or it is not known; else what was lost on the way."""
        if claims in self._looking or len(self._looking) > 12:
            return None
        self._looking.add(claims)
        try:
            cases = self.expand(claims)
        finally:
            self._looking.discard(claims)
        return None if cases.shapes else cases.lost

    def _with_names(self, cases: Cases, claims: Claims) -> Cases:
        """`cases` with a name for each member that objects must have by some name: one case for each
        listed name.

        Names that are not listed are lost.
        """
        if not any(isinstance(shape, Object) and shape.some for shape in cases.shapes):
            return cases
        at = claims[-1]
        found: list[Cases] = []
        for shape in cases.shapes:
            if not isinstance(shape, Object) or not shape.some:
                found.append(Cases((shape,)))
                continue
            mine = Cases((msgspec.structs.replace(shape, some=()),))
            for some in shape.some:
                mine = self.both(mine, self._named(shape, some), at)
            found.append(mine)
        return self.either([*found, Cases((), cases.lost)], at)

    def _named(self, shape: Object, some: Some) -> Cases:
        """The objects with that member, by the names that `shape` lists."""
        names = dict.fromkeys(name for members in shape.members for name, _ in members.named)
        fitting = self.expand(some.names).shapes if some.names else ()
        found: list[Shape] = []
        for name in [*names, *(name for name in shape.required if name not in names)]:
            if name in some.listed or not all(self._strings.matches(test, name) for test in some.tests):
                continue
            if some.names and not self._fits(name, fitting):
                continue
            members = (Members(((name, some.claims),)),) if some.claims else ()
            found.append(Object(members, (name,), pointer=shape.pointer))
        lost = (Loss(Object, some.pointer, UNLISTED),) if self._is_open(shape) else ()
        return Cases(tuple(found), lost)

    def _is_open(self, shape: Object) -> bool:
        """Whether members may have names that are not listed."""
        if any(members.patterns and members.others == NEVER for members in shape.members):
            return True
        others: Claims = ()
        for members in shape.members:
            others = joined(others, members.others)
        return self.is_empty(others) is None

    def _fits(self, name: str, shapes: tuple[Shape, ...]) -> bool:
        return any(isinstance(s, String) and self._strings.holds(s, name) for s in shapes)

    def member(self, shape: Object, name: str) -> Claims:
        """The claims of `shape` about the member `name`."""
        found: Claims = ()
        if name in shape.forbidden:
            return NEVER
        for members in shape.members:
            mine: list[Claims] = [claims for key, claims in members.named if key == name]
            mine += [
                claims
                for pattern, claims, pointer in members.patterns
                if self._strings.matches(Check("pattern", pattern, pointer), name)
            ]
            for claims in mine or [members.others]:
                found = joined(found, claims)
        if shape.names and not self._fits(name, self.expand(shape.names).shapes):
            return NEVER
        return found

    @staticmethod
    def item(shape: Array, index: int) -> Claims:
        """The claims of `shape` about item `index`."""
        found: Claims = ()
        for items in shape.items:
            found = joined(found, items.at(index))
        return found

    # ---- one claim ----

    def _claim(self, claim: Claim) -> Cases:
        found = self._claims.get(claim)
        if found is not None:
            return found
        if claim in self._under_way:
            raise Circular(claim.at, "the schema refers to itself without a value in between")
        if len(self._under_way) > 200:
            raise TooLarge(claim.at, "references lead through more than 200 schemas")
        self._under_way.append(claim)
        try:
            match claim.kind:
                case "never":
                    found = NOTHING
                case "equals":
                    found = Cases(tuple(constants([json.loads(claim.at)])))
                case "differs":
                    found = EVERYTHING
                    for cases in differing([json.loads(claim.at)]):
                        found = self.both(found, cases, claim)
                case _:
                    positive = claim.kind == "is"
                    schema = self.document.at(claim.at)
                    if isinstance(schema, bool):
                        found = EVERYTHING if schema == positive else NOTHING
                    else:
                        found = self._schema(claim.at) if positive else self._denied(claim.at)
        finally:
            self._under_way.pop()
        self._claims[claim] = found
        return found

    def valid(self, pointer: str) -> Cases:
        """The values that the schema at `pointer` allows."""
        return self._claim(Claim("is", pointer))

    def invalid(self, pointer: str) -> Cases:
        """The values that the schema at `pointer` does not allow."""
        return self._claim(Claim("not", pointer))

    def _schema(self, pointer: str) -> Cases:
        """The values that the schema at `pointer` allows. Keywords are taken in their order, the
        members'.
        """
        keywords = self.document.keywords(pointer)
        found = EVERYTHING
        done: set[str] = set()
        for key in keywords:
            if key in _REFUSED:
                raise UnsupportedSchema(child(pointer, key), _REFUSED[key])
            group = _GROUPS.get(key)
            if group == "object" and key != "properties" and "properties" in keywords:
                continue  # members come where `properties` stands
            if group is None:
                if key in _TOLD:
                    self.document.note(f"{child(pointer, key)}: {_TOLD[key]}")
                continue
            if group not in done:
                done.add(group)
                found = self.both(found, self._said(group, pointer, keywords), pointer)
        if "unevaluatedProperties" in keywords and not APPLICATORS.isdisjoint(keywords):
            found = self._evaluated(found, pointer)
        return found

    def _evaluated(self, cases: Cases, pointer: str) -> Cases:
        """`cases`, with the claims of `unevaluatedProperties` about members that nothing beside it
        describes.

        A shape knows the schemas of the branches that it stands for. Values that are valid by more of
        them are lost where these describe other members.
        """
        told = {
            shape: _unevaluated(shape, pointer) for shape in cases.shapes if isinstance(shape, Object)
        }
        lost = cases.lost
        if len(set(told.values())) > 1 and not self._apart(list(told)):
            lost = (*lost, Loss(Object, f"{pointer}/unevaluatedProperties", _BRANCHES))
        found: list[Cases] = [Cases((), lost)]
        for shape in cases.shapes:
            mine = Cases((shape,))
            if isinstance(shape, Object) and (members := told[shape]) is not None:
                mine = self.both(mine, Cases((Object((members,)),)), pointer)
            found.append(mine)
        return self.either(found, pointer)

    def _apart(self, shapes: list[Shape]) -> bool:
        """Whether for sure no two of `shapes`, if they are few, have a value in common."""
        return len(shapes) <= _MOST_COMPARED and all(
            self.disjoint(shape, Cases(tuple(shapes[:i]))) for i, shape in enumerate(shapes)
        )

    def _denied(self, pointer: str) -> Cases:
        """The values that the schema at `pointer` does not allow: each keyword denied by itself."""
        keywords = self.document.keywords(pointer)
        parts: list[Cases] = []
        done: set[str] = set()
        for key in keywords:
            if key in _REFUSED:
                raise UnsupportedSchema(child(pointer, key), _REFUSED[key])
            group = _GROUPS.get(key)
            if group is not None and group not in done:
                done.add(group)
                parts.append(self._said(f"no_{group}", pointer, keywords))
        found = self.either(parts, pointer)
        if found.shapes is UNIVERSE:
            return found
        return found._replace(shapes=tuple(map(_annotating_nothing, found.shapes)))

    def _said(self, group: str, pointer: str, keywords: dict[str, Any]) -> Cases:
        """The values that the keywords of `group` allow, or, for a `no_...` group, do not allow."""
        typed = TYPED.get(group)
        if typed is not None:
            return typed(self.document, pointer, keywords)
        return KEYWORDS[group](self, pointer, keywords)

    def disjoint(self, shape: Shape, other: Cases) -> bool:
        """Whether for sure no value of `shape` is in `other`."""
        if any(loss.type is type(shape) for loss in other.lost):
            return False
        for against in other.shapes:
            both = meet(shape, against)
            if both is not None and self.emptiness(both, "") != ():
                return False
        return True


_KEYWORDS = {
    "reference": ("$ref",),
    "type": ("type",),
    "values": ("const", "enum"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "unevaluatedItems",
    ),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "all": ("allOf",),
    "any": ("anyOf",),
    "one": ("oneOf",),
    "negation": ("not",),
    "condition": ("if", "then", "else"),
    "dependence": ("dependencies", "dependentRequired", "dependentSchemas"),
}
_GROUPS = {keyword: group for group, keywords in _KEYWORDS.items() for keyword in keywords}
_BRANCHES = "members that are described by several branches together are written by one of them only"
_TYPE_OF: dict[type, Shape] = {type(shape): shape for shape in UNIVERSE}
_TOLD = {"nullable": "not a keyword of JSON Schema, so it says nothing: use type with null"}


def _unevaluated(shape: Object, pointer: str) -> Members | None:
    """The `unevaluatedProperties` at `pointer`, for the members of `shape`, which is all that stands
    beside it. None: these are all described.
    """
    known = [members for members in shape.members if members.evaluates]
    if any(members.others for members in known):
        return None
    named = dict.fromkeys((name, ANYTHING) for members in known for name, _ in members.named)
    patterns = dict.fromkeys((p, ANYTHING, at) for members in known for p, _, at in members.patterns)
    rest = claim_at(f"{pointer}/unevaluatedProperties")
    return Members(tuple(named), tuple(patterns), rest, evaluates=True)


def _annotating_nothing(shape: Shape) -> Shape:
    """`shape` as it is below a `not`: `unevaluatedProperties` takes no notice of what it describes."""
    if not isinstance(shape, Object) or not any(members.evaluates for members in shape.members):
        return shape
    plain = [msgspec.structs.replace(members, evaluates=False) for members in shape.members]
    return msgspec.structs.replace(shape, members=tuple(plain))
