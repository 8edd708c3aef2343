"""Expressions: what an automaton is compiled from (`Automaton.from_expression`). Pure.

The regex parser makes them, and so does the lowering of JSON Schema. They are put together as objects,
never as text, so nothing has to be escaped, and an automaton can stand anywhere inside (`Embedded`):

    concat(literal('{"id":'), Embedded(ids), literal("}"))

Use one object twice where the same language stands twice: it is compiled once.
"""

from typing import TYPE_CHECKING
from typing import Literal as OneOf

import msgspec

from ramify.actors.grammar.characters import ANY, Ranges

if TYPE_CHECKING:
    from ramify.actors.grammar.automaton import Automaton

AnchorKind = OneOf["start", "end", "word", "not word"]


class Expression(msgspec.Struct, frozen=True, eq=False):
    """A language of texts. Compared by identity."""


class Literal(Expression, frozen=True, eq=False):
    """A fixed text. `data`: its UTF-8."""

    data: bytes


class Chars(Expression, frozen=True, eq=False):
    """One character of a set."""

    chars: Ranges


class Concat(Expression, frozen=True, eq=False):
    """The parts one behind the other; none: the empty text."""

    parts: tuple[Expression, ...]


class Union(Expression, frozen=True, eq=False):
    """Any of the parts; none: nothing at all, not even the empty text."""

    parts: tuple[Expression, ...]


class Repeat(Expression, frozen=True, eq=False):
    """`part` at least `least` times and at most `most` times (None: no bound)."""

    part: Expression
    least: int
    most: int | None


class Anchor(Expression, frozen=True, eq=False):
    """The empty text, at the start or end of the whole text, or at (not at) an ASCII word's border."""

    kind: AnchorKind


class Look(Expression, frozen=True, eq=False):
    """The empty text, where `part` matches (`negative`: does not match) a beginning of what follows."""

    part: Expression
    negative: bool


class Embedded(Expression, frozen=True, eq=False):
    """The language of an `Automaton`."""

    automaton: "Automaton"


EMPTY = Concat(())
ANY_TEXT = Repeat(Chars(ANY), 0, None)


def literal(text: str) -> Literal:
    """Exactly `text`. Raises ValueError if it has a surrogate, which has no UTF-8."""
    return Literal(text.encode())


def concat(*parts: Expression) -> Expression:
    """`parts` one behind the other."""
    return parts[0] if len(parts) == 1 else Concat(parts)


def union(*parts: Expression) -> Expression:
    """Any of `parts`."""
    return parts[0] if len(parts) == 1 else Union(parts)


def optional(part: Expression) -> Expression:
    """`part` or the empty text."""
    return Repeat(part, 0, 1)
