"""Claims about schemas become unions of shapes. Pure.

What is found is never more than the schema allows. It is less where a keyword cannot be said by shapes,
or not denied: `Cases.lost` tells which. A schema is denied by denying its keywords one by one, down to
the leaves: less than all of a set is never turned into more than all of its complement. What keywords of
one type say stands in `typed.py`, what unions are in `cases.py`.

It does not know how values are spelled.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ramify.actors.grammar.schema.cases import (
    EVERYTHING,
    NOTHING,
    UNDENIED,
    Cases,
    Loss,
    claim_at,
    constants,
    differing,
    inside,
    others_of,
)
from ramify.actors.grammar.schema.document import Document, child
from ramify.actors.grammar.schema.errors import Circular, TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.keywords import count, lists_of_names, names, schema_map
from ramify.actors.grammar.schema.limits import MAX_CASES, MAX_CLAIMS, MAX_VALUES
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
        self._by_name = by_name
        self._document = document
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
                found = self._both(found, self._claim(claim), claim)
            found = self._known[claims] = self._with_names(found, claims)
        return found

    def _both(self, a: Cases, b: Cases, at: Claim | str) -> Cases:
        """The values of both unions."""
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

    def _either(self, parts: Iterable[Cases], at: Claim | str) -> Cases:
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
                    lost = self._is_empty(self.member(shape, name))
                    if lost is not None:
                        return inside(Object, lost)
            case Array():
                for index in range(min(shape.least, 8)):
                    lost = self._is_empty(self.item(shape, index))
                    if lost is not None:
                        return inside(Array, lost)
        return None

    def _is_empty(self, claims: Claims) -> tuple[Loss, ...] | None:
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
                mine = self._both(mine, self._named(shape, some), at)
            found.append(mine)
        return self._either([*found, Cases((), cases.lost)], at)

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
        lost = (Loss(Object, some.pointer, _UNLISTED),) if self._is_open(shape) else ()
        return Cases(tuple(found), lost)

    def _is_open(self, shape: Object) -> bool:
        """Whether members may have names that are not listed."""
        if any(members.patterns and members.others == NEVER for members in shape.members):
            return True
        others: Claims = ()
        for members in shape.members:
            others = joined(others, members.others)
        return self._is_empty(others) is None

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
                        found = self._both(found, cases, claim)
                case _:
                    positive = claim.kind == "is"
                    schema = self._document.at(claim.at)
                    if isinstance(schema, bool):
                        found = EVERYTHING if schema == positive else NOTHING
                    else:
                        found = self._schema(claim.at) if positive else self._denied(claim.at)
        finally:
            self._under_way.pop()
        self._claims[claim] = found
        return found

    def _is(self, pointer: str) -> Cases:
        return self._claim(Claim("is", pointer))

    def _not(self, pointer: str) -> Cases:
        return self._claim(Claim("not", pointer))

    def _schema(self, pointer: str) -> Cases:
        """The values that the schema at `pointer` allows. Keywords are taken in their order, the
        members'.
        """
        keywords = self._document.keywords(pointer)
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
                    self._document.note(f"{child(pointer, key)}: {_TOLD[key]}")
                continue
            if group not in done:
                done.add(group)
                found = self._both(found, self._said(group, pointer, keywords), pointer)
        if "unevaluatedProperties" in keywords and not _APPLICATORS.isdisjoint(keywords):
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
                mine = self._both(mine, Cases((Object((members,)),)), pointer)
            found.append(mine)
        return self._either(found, pointer)

    def _apart(self, shapes: list[Shape]) -> bool:
        """Whether for sure no two of `shapes`, if they are few, have a value in common."""
        return len(shapes) <= _MOST_COMPARED and all(
            self._disjoint(shape, Cases(tuple(shapes[:i]))) for i, shape in enumerate(shapes)
        )

    def _denied(self, pointer: str) -> Cases:
        """The values that the schema at `pointer` does not allow: each keyword denied by itself."""
        keywords = self._document.keywords(pointer)
        parts: list[Cases] = []
        done: set[str] = set()
        for key in keywords:
            if key in _REFUSED:
                raise UnsupportedSchema(child(pointer, key), _REFUSED[key])
            group = _GROUPS.get(key)
            if group is not None and group not in done:
                done.add(group)
                parts.append(self._said(f"no_{group}", pointer, keywords))
        found = self._either(parts, pointer)
        if found.shapes is UNIVERSE:
            return found
        return found._replace(shapes=tuple(map(_annotating_nothing, found.shapes)))

    def _said(self, group: str, pointer: str, keywords: dict[str, Any]) -> Cases:
        """The values that the keywords of `group` allow, or, for a `no_...` group, do not allow."""
        typed = TYPED.get(group)
        if typed is not None:
            return typed(self._document, pointer, keywords)
        found: Cases = getattr(self, f"_{group}")(pointer, keywords)
        return found

    # ---- values ----

    def _values(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        found = EVERYTHING
        for key in ("const", "enum"):
            if key in keywords:
                values = self._listed(pointer, key, keywords)
                found = self._both(found, Cases(tuple(constants(values))), pointer)
        return found

    def _no_values(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        parts = []
        for key in ("const", "enum"):
            if key in keywords:
                part = EVERYTHING
                for cases in differing(self._listed(pointer, key, keywords)):
                    part = self._both(part, cases, pointer)
                parts.append(part)
        return self._either(parts, pointer)

    @staticmethod
    def _listed(pointer: str, key: str, keywords: dict[str, Any]) -> list[Any]:
        values = [keywords[key]] if key == "const" else keywords[key]
        if not isinstance(values, list):
            raise UnsupportedSchema(f"{pointer}/{key}", "a list of values must stand here")
        if len(values) > MAX_VALUES:
            raise TooLarge(f"{pointer}/{key}", f"{len(values)} values: at most {MAX_VALUES}")
        return values

    # ---- objects ----

    def _object(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        named = tuple(
            (name, claim_at(at)) for name, at in schema_map(pointer, keywords, "properties").items()
        )
        patterns = tuple(
            (pattern, claim_at(at), at)
            for pattern, at in schema_map(pointer, keywords, "patternProperties").items()
        )
        others: Claims = ()
        if "additionalProperties" in keywords:
            others = claim_at(f"{pointer}/additionalProperties")
        elif "unevaluatedProperties" in keywords and _APPLICATORS.isdisjoint(keywords):
            others = claim_at(f"{pointer}/unevaluatedProperties")
        least = count(pointer, keywords, "minProperties") or 0
        most = count(pointer, keywords, "maxProperties")
        if most is not None and least > most:
            return Cases(others_of(Object()))
        members = Members(named, patterns, others, evaluates=True)
        shape = Object(
            (members,) if named or patterns or others else (),
            tuple(names(pointer, keywords, "required")),
            frozenset(),
            claim_at(f"{pointer}/propertyNames") if "propertyNames" in keywords else (),
            least,
            most,
            pointer,
        )
        return Cases((*others_of(Object()), shape))

    def _no_object(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        found: list[Shape] = []
        lost: tuple[Loss, ...] = ()
        for name in names(pointer, keywords, "required"):
            found.append(Object(forbidden=frozenset({name}), pointer=pointer))
        for name, at in schema_map(pointer, keywords, "properties").items():
            denied = Members(((name, (Claim("not", at),)),))
            shape = Object((denied,), (name,), pointer=pointer)
            empty = self.emptiness(shape, at)
            if empty is None:
                found.append(shape)
            else:
                lost = joined(lost, empty)
        beside = "additionalProperties" not in keywords and not _APPLICATORS.isdisjoint(keywords)
        if beside and keywords.get("unevaluatedProperties", True) not in (True, {}):
            lost = (*lost, Loss(Object, f"{pointer}/unevaluatedProperties", UNDENIED))
        for some in self._strangers(pointer, keywords):
            self.denies_names = True
            if not self._by_name:
                lost = joined(lost, (Loss(Object, some.pointer, UNDENIED),))
                continue
            empty = self._is_empty(some.claims)
            if empty is None:
                found.append(Object(pointer=pointer, some=(some,)))
            else:
                lost = joined(lost, inside(Object, empty))
        if least := count(pointer, keywords, "minProperties") or 0:
            found.append(Object(most=least - 1, pointer=pointer))
        most = count(pointer, keywords, "maxProperties")
        if most is not None:
            found.append(Object(least=most + 1, pointer=pointer))
        return Cases(tuple(found), lost)

    def _strangers(self, pointer: str, keywords: dict[str, Any]) -> Iterator[Some]:
        """The members that break what is said of names that are not listed."""
        patterns = schema_map(pointer, keywords, "patternProperties")
        for pattern, at in patterns.items():
            yield Some(tests=(Check("pattern", pattern, at),), claims=(Claim("not", at),), pointer=at)
        if "propertyNames" in keywords:
            at = f"{pointer}/propertyNames"
            yield Some(names=(Claim("not", at),), pointer=at)
        for key in ("additionalProperties", "unevaluatedProperties"):
            if key == "unevaluatedProperties" and not _APPLICATORS.isdisjoint(keywords):
                continue  # what it says depends on the schemas beside it
            if key in keywords and keywords[key] not in (True, {}):
                at = f"{pointer}/{key}"
                tests = tuple(Check("pattern", p, where, False) for p, where in patterns.items())
                claims = () if keywords[key] is False else (Claim("not", at),)
                listed = frozenset(schema_map(pointer, keywords, "properties"))
                yield Some(listed, tests, claims=claims, pointer=at)
                return

    # ---- what is put together ----

    def _reference(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._is(self._document.resolve(pointer, keywords["$ref"]))

    def _no_reference(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._not(self._document.resolve(pointer, keywords["$ref"]))

    def _parts(self, pointer: str, keywords: dict[str, Any], key: str) -> list[str]:
        parts = keywords[key]
        if not isinstance(parts, list) or not parts:
            raise UnsupportedSchema(f"{pointer}/{key}", "a list of schemas must stand here")
        return [f"{pointer}/{key}/{i}" for i in range(len(parts))]

    def _all(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        found = EVERYTHING
        for part in self._parts(pointer, keywords, "allOf"):
            found = self._both(found, self._is(part), part)
        return found

    def _no_all(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._either(map(self._not, self._parts(pointer, keywords, "allOf")), pointer)

    def _any(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._either(map(self._is, self._parts(pointer, keywords, "anyOf")), pointer)

    def _no_any(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        found = EVERYTHING
        for part in self._parts(pointer, keywords, "anyOf"):
            found = self._both(found, self._not(part), part)
        return found

    def _one(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        """The values of exactly one part. A part that is certainly disjoint from it need
        not be denied.
        """
        parts = self._parts(pointer, keywords, "oneOf")
        cases = [self._is(part) for part in parts]
        found: list[Cases] = []
        for i, mine in enumerate(cases):
            at: Cases = mine
            for j, other in enumerate(cases):
                if i != j and at.shapes:
                    at = self._without(at, other, parts[j])
            found.append(at)
        return self._either(found, pointer)

    def _without(self, cases: Cases, other: Cases, pointer: str) -> Cases:
        apart: list[Shape] = []
        together: list[Shape] = []
        for shape in cases.shapes:
            (apart if self._disjoint(shape, other) else together).append(shape)
        if not together:
            return cases
        denied = self._not(pointer)
        try:
            rest = self._both(Cases(tuple(together), cases.lost), denied, pointer)
        except TooLarge:  # too many names that one may have and the other may not
            few = tuple(s for s in denied.shapes if not (isinstance(s, Object) and s.some))
            if len(few) == len(denied.shapes):
                raise
            lost = (*denied.lost, Loss(Object, pointer, _UNLISTED))
            rest = self._both(Cases(tuple(together), cases.lost), Cases(few, lost), pointer)
        return self._either([Cases(tuple(apart)), rest], pointer)

    def _disjoint(self, shape: Shape, other: Cases) -> bool:
        if any(loss.type is type(shape) for loss in other.lost):
            return False
        for against in other.shapes:
            both = meet(shape, against)
            if both is not None and self.emptiness(both, "") != ():
                return False
        return True

    def _no_one(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        """None of the parts, or two of them."""
        parts = self._parts(pointer, keywords, "oneOf")
        none = EVERYTHING
        for part in parts:
            none = self._both(none, self._not(part), part)
        two = [
            self._both(self._is(a), self._is(b), pointer) for i, a in enumerate(parts) for b in parts[:i]
        ]
        return self._either([none, *two], pointer)

    def _negation(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._not(f"{pointer}/not")

    def _no_negation(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._is(f"{pointer}/not")

    def _conditional(
        self, pointer: str, keywords: dict[str, Any], then: Callable[[str], Cases], none: Cases
    ) -> Cases:
        if "if" not in keywords:
            return none
        yes, no = self._is(f"{pointer}/if"), self._not(f"{pointer}/if")
        if "then" in keywords:
            yes = self._both(yes, then(f"{pointer}/then"), pointer)
        elif none is NOTHING:
            yes = NOTHING
        if "else" in keywords:
            no = self._both(no, then(f"{pointer}/else"), pointer)
        elif none is NOTHING:
            no = NOTHING
        return self._either([yes, no], pointer)

    def _condition(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        if "then" not in keywords and "else" not in keywords:
            return EVERYTHING
        return self._conditional(pointer, keywords, self._is, EVERYTHING)

    def _no_condition(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        return self._conditional(pointer, keywords, self._not, NOTHING)

    def _dependencies(
        self, pointer: str, keywords: dict[str, Any]
    ) -> Iterator[tuple[str, Cases, Cases]]:
        """For each name: the cases that hold where it is present, and the opposite."""
        for key in ("dependentRequired", "dependencies"):
            if key == "dependencies" and self._document.draft >= 2019:
                continue
            for name, others in lists_of_names(pointer, keywords, key).items():
                held = Cases((*others_of(Object()), Object(required=tuple(others), pointer=pointer)))
                missing = tuple(Object(forbidden=frozenset({other})) for other in others)
                yield name, held, Cases(missing)
        for key in ("dependentSchemas", "dependencies"):
            if key == "dependencies" and self._document.draft >= 2019:
                continue
            for name, at in schema_map(pointer, keywords, key, lists=True).items():
                yield name, self._is(at), self._not(at)

    def _dependence(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        found = EVERYTHING
        if "dependencies" in keywords and self._document.draft >= 2019:
            self._document.note(
                f"{pointer}/dependencies: not a keyword since draft 2019-09, so it allows anything"
            )
        for name, held, _ in self._dependencies(pointer, keywords):
            absent = Cases((*others_of(Object()), Object(forbidden=frozenset({name}))))
            present = self._both(Cases((Object(required=(name,), pointer=pointer),)), held, pointer)
            found = self._both(found, self._either([absent, present], pointer), pointer)
        return found

    def _no_dependence(self, pointer: str, keywords: dict[str, Any]) -> Cases:
        parts = [
            self._both(Cases((Object(required=(name,), pointer=pointer),)), broken, pointer)
            for name, _, broken in self._dependencies(pointer, keywords)
        ]
        return self._either(parts, pointer)


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
_APPLICATORS = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"))
_BRANCHES = "members that are described by several branches together are written by one of them only"
_UNLISTED = "members that break it are written only where their names are listed"
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
