"""Keywords that put schemas together, list values or describe objects, and their denials. Pure.

Each function takes the expander, the pointer of a schema and its keywords. It returns a union of shapes:
of the values that the keywords allow, or, for a `no_...` group, of those that they do not allow.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.keywords import count, lists_of_names, names, schema_map
from ramify.actors.grammar.schema.limits import MAX_VALUES
from ramify.actors.grammar.schema.shapes import (
    Check,
    Claim,
    Claims,
    Members,
    Object,
    Shape,
    Some,
    joined,
)

if TYPE_CHECKING:
    from ramify.actors.grammar.schema.expand import Expander

APPLICATORS = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"))
UNLISTED = "members that break it are written only where their names are listed"


# ---- values ----


def _values(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    found = EVERYTHING
    for key in ("const", "enum"):
        if key in keywords:
            values = _listed(pointer, key, keywords)
            found = expander.both(found, Cases(tuple(constants(values))), pointer)
    return found


def _no_values(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    parts = []
    for key in ("const", "enum"):
        if key in keywords:
            part = EVERYTHING
            for cases in differing(_listed(pointer, key, keywords)):
                part = expander.both(part, cases, pointer)
            parts.append(part)
    return expander.either(parts, pointer)


def _listed(pointer: str, key: str, keywords: dict[str, Any]) -> list[Any]:
    values = [keywords[key]] if key == "const" else keywords[key]
    if not isinstance(values, list):
        raise UnsupportedSchema(f"{pointer}/{key}", "a list of values must stand here")
    if len(values) > MAX_VALUES:
        raise TooLarge(f"{pointer}/{key}", f"{len(values)} values: at most {MAX_VALUES}")
    return values


# ---- objects ----


def _object(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
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
    elif "unevaluatedProperties" in keywords and APPLICATORS.isdisjoint(keywords):
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


def _no_object(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    found: list[Shape] = []
    lost: tuple[Loss, ...] = ()
    for name in names(pointer, keywords, "required"):
        found.append(Object(forbidden=frozenset({name}), pointer=pointer))
    for name, at in schema_map(pointer, keywords, "properties").items():
        denied = Members(((name, (Claim("not", at),)),))
        shape = Object((denied,), (name,), pointer=pointer)
        empty = expander.emptiness(shape, at)
        if empty is None:
            found.append(shape)
        else:
            lost = joined(lost, empty)
    beside = "additionalProperties" not in keywords and not APPLICATORS.isdisjoint(keywords)
    if beside and keywords.get("unevaluatedProperties", True) not in (True, {}):
        lost = (*lost, Loss(Object, f"{pointer}/unevaluatedProperties", UNDENIED))
    for some in _strangers(pointer, keywords):
        expander.denies_names = True
        if not expander.by_name:
            lost = joined(lost, (Loss(Object, some.pointer, UNDENIED),))
            continue
        empty = expander.is_empty(some.claims)
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


def _strangers(pointer: str, keywords: dict[str, Any]) -> Iterator[Some]:
    """The members that break what is said of names that are not listed."""
    patterns = schema_map(pointer, keywords, "patternProperties")
    for pattern, at in patterns.items():
        yield Some(tests=(Check("pattern", pattern, at),), claims=(Claim("not", at),), pointer=at)
    if "propertyNames" in keywords:
        at = f"{pointer}/propertyNames"
        yield Some(names=(Claim("not", at),), pointer=at)
    for key in ("additionalProperties", "unevaluatedProperties"):
        if key == "unevaluatedProperties" and not APPLICATORS.isdisjoint(keywords):
            continue  # what it says depends on the schemas beside it
        if key in keywords and keywords[key] not in (True, {}):
            at = f"{pointer}/{key}"
            tests = tuple(Check("pattern", p, where, False) for p, where in patterns.items())
            claims = () if keywords[key] is False else (Claim("not", at),)
            listed = frozenset(schema_map(pointer, keywords, "properties"))
            yield Some(listed, tests, claims=claims, pointer=at)
            return


# ---- what is put together ----


def _reference(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return expander.valid(expander.document.resolve(pointer, keywords["$ref"]))


def _no_reference(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return expander.invalid(expander.document.resolve(pointer, keywords["$ref"]))


def _parts(pointer: str, keywords: dict[str, Any], key: str) -> list[str]:
    parts = keywords[key]
    if not isinstance(parts, list) or not parts:
        raise UnsupportedSchema(f"{pointer}/{key}", "a list of schemas must stand here")
    return [f"{pointer}/{key}/{i}" for i in range(len(parts))]


def _all(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return _each(expander, _parts(pointer, keywords, "allOf"), expander.valid)


def _each(expander: "Expander", parts: list[str], said: Callable[[str], Cases]) -> Cases:
    """The values of which all is true that is `said` of `parts`."""
    found = EVERYTHING
    for part in parts:
        found = expander.both(found, said(part), part)
    return found


def _no_all(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return expander.either(map(expander.invalid, _parts(pointer, keywords, "allOf")), pointer)


def _any(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return expander.either(map(expander.valid, _parts(pointer, keywords, "anyOf")), pointer)


def _no_any(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return _each(expander, _parts(pointer, keywords, "anyOf"), expander.invalid)


def _one(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    """The values of exactly one part. A part that is certainly disjoint from it need
    not be denied.
    """
    parts = _parts(pointer, keywords, "oneOf")
    cases = [expander.valid(part) for part in parts]
    found: list[Cases] = []
    for i, mine in enumerate(cases):
        at: Cases = mine
        for j, other in enumerate(cases):
            if i != j and at.shapes:
                at = _without(expander, at, other, parts[j])
        found.append(at)
    return expander.either(found, pointer)


def _without(expander: "Expander", cases: Cases, other: Cases, pointer: str) -> Cases:
    apart: list[Shape] = []
    together: list[Shape] = []
    for shape in cases.shapes:
        (apart if expander.disjoint(shape, other) else together).append(shape)
    if not together:
        return cases
    denied = expander.invalid(pointer)
    try:
        rest = expander.both(Cases(tuple(together), cases.lost), denied, pointer)
    except TooLarge:  # too many names that one may have and the other may not
        few = tuple(s for s in denied.shapes if not (isinstance(s, Object) and s.some))
        if len(few) == len(denied.shapes):
            raise
        lost = (*denied.lost, Loss(Object, pointer, UNLISTED))
        rest = expander.both(Cases(tuple(together), cases.lost), Cases(few, lost), pointer)
    return expander.either([Cases(tuple(apart)), rest], pointer)


def _no_one(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    """None of the parts, or two of them."""
    parts = _parts(pointer, keywords, "oneOf")
    none = EVERYTHING
    for part in parts:
        none = expander.both(none, expander.invalid(part), part)
    two = [
        expander.both(expander.valid(a), expander.valid(b), pointer)
        for i, a in enumerate(parts)
        for b in parts[:i]
    ]
    return expander.either([none, *two], pointer)


def _negation(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return expander.invalid(f"{pointer}/not")


def _no_negation(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return expander.valid(f"{pointer}/not")


def _conditional(
    expander: "Expander",
    pointer: str,
    keywords: dict[str, Any],
    then: Callable[[str], Cases],
    none: Cases,
) -> Cases:
    if "if" not in keywords:
        return none
    yes, no = expander.valid(f"{pointer}/if"), expander.invalid(f"{pointer}/if")
    if "then" in keywords:
        yes = expander.both(yes, then(f"{pointer}/then"), pointer)
    elif none is NOTHING:
        yes = NOTHING
    if "else" in keywords:
        no = expander.both(no, then(f"{pointer}/else"), pointer)
    elif none is NOTHING:
        no = NOTHING
    return expander.either([yes, no], pointer)


def _condition(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    if "then" not in keywords and "else" not in keywords:
        return EVERYTHING
    return _conditional(expander, pointer, keywords, expander.valid, EVERYTHING)


def _no_condition(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    return _conditional(expander, pointer, keywords, expander.invalid, NOTHING)


def _dependencies(
    expander: "Expander", pointer: str, keywords: dict[str, Any]
) -> Iterator[tuple[str, Cases, Cases]]:
    """For each name: the cases that hold where it is present, and the opposite."""
    for key in ("dependentRequired", "dependencies"):
        if key == "dependencies" and expander.document.draft >= 2019:
            continue
        for name, others in lists_of_names(pointer, keywords, key).items():
            held = Cases((*others_of(Object()), Object(required=tuple(others), pointer=pointer)))
            missing = tuple(Object(forbidden=frozenset({other})) for other in others)
            yield name, held, Cases(missing)
    for key in ("dependentSchemas", "dependencies"):
        if key == "dependencies" and expander.document.draft >= 2019:
            continue
        for name, at in schema_map(pointer, keywords, key, lists=True).items():
            yield name, expander.valid(at), expander.invalid(at)


def _dependence(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    found = EVERYTHING
    if "dependencies" in keywords and expander.document.draft >= 2019:
        expander.document.note(
            f"{pointer}/dependencies: not a keyword since draft 2019-09, so it allows anything"
        )
    for name, held, _ in _dependencies(expander, pointer, keywords):
        absent = Cases((*others_of(Object()), Object(forbidden=frozenset({name}))))
        present = expander.both(Cases((Object(required=(name,), pointer=pointer),)), held, pointer)
        found = expander.both(found, expander.either([absent, present], pointer), pointer)
    return found


def _no_dependence(expander: "Expander", pointer: str, keywords: dict[str, Any]) -> Cases:
    parts = [
        expander.both(Cases((Object(required=(name,), pointer=pointer),)), broken, pointer)
        for name, _, broken in _dependencies(expander, pointer, keywords)
    ]
    return expander.either(parts, pointer)


KEYWORDS: dict[str, Callable[["Expander", str, dict[str, Any]], Cases]] = {
    "values": _values,
    "no_values": _no_values,
    "object": _object,
    "no_object": _no_object,
    "reference": _reference,
    "no_reference": _no_reference,
    "all": _all,
    "no_all": _no_all,
    "any": _any,
    "no_any": _no_any,
    "one": _one,
    "no_one": _no_one,
    "negation": _negation,
    "no_negation": _no_negation,
    "condition": _condition,
    "no_condition": _no_condition,
    "dependence": _dependence,
    "no_dependence": _no_dependence,
}
