"""The expressions that a program adds to its state: text, turns, and gaps for the model. Pure values.

    s += user("Capital of France?") + assistant(gen("city", stop="."))

`flatten` turns an expression into steps, in order. Nothing here knows branches or sockets.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, Unpack, cast

import msgspec

from ramify.clients.constraints import constrained
from ramify.clients.images import Image
from ramify.clients.options import GapOptions, GenerateOptions, SelectOptions
from ramify.protocol.pictures import MARK

TurnRole: TypeAlias = Literal["system", "user", "assistant", "tool"]


class _Node(msgspec.Struct, frozen=True):
    """Base of expressions: `+` puts them one after the other."""

    def __add__(self, other: "Expression") -> "Sequence":
        return Sequence((cast(Expression, self), other))

    def __radd__(self, other: "Expression") -> "Sequence":
        return Sequence((other, cast(Expression, self)))


class Gen(_Node, frozen=True):
    """A gap for the model to fill. `name`: how the program reads its text."""

    name: str | None
    options: GenerateOptions
    type: Any = None  # whose JSON the text is


class Choose(_Node, frozen=True):
    """A gap that gets one of several texts."""

    name: str | None
    choices: tuple[str, ...]
    options: SelectOptions


class ShownImage(_Node, frozen=True):
    """A picture."""

    data: bytes


class Turn(_Node, frozen=True):
    """One turn of a chat."""

    role: TurnRole
    parts: "tuple[Expression, ...]"


class Sequence(_Node, frozen=True):
    """Expressions, one after the other."""

    parts: "tuple[Expression, ...]"


Gap: TypeAlias = Gen | Choose
Expression: TypeAlias = str | Gap | ShownImage | Turn | Sequence


class Text(msgspec.Struct, frozen=True):
    """A step: text as it is. `image`: the picture that it is the mark of."""

    text: str
    image: bytes | None = None


class Begin(msgspec.Struct, frozen=True):
    """A step: a turn of `role` begins."""

    role: TurnRole


class End(msgspec.Struct, frozen=True):
    """A step: the turn is over."""


Step: TypeAlias = Text | Gap | Begin | End


def gen(name: str | None = None, /, **options: Unpack[GapOptions]) -> Gen:
    """Make a gap: the model goes on from here. `options`: the fields of `generate`.

    `stop` may be one string. Without a `name` the text is generated and cannot be read by itself.
    `regex`, `json_schema`, `choices`, `grammar` or `type` say what it must be; of a `type` (a msgspec
    Struct, a dataclass, a TypedDict, a pydantic model) `await s["name"].parsed()` gives the object;
    a program without `async` asks `s.parsed("name")`.
    """
    stop = options.get("stop")
    if isinstance(stop, str):
        options["stop"] = [stop]
    fields, kind = constrained(options)
    return Gen(name, cast(GenerateOptions, fields), kind)


def select(
    name: str | None = None, /, choices: Iterable[str] = (), **options: Unpack[SelectOptions]
) -> Choose:
    """Make a gap for one of several texts: the model chooses. `options`: the fields of `select`.

    `s["name"]` is the choice; `s.result("name").scores` are the scores of all.
    """
    given = tuple(choices)
    if isinstance(choices, str) or not given or not all(given):
        raise TypeError("select() needs `choices`: a list of texts, none of them empty")
    return Choose(name, given, options)


def image(source: "str | os.PathLike[str] | bytes") -> ShownImage:
    """Show a picture, in a turn or in raw text: a file's path, or its bytes (PNG, JPEG, WebP, GIF)."""
    return ShownImage(Image(source).data)


def system(*parts: Expression) -> Turn:
    """Make a turn of instructions, the first of a chat."""
    return Turn("system", parts)


def user(*parts: Expression) -> Turn:
    """Make a turn of the user."""
    return Turn("user", parts)


def assistant(*parts: Expression) -> Turn:
    """Make a turn of the model: given text, gaps to fill, or both."""
    return Turn("assistant", parts)


def tool(*parts: Expression) -> Turn:
    """Make a turn with a tool's result."""
    return Turn("tool", parts)


def flatten(expression: Expression) -> Iterator[Step]:
    """Yield the steps of an expression. Raises TypeError for anything else, and for nested turns."""
    match expression:
        case str():
            if expression:
                yield Text(f"{expression}")
        case ShownImage(data):
            yield Text(MARK, data)
        case Gen() | Choose():
            yield expression
        case Sequence(parts):
            for part in parts:
                yield from flatten(part)
        case Turn(role, parts):
            yield Begin(role)
            for part in parts:
                for step in flatten(part):
                    if isinstance(step, Begin):
                        raise TypeError(f"a {step.role!r} turn stands inside a {role!r} turn")
                    if isinstance(step, Gen | Choose) and role != "assistant":
                        what = "gen()" if isinstance(step, Gen) else "select()"
                        raise TypeError(f"{what} stands in a {role!r} turn: put it into assistant()")
                    yield step
            yield End()
        case _:
            raise TypeError(
                f"a program adds text, gen(), and turns, not {type(expression).__name__}: use str(...)"
            )
