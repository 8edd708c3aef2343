"""Unions of shapes, and what they lose of what is meant. Pure."""

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from ramify.actors.grammar.schema.shapes import (
    NEVER,
    UNIVERSE,
    Array,
    Boolean,
    Claim,
    Claims,
    Items,
    Members,
    Null,
    Number,
    Object,
    Shape,
    Some,
    String,
)


class Loss(NamedTuple):
    """Values of one type that are meant, and that no shape has; `pointer`: of the keyword that it is
    because of. `told`: the user hears of it; else only those that take a format as an annotation mean
    these values.
    """

    type: type
    pointer: str
    reason: str
    told: bool = True


class Cases(NamedTuple):
    """A union of shapes. `lost`: values that belong to it but that no shape covers."""

    shapes: tuple[Shape, ...]
    lost: tuple[Loss, ...] = ()

    def losses(self, other: "Cases") -> tuple[Loss, ...]:
        """The part of `lost` that also belongs to `other`."""
        if not self.lost:
            return ()
        types = {type(shape) for shape in other.shapes} | {loss.type for loss in other.lost}
        return tuple(loss for loss in self.lost if loss.type in types)


EVERYTHING = Cases(UNIVERSE)
NOTHING = Cases(())
UNDENIED = "its opposite is not written"


def inside(kind: type, lost: tuple[Loss, ...]) -> tuple[Loss, ...]:
    """The losses of values of `kind` that follow from `lost` inside them."""
    return tuple(loss._replace(type=kind, told=True) for loss in lost)


def claim_at(pointer: str) -> Claims:
    """The claim that the schema at `pointer` holds."""
    return (Claim("is", pointer),)


def others_of(shape: Shape) -> tuple[Shape, ...]:
    """All shapes of other types."""
    return tuple(other for other in UNIVERSE if type(other) is not type(shape))


def _exact(value: float | int) -> Fraction:
    return Fraction(repr(value))


def _equal(value: object) -> Claims:
    return (Claim("equals", json.dumps(value, ensure_ascii=False)),)


def _differs(value: object) -> Claims:
    return (Claim("differs", json.dumps(value, ensure_ascii=False)),)


def constants(values: list[Any]) -> Iterator[Shape]:
    """The shapes of `values`: those of one simple type are one shape."""
    strings = tuple(dict.fromkeys(v for v in values if isinstance(v, str)))
    if strings:
        yield String(only=strings)
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if numbers:
        yield Number(only=tuple(dict.fromkeys(map(_exact, numbers))))
    booleans = frozenset(v for v in values if isinstance(v, bool))
    if booleans:
        yield Boolean(booleans)
    if None in values:
        yield Null()
    for value in values:
        if isinstance(value, list):
            items = Items(tuple(map(_equal, value)), NEVER)
            yield Array((items,), len(value), len(value))
        elif isinstance(value, dict):
            members = Members(tuple((k, _equal(v)) for k, v in value.items()), (), NEVER)
            yield Object((members,), tuple(value))


def differing(values: list[Any]) -> Iterator[Cases]:
    """Unions whose common part is all values that differ from all of `values`."""
    strings = frozenset(v for v in values if isinstance(v, str))
    numbers = frozenset(
        _exact(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)
    )
    booleans = frozenset({True, False}) - {v for v in values if isinstance(v, bool)}
    yield Cases(
        (
            *(() if None in values else (Null(),)),
            *((Boolean(booleans),) if booleans else ()),
            Number(excluded=numbers),
            String(excluded=strings),
            Array(),
            Object(),
        )
    )
    for value in values:
        if isinstance(value, list):
            different: list[Shape] = [Array(least=len(value) + 1)]
            if value:
                different.append(Array(most=len(value) - 1))
            for i, inner in enumerate(value):
                items = Items((*((),) * i, _differs(inner)))
                different.append(Array((items,), len(value), len(value)))
            yield Cases((*others_of(Array()), *different))
        elif isinstance(value, dict):
            other: list[Shape] = [Object(forbidden=frozenset({name})) for name in value]
            other += [
                Object((Members(((name, _differs(inner)),)),), (name,)) for name, inner in value.items()
            ]
            other.append(Object(some=(Some(frozenset(value)),)))
            yield Cases((*others_of(Object()), *other))
