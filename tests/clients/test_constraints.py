"""What users say an output must be, as fields of `generate`, and what comes back."""

import dataclasses
import datetime
import decimal
import enum
import json
import random
import uuid
from typing import Annotated, Any, Literal, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest

from ramify.actors.grammar.route import route
from ramify.clients.constraints import constrained, read, schema_of
from ramify.clients.program.expressions import gen
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Constraint, StructuralTag, Tag
from tests.actors.grammar.samples import sample


class Wand(msgspec.Struct):
    wood: str
    length: int


class Wizard(msgspec.Struct):
    name: str
    house: Literal["red", "green"]
    wand: Wand
    pets: list[str] = []


@dataclasses.dataclass
class Data:
    name: str
    age: int


class Typed(TypedDict):
    name: str
    age: int


class Pydantic(pydantic.BaseModel):
    name: str
    wands: list[int]


def test_each_way_to_say_it() -> None:
    for given, wanted in [
        ({"regex": "a+"}, Constraint(regex="a+")),
        ({"json_schema": {"type": "null"}}, Constraint(json_schema={"type": "null"})),
        ({"choices": ("a", "b")}, Constraint(choices=["a", "b"])),
        ({"grammar": 'start: "a"'}, Constraint(grammar='start: "a"')),
        ({"constraint": Constraint(regex="b")}, Constraint(regex="b")),
        ({"regex": "b", "after_thought": True}, Constraint(regex="b", after_thought=True)),
        ({"continue_constraint": True}, Constraint(continue_=True)),
        ({"continue_constraint": False}, Constraint(continue_=False)),
        (
            {"structural_tag": {"tags": [{"begin": "<a>", "regex": "b"}]}},
            Constraint(structural_tag=StructuralTag(tags=[Tag(begin="<a>", regex="b")])),
        ),
    ]:
        fields, kind = constrained({"max_tokens": 3, **given})
        assert fields == {"max_tokens": 3, "constraint": wanted}
        assert kind is None
    assert constrained({"seed": 1}) == ({"seed": 1}, None)
    for wrong in (
        {"structural_tag": {"tags": []}},
        {"after_thought": True},
        {"regex": "b", "continue_constraint": False},
        {"continue_constraint": True, "after_thought": True},
        {"constraint": Constraint(regex="b"), "continue_constraint": False},
    ):
        with pytest.raises(BadRequest):
            constrained(wrong)


@pytest.mark.parametrize(
    "extra", [{"regex": "b"}, {"constraint": Constraint(regex="b")}, {"type": Data}]
)
def test_one_constraint_only(extra: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="one constraint"):
        constrained({"choices": ["a"], **extra})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Wizard, {"name": "a", "house": "red", "wand": {"wood": "b", "length": 3}, "pets": ["c"]}),
        (Wizard, {"name": "a", "house": "red", "wand": {"wood": "b", "length": 3}}),
        (Data, {"name": "a", "age": 3}),
        (Typed, {"name": "a", "age": 3}),
        (Pydantic, {"name": "a", "wands": [1, 2]}),
        (list[int], [1, 2]),
    ],
)
def test_types(kind: Any, value: Any) -> None:
    """The schema takes the value, none with more in it, and the text comes back as the type."""
    schema = schema_of(kind)
    jsonschema.validate(value, schema)
    if isinstance(value, dict):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**value, "more": 1}, schema)
    made = read(kind, json.dumps(value), "stop")
    if kind not in (Typed, list[int]):
        assert isinstance(made, kind)
    with pytest.raises(ValueError, match=r"(?s)."):
        read(kind, json.dumps(value)[:-1], "stop")
    with pytest.raises(ValueError, match=r"reason 'length'\): give a higher max_tokens"):
        read(kind, json.dumps(value)[:-1], "length")
    with pytest.raises(ValueError, match=r"reason 'cancelled'\)$"):
        read(kind, json.dumps(value)[:-1], "cancelled")


def test_a_type_without_a_schema() -> None:
    with pytest.raises(BadRequest, match="has no JSON Schema"):
        schema_of(object())


def test_a_gap_of_a_program() -> None:
    gap = gen("who", type=Data, max_tokens=20)
    assert gap.type is Data
    assert gap.options == {"max_tokens": 20, "constraint": Constraint(json_schema=schema_of(Data))}


def test_names_of_members_are_no_keywords() -> None:
    """A member that is called like a keyword of JSON Schema."""
    fields = msgspec.defstruct("Odd", [("default", Wand), ("properties", Wand), ("title", str)])
    schema = schema_of(fields)
    text = json.dumps({"default": {"wood": "a", "length": 1, "x": 1}, "properties": {}, "title": ""})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), schema)


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


Code = Annotated[str, pydantic.StringConstraints(pattern="^[a-z]{1,3}$")]
Price = Annotated[decimal.Decimal, pydantic.Field(ge=0, le=10, max_digits=5, decimal_places=2)]


class Item(pydantic.BaseModel):
    name: str
    price: Price
    any_price: decimal.Decimal
    owner: str | None = None


class Basket(pydantic.BaseModel):
    kind: Literal["basket"]
    items: list[Item]
    counts: dict[Code, int]
    pair: tuple[int, str]
    tags: set[int] = set()


class Everything(pydantic.BaseModel):
    when: datetime.datetime
    day: datetime.date
    key: uuid.UUID
    colour: Colour
    share: float
    either: Item | Basket


class Point(msgspec.Struct, array_like=True):
    x: int
    y: str
    z: float = 1.0


class Line(msgspec.Struct, array_like=True, tag="line"):
    start: Point
    points: list[Point] = []


class Paid(msgspec.Struct, tag=True):
    amount: decimal.Decimal
    at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    notes: dict[str, int]


class Stored(msgspec.Struct, tag=True):
    key: uuid.UUID
    raw: bytes
    colour: Colour
    size: Annotated[int, msgspec.Meta(ge=0, le=100)]


@pytest.mark.parametrize(
    "kind",
    [
        Item,
        Basket,
        Everything,
        list[Item],
        Item | Basket,
        dict[str, Item],
        dict[Code, int],
        tuple[Item, int],
        Annotated[int, pydantic.Field(ge=3, le=7)],
        list[Price],
        decimal.Decimal,
        Point,
        Line,
        list[Point],
        dict[str, Line],
        Paid | Stored,
        list[Paid],
    ],
    ids=str,
)
def test_what_a_types_schema_allows_is_read_as_that_type(kind: Any) -> None:
    routed = route(schema_of(kind))
    assert routed.automaton is not None
    rng = random.Random(1)
    for number in range(40):
        text = sample(routed.automaton, rng, (5, 60, 150)[number % 3]).decode()
        read(kind, text, "stop")
