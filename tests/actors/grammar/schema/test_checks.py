"""What outputs are checked for, and where."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.schema.lower import Lowered, lower
from ramify.gpu.constraints.written import WrittenOutput

INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
TWO_NAMES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "integer"},
    "minProperties": 2,
}


def takes(lowered: Lowered, text: str) -> bool:
    """Whether the automaton takes `text`, and the check does."""
    data = text.encode()
    written = WrittenOutput(lowered.places)
    return lowered.automaton.accepts(data) and (
        not lowered.places or written.walk(written.start(), data) is not None
    )


def test_nothing_is_checked_where_the_automaton_holds_all() -> None:
    for schema in (
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": "object", "minProperties": 1},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2},
        {"type": "object", "maxProperties": 3},
    ):
        assert lower(schema, checked=True).places == ()


def test_places_are_found_by_names_and_indices() -> None:
    schema = {
        "properties": {
            "ids": INTEGERS,
            "deep": {"type": "array", "prefixItems": [{"type": "null"}], "items": TWO_NAMES},
            "free": {"type": "array"},
        },
        "additionalProperties": INTEGERS,
    }
    lowered = lower(schema, checked=True)
    root = lowered.places[0]
    assert lowered.places[root.names["ids"]].unique
    assert lowered.places[root.others].unique
    deep = lowered.places[root.names["deep"]]
    assert deep.items == (-1,)
    assert lowered.places[deep.rest].distinct
    assert root.names["free"] == -1
    assert takes(lowered, '{"ids":[1,2],"deep":[null,{"a":1,"b":2}],"free":[1,1],"x":[3,1]}')
    for text in (
        '{"ids":[1,1]}',
        '{"deep":[null,{"a":1,"a":2}]}',
        '{"deep":[null,{"a":1}]}',
        '{"x":[1,2,1]}',
    ):
        assert not takes(lowered, text)


def test_recursion_and_anything() -> None:
    node = {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
        "uniqueItems": True,
    }
    lowered = lower(node, unroll=2, checked=True)
    assert takes(lowered, '["a",["a"],["b",["a"]]]')
    assert not takes(lowered, '["b",["a","a"]]')
    anything = lower({"uniqueItems": True}, checked=True)
    assert takes(anything, '[{"a":[1,1]},{"a":[1,{"b":2}]},1,"1",true,{}]')
    for text in ('[{"a":1,"b":2},{"b":2,"a":1}]', '[{"a":1,"a":1}]', "[[1],[1]]", "[1,1.0]", "[0,-0]"):
        assert not takes(anything, text), text


ONES: dict[str, Any] = {"type": "array", "items": {"const": 1}, "minItems": 2}
CLASHES: list[dict[str, Any]] = [
    {"anyOf": [INTEGERS, ONES]},
    {
        "anyOf": [
            {"properties": {"a": INTEGERS}, "required": ["a"], "additionalProperties": False},
            {"properties": {"a": ONES, "b": {"const": 1}}, "required": ["b"]},
        ]
    },
    {"anyOf": [INTEGERS, {**ONES, "minItems": 0, "prefixItems": [{"type": "integer"}]}]},
]


def test_arrays_beside_those_that_are_checked_are_checked_too() -> None:
    """Where that leaves each of them a way to go on: it is said."""
    for other in ({"type": "array"}, {**ONES, "minItems": 1}):
        lowered = lower({"anyOf": [INTEGERS, other]}, checked=True)
        assert any("items of the others differ too" in note for note in lowered.notes)
        assert takes(lowered, "[3,2,1]")
        assert takes(lowered, "[1]")
        assert not takes(lowered, "[1,1]")


@pytest.mark.parametrize("schema", CLASHES)
def test_where_other_arrays_may_stand_the_automaton_does_it_alone(schema: dict[str, Any]) -> None:
    """A check would also hold for arrays that may have equal items."""
    lowered = lower(schema, checked=True)
    assert lowered.places == ()
    assert any("more than one item" in note for note in lowered.notes)


def test_a_place_is_checked_if_all_its_arrays_want_it() -> None:
    schema = {"anyOf": [INTEGERS, {**INTEGERS, "items": {"type": "string"}}]}
    lowered = lower(schema, checked=True)
    assert takes(lowered, "[1,2]")
    assert takes(lowered, '["a","b"]')
    assert not takes(lowered, '["a","a"]')


@pytest.mark.parametrize("count", range(5))
def test_more_than_there_are_is_refused(count: int) -> None:
    """Integers of which there are four; names of which there are three, and one that is listed."""
    items = {**INTEGERS, "items": {"type": "integer", "minimum": 8, "maximum": 11}, "minItems": count}
    names = {
        "properties": {"x": {"const": 1}},
        "patternProperties": {"^(a|b|ab)$": {"const": 1}},
        "additionalProperties": False,
        "minProperties": count,
        "type": "object",
    }
    assert lower(items, checked=True)
    assert lower(names, checked=True)
    for schema, key in ((items, "minItems"), (names, "minProperties")):
        with pytest.raises(UnsupportedSchema, match="no value"):
            lower({**schema, key: 5}, checked=True)


def test_listed_members_are_not_passed_over_where_too_few_others_are_left() -> None:
    schema = {
        "properties": {"x": {"const": 1}, "y": {"const": 1}},
        "patternProperties": {"^[ab]$": {"const": 1}},
        "additionalProperties": False,
        "minProperties": 3,
    }
    lowered = lower(schema, checked=True)
    for size in range(5):
        for names in itertools.permutations("xyab", size):
            value = dict.fromkeys(names, 1)
            text = json.dumps(value, separators=(",", ":"))
            order = [name for name in names if name in "xy"]
            in_order = order == sorted(order) and list(names[: len(order)]) == order
            valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            assert takes(lowered, text) == (valid and in_order), text
    assert lowered.automaton.walk(b'{"a') < 0  # a and b alone are two


def test_few_values_that_items_before_may_take() -> None:
    few = {"type": "array", "prefixItems": [{"type": "string"}, {"const": "a"}], "uniqueItems": True}
    with pytest.raises(UnsupportedSchema, match="prefixItems"):
        lower({**few, "minItems": 2}, checked=True)
    apart = {**few, "prefixItems": [{"type": "string"}, {"const": 1}], "minItems": 2}
    assert takes(lower(apart, checked=True), '["a",1,"b"]')


def test_numbers_have_one_spelling_among_items_that_differ() -> None:
    lowered = lower({"type": "array", "items": {"type": "number"}, "uniqueItems": True}, checked=True)
    assert any("no exponent" in note for note in lowered.notes)
    assert takes(lowered, "[1,10,0.5,-1.25,0]")
    for text in ("[1.0]", "[1e1]", "[-0]", "[0.10]", "[0.1,0.1]"):
        assert not takes(lowered, text)
