"""Lowered schemas against jsonschema: what they write is valid, and what is valid is written."""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.lower import MAX_SECONDS, lower
from tests.actors.grammar.samples import sample
from tests.amount import examples

Case = tuple[str, Any, list[Any], list[Any]]

CLOSED = {"additionalProperties": False}
CASES: list[Case] = [
    ("true", True, [1, "a", None, [1, {"a": []}], {"a": {"b": 1}}], []),
    ("types", {"type": ["string", "null"]}, ["", '\n"\\\u0001é😀\x7f', None], [1, True, [], {}]),
    ("integer", {"type": "integer"}, [0, -5, 12345678901234567890], [1.5, "1"]),
    ("number", {"type": "number"}, [0, -5, 1.5, 1e-7, 1e16], ["1", True]),
    (
        "enum",
        {"enum": ["a", "ab", 1, 12, 1.5, None, True, [1, "x"], {"k": [2]}]},
        ["a", "ab", 1, 12, 1.5, None, True, [1, "x"], {"k": [2]}],
        ["b", 2, False, [1], {"k": []}, {}],
    ),
    (
        "const",
        {"const": {"é": "\u2028", "a": {"b": [None]}}},
        [{"é": "\u2028", "a": {"b": [None]}}],
        [{}],
    ),
    ("lengths", {"type": "string", "minLength": 2, "maxLength": 3}, ["é😀", '\n"a'], ["a", "abcd"]),
    ("pattern", {"type": "string", "pattern": "b+"}, ["b", "abba", '\nb"'], ["", "ac"]),
    ("anchors", {"type": "string", "pattern": r"^\d{2}(-\w)?$"}, ["12", "12-x"], ["123", "12-", "a12"]),
    (
        "pattern and lengths",
        {"type": "string", "pattern": "^[a-z](-?[a-z0-9])*$", "maxLength": 5},
        ["a", "a-b", "abcde"],
        ["", "abcdef", "a--b"],
    ),
    (
        "two patterns",
        {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "^.{2}$"}]},
        ["ab", "ca"],
        ["a", "bb", "abc"],
    ),
    (
        "items",
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        [[True], [False, True, True]],
        [[], [True] * 4, [1]],
    ),
    (
        "tuple",
        {
            "type": "array",
            "prefixItems": [{"const": 1}, {"const": "b"}],
            "items": {"type": "null"},
            "minItems": 1,
        },
        [[1], [1, "b"], [1, "b", None, None]],
        [[], ["b"], [1, None]],
    ),
    (
        "draft 4 tuple",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "array",
            "items": [{"type": "integer"}],
            "additionalItems": False,
        },
        [[], [1]],
        [["a"], [1, 2]],
    ),
    (
        "unique",
        {"type": "array", "items": {"enum": ["a", "ab", 1, 12]}, "uniqueItems": True},
        [[], ["a", 12, 1, "ab"], [12, 1]],
        [["a", "a"], [1, 12, 1]],
    ),
    (
        "contains",
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 3},
        [[5], [1, 7], [1, 2, 5]],
        [[], [1], [1, 2, 3, 5]],
    ),
    (
        "object",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "null"}},
            "required": ["b"],
            **CLOSED,
        },
        [{"b": 1}, {"a": 1, "b": []}, {"b": "x", "c": None}],
        [{}, {"a": 1}, {"b": 1, "d": 1}],
    ),
    (
        "all optional",
        {"type": "object", "properties": {k: {"const": k} for k in "abcd"}, **CLOSED},
        [{}, {"a": "a"}, {"d": "d"}, {"b": "b", "d": "d"}, {k: k for k in "abcd"}],
        [{"a": "b"}, {"e": "e"}],
    ),
    (
        "open object",
        {"type": "object", "properties": {"ab": {"type": "integer"}, "ac": {"type": "null"}}},
        [{}, {"ab": 1, "x": {}}, {"abc": "1", "a": [1]}, {"": 1}],
        [{"ab": "1"}, {"ac": 1, "d": 1}, [], 1],
    ),
    (
        "others",
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "b": "x"}, {"aa": ""}],
        [{"b": 1}],
    ),
    (
        "patterns of names",
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 3}},
            **CLOSED,
        },
        [{"x": 1}, {"xy": 4, "y": "s"}],
        [{"xy": 2}, {"z": 1}, {"x": "1"}],
    ),
    (
        "names",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,2}$"}},
        [{}, {"ab": 1}],
        [{"A": 1}, {"abc": 1}],
    ),
    (
        "counts",
        {
            "type": "object",
            "properties": {k: {"type": "integer"} for k in "abc"},
            "minProperties": 2,
            "maxProperties": 2,
            **CLOSED,
        },
        [{"a": 1, "c": 2}, {"b": 1, "c": 2}],
        [{}, {"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    (
        "one of a map",
        {
            "type": "object",
            "additionalProperties": {"type": "null"},
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{"a": None}, {"a": None, "b": None}],
        [{}, {"a": 1}],
    ),
    (
        "dependencies",
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependentRequired": {"a": ["b"]},
            **CLOSED,
        },
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    (
        "dependent schemas",
        {
            "type": "object",
            "properties": {"a": {}, "b": {"type": "integer"}},
            "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}},
            **CLOSED,
        },
        [{"b": 1}, {"a": 1}, {"a": 1, "b": 5}],
        [{"a": 1, "b": 1}],
    ),
    (
        "anyOf",
        {"anyOf": [{"type": "integer"}, {"type": "number"}, {"const": "x"}]},
        [1, 1.5, "x"],
        ["y", None],
    ),
    (
        "anyOf of objects",
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "x": {"type": "integer"}},
                    "required": ["k", "x"],
                },
                {
                    "type": "object",
                    "properties": {"k": {"const": "b"}, "x": {"type": "string"}},
                    "required": ["k"],
                },
            ]
        },
        [{"k": "a", "x": 1}, {"k": "b"}, {"k": "b", "x": "1"}],
        [{"k": "a"}, {"k": "a", "x": "1"}, {"k": "c"}],
    ),
    (
        "oneOf by what is there",
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            **CLOSED,
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    (
        "oneOf that overlaps",
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
        [-1, 6, 100, -3],
        [0, 5, 3],
    ),
    (
        "oneOf of strings",
        {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "z$"}]},
        ["ab", "bz", "a"],
        ["az", "abz", "b"],
    ),
    (
        "oneOf of numbers",
        {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 2.5}]},
        [3, 1.5, 2.5],
        [1, 2, 2.6],
    ),
    (
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"maximum": 3}, "b": {"type": "null"}}},
            ]
        },
        [{"a": 1}, {"a": 3, "b": None}],
        [{"a": 4}, {"b": None}, {"a": 1, "b": 1}],
    ),
    (
        "allOf closes",
        {"allOf": [{"properties": {"a": {}}, **CLOSED}, {"properties": {"b": {}}}], "type": "object"},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    (
        "not a value",
        {"type": ["string", "integer", "boolean", "null"], "not": {"enum": ["a", 1, True, None]}},
        ["b", "", "aa", 2, 11, False],
        ["a", 1, True, None],
    ),
    ("not a pattern", {"type": "string", "not": {"pattern": "^x"}}, ["", "ax"], ["x", "xa"]),
    (
        "not required",
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    ("not a type", {"not": {"type": ["object", "array", "number"]}}, ["a", None, True], [1, {}, []]),
    (
        "if",
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "x": {}, "y": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
            **CLOSED,
        },
        [{"k": "a", "x": 1}, {"k": "b", "y": 1}, {"k": "b", "x": 1, "y": 1}],
        [{"k": "a"}, {"k": "b"}, {"k": "a", "y": 1}],
    ),
    (
        "bounds",
        {"type": "number", "minimum": -1.25, "exclusiveMaximum": 3.5},
        [-1.25, -1, 0, 3.49, 3, -0.3],
        [-1.26, 3.5, 4, -2, 3.51],
    ),
    (
        "draft 4 bounds",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 1,
            "exclusiveMinimum": True,
        },
        [2, 10],
        [1, 0, -2],
    ),
    ("multiples", {"type": "integer", "multipleOf": 7, "minimum": -20}, [0, 7, -14, 700], [1, -21, 8]),
    (
        "references",
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"$anchor": "n", "type": "null"}}},
        [None],
        [1],
    ),
    (
        "anchor and id",
        {
            "$id": "http://x/y",
            "anyOf": [{"$ref": "#n"}, {"$ref": "z#/$defs/q"}],
            "$defs": {
                "a": {"$anchor": "n", "type": "null"},
                "b": {"$id": "z", "$defs": {"q": {"const": 1}}},
            },
        },
        [None, 1],
        [2],
    ),
    (
        "a root that calls itself #",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "#",
            "definitions": {"a": {"enum": [1]}},
            "allOf": [{"$ref": "#/definitions/a"}],
        },
        [1],
        [2],
    ),
    (
        "draft 7 reference",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {}},
            "properties": {"x": {"$ref": "#/definitions/a", "type": "null"}},
            "type": "object",
        },
        [{"x": 1}],
        [1],
    ),
    ("formats", {"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], [1]),
    ("unknown format", {"type": "string", "format": "colour"}, ["x"], [1]),
]


def canonical(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def valid(schema: Any, value: object) -> bool:
    """What jsonschema says."""
    made = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(made(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("letters", [False, True], ids=["written out", "letters"])
def test_values(schema: Any, good: list[Any], bad: list[Any], letters: bool) -> None:
    automaton = lower(schema, letters=letters).automaton
    for value in good:
        assert valid(schema, value)
        assert automaton.accepts(canonical(value)), value
    for value in bad:
        assert not valid(schema, value)
        assert not automaton.accepts(canonical(value)), value


@pytest.mark.parametrize("schema", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_written_is_valid(schema: Any, walker: Any) -> None:
    walk = walker(lower(schema).automaton)
    rng = random.Random(1)
    for _ in range(60):
        text = walk.text(rng)
        assert valid(schema, json.loads(text)), text


def test_spacing() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [[1, {"b": 2}]]}, "c": {}},
        "required": ["a", "c"],
    }
    automaton = lower(schema, spacing="spaced").automaton
    assert automaton.accepts(b'{"a": [1, {"b": 2}], "c": {"x": [], "y": [1, 2]}}')
    assert not automaton.accepts(b'{"a":[1,{"b":2}],"c":1}')
    assert automaton.accepts(json.dumps({"a": [1, {"b": 2}], "c": None, "d": 5}).encode())


NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}


def test_recursion_is_refused_or_written_to_a_depth() -> None:
    with pytest.raises(UnsupportedSchema, match="recursion") as caught:
        lower(NODE)
    assert caught.value.recursive
    lowered = lower(NODE, unroll=1)
    assert lowered.automaton.accepts(b'{"v":1,"kids":[{"v":2,"kids":[]}]}')
    assert not lowered.automaton.accepts(b'{"v":1,"kids":[{"v":2,"kids":[{"v":3,"kids":[{"v":4}]}]}]}')
    assert any("recursion" in note for note in lowered.notes)


REFUSED = [
    ({"$ref": "#/$defs/a"}, "", "nothing at the end"),
    ({"$ref": "http://elsewhere/x"}, "/$ref", "references are local"),
    ({"$ref": "#"}, "", "itself"),
    (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2},
        "/uniqueItems",
        "give an enum",
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "(a)\\1"}}, "type": "object"},
        "/properties/a/pattern",
        "back reference",
    ),
    ({"type": "string", "minLength": -1}, "/minLength", "whole number"),
    ({"type": "text"}, "/type", "is no type"),
    ({"enum": "a"}, "/enum", "list"),
    ({"type": "object", "minProperties": 2}, "", "minProperties"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "", "no value"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema", "draft 3"),
]


@pytest.mark.parametrize(("schema", "pointer", "reason"), REFUSED)
def test_refused_with_pointer_and_reason(schema: Any, pointer: str, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=reason) as caught:
        lower(schema)
    assert caught.value.pointer.endswith(pointer)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"items": found, "type": "array"}
    return found


def wide() -> dict[str, Any]:
    """References that would be 2^30 schemas if they were copied."""
    defs = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2}
        for i in range(30)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, "d30": {"type": "null"}}}


HOSTILE: list[Any] = [
    nested(80),
    wide(),
    {"enum": list(range(3000))},
    {"type": "string", "description": "x" * 70_000},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
    {"type": "number", "minimum": 10**60},
    {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)],
        "type": "object",
    },
    {"type": "string", "pattern": "[a-z]*a[a-z]{18}"},
    {"type": "number", "multipleOf": 99991},
    {
        "type": "object",
        "patternProperties": {f"{a}.*{b}": {"const": a + b} for a in "abcd" for b in "efgh"},
    },
]


@pytest.mark.parametrize("schema", HOSTILE)
def test_what_is_too_large_is_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema):
        lower(schema)


# ---- random schemas ----

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from(["", "a", "ab", "é", '"', 1.5, -0.25]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=4,
)
STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(1, 4),
        "pattern": st.sampled_from(["a", "^a", "b$", "^[ab]*$", "^.{1,2}$", "a|é", r"^\w"]),
    },
)
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": st.sampled_from([-7, -1.5, 0, 2, 10]),
        "maximum": st.sampled_from([-1, 0, 0.5, 9, 120]),
        "exclusiveMinimum": st.sampled_from([-3, 0, 1.25]),
        "exclusiveMaximum": st.sampled_from([3, 10, 99.5]),
        "multipleOf": st.sampled_from([1, 2, 3, 5]),
    },
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=3)
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": lists,
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "contains": inner,
        },
    )
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abcd"), max_size=2, unique=True),
            "additionalProperties": inner | st.booleans(),
            "patternProperties": st.dictionaries(st.sampled_from(["a", "^b", "c$"]), inner, max_size=2),
            "propertyNames": st.sampled_from(
                [{"maxLength": 2}, {"pattern": "^[a-c]"}, {"enum": ["a", "d"]}]
            ),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
            "dependentRequired": st.just({"a": ["b"]}),
        },
    )
    combined = st.fixed_dictionaries(
        {},
        optional={
            "anyOf": lists,
            "oneOf": lists,
            "allOf": lists,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "dependentSchemas": st.dictionaries(st.sampled_from("ab"), inner, max_size=1),
        },
    )
    return arrays | objects | combined | st.builds(lambda a, b: {**a, **b}, objects | arrays, combined)


LEAVES = (
    STRINGS
    | NUMBERS
    | st.booleans()
    | st.builds(lambda v: {"const": v}, VALUES)
    | st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=4))
    | st.just({"type": "null"})
    | st.just({"type": ["boolean", "string"]})
)
SCHEMAS = st.recursive(LEAVES, larger, max_leaves=6)


@settings(max_examples=examples(20, 60), deadline=None)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_random_schemas_write_only_what_is_valid(walker: Any, schema: Any, rng: random.Random) -> None:
    try:
        automaton = lower(schema).automaton
    except UnsupportedSchema:
        return
    walk = walker(automaton)
    for _ in range(8):
        text = walk.text(rng, 30)
        assert valid(schema, json.loads(text)), text


@settings(max_examples=examples(20, 60), deadline=None)
@given(SCHEMAS, st.lists(VALUES, max_size=6))
def test_random_schemas_refuse_what_is_invalid(schema: Any, values: list[Any]) -> None:
    try:
        automaton = lower(schema).automaton
    except UnsupportedSchema:
        return
    for value in values:
        assert not automaton.accepts(canonical(value)) or valid(schema, value)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("ramify.actors.grammar.schema.lower.process_time", lambda: 3.0 * next(ticks))
    with pytest.raises(TooLarge, match="takes more than"):
        lower({"type": "array", "items": {"type": "array", "items": {"type": "null"}}})


@pytest.mark.parametrize(
    ("items", "most"),
    [
        ({"type": "string"}, 2),
        ({"type": "string", "pattern": "^[0-9]{4}$"}, 3),
        ({"type": "string", "format": "uuid"}, 2),
        (
            {
                "type": "object",
                "properties": {"id": {"type": "string"}},
                "required": ["id"],
                "additionalProperties": False,
            },
            2,
        ),
        ({"type": "number"}, 1),
        ({}, 1),
    ],
)
def test_unique_items_of_many_values_are_few_and_begin_differently(items: Any, most: int) -> None:
    """Whatever is written is valid; how many can be is told."""
    schema = {"type": "array", "items": items, "uniqueItems": True}
    lowered = lower(schema, spacing="spaced")
    assert any("cannot be written" in note for note in lowered.notes)
    rng = random.Random(2)
    longest = 0
    for _ in range(60):
        value = json.loads(sample(lowered.automaton, rng, rng.choice([0, 20, 60])))
        jsonschema.validate(value, schema)
        longest = max(longest, len(value))
    assert longest >= min(most, 2)
    two = {**schema, "minItems": 2}
    if most > 1:
        assert len(json.loads(sample(lower(two).automaton, rng, 0))) == 2
    else:
        with pytest.raises(UnsupportedSchema, match="give an enum"):
            lower({**two, "items": {"type": "number"}})


_OPTIONAL_A = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, **CLOSED}
_OPTIONAL_B = {"properties": {"a": {"type": "integer"}, "c": {"type": "string"}}, **CLOSED}
_ONE_OF_TWO = {"type": "object", "oneOf": [_OPTIONAL_A, _OPTIONAL_B]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "array", "items": _ONE_OF_TWO},
            [[], [{"b": "x"}], [{"a": 1, "c": "x"}, {"a": 2, "b": ""}]],
            [[{}], [{"a": 1}], [{"b": "", "c": ""}]],
        ),
        ({"properties": {"m": _ONE_OF_TWO}, **CLOSED}, [{}, {"m": {"c": "x"}}], [{"m": {}}]),
        (
            {"type": "object", "properties": {"b": {}, "a": {}}, **CLOSED, "not": _OPTIONAL_A},
            [{"b": 1}, {"b": "x", "a": ""}],
            [{"b": "x"}, {}],
        ),
        ({"type": "number", "not": {"multipleOf": 0.5}}, [0.25, 1.3], [0.5, 2, 0]),
        ({"type": "integer", "not": {"multipleOf": 3}}, [1, -2, 10], [0, 3, -9]),
        ({"oneOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"}, [4, 6, 8], [12, 5, 0]),
        (
            {"type": "array", "items": {"type": "integer"}, "not": {"const": [1, 2]}},
            [[], [1], [2, 2], [1, 3], [1, 2, 3]],
            [[1, 2]],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, **CLOSED, "not": {"enum": [{"a": 1}]}},
            [{}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}],
        ),
        (
            {
                "properties": {"a": {}, "bc": {}},
                **CLOSED,
                "type": "object",
                "not": {"patternProperties": {"^b": {"type": "string"}}},
            },
            [{"bc": 1}, {"a": 1, "bc": None}],
            [{}, {"a": 1}, {"bc": "x"}],
        ),
        (
            {
                "properties": {"a": {}, "bc": {}},
                **CLOSED,
                "type": "object",
                "not": {"propertyNames": {"maxLength": 1}},
            },
            [{"bc": 1}, {"a": 1, "bc": None}],
            [{}, {"a": 1}],
        ),
    ],
)
def test_the_opposite_is_exact_where_it_is_finite(schema: Any, good: list[Any], bad: list[Any]) -> None:
    found = lower(schema)
    for values, valid in ((good, True), (bad, False)):
        for value in values:
            assert jsonschema.Draft202012Validator(schema).is_valid(value) is valid
            assert found.automaton.accepts(canonical(value)) is valid, value
    assert not [note for note in found.notes if "nest" not in note and "digits" not in note]


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (
            {"oneOf": [{"properties": {"a": {}}, **CLOSED}, {"properties": {"b": {"type": "null"}}}]},
            "/oneOf/0/additionalProperties",
        ),
        ({"anyOf": [{"not": {"format": "date"}}, {"type": "null"}]}, "/anyOf/0/not/format"),
        ({"anyOf": [{"not": {"uniqueItems": True}}, {"type": "null"}]}, "/anyOf/0/not/uniqueItems"),
        ({"properties": {"a": {"not": {"type": ["number", "null"], "format": "date"}}}}, None),
        (
            {"items": {"type": "string", "oneOf": [{"format": "date"}, {"format": "time"}]}},
            "/items/oneOf/0/format",
        ),
        ({"properties": {"a": {"type": "string", "format": "date", "pattern": "^x"}}}, "/properties/a"),
        (
            {
                "additionalProperties": {
                    "type": "string",
                    "oneOf": [{"format": "ipv4"}, {"format": "ipv6"}],
                }
            },
            "/additionalProperties/oneOf/0/format",
        ),
        ({"if": {"format": "date"}, "then": {"minLength": 40}}, "/if/format"),
    ],
)
def test_what_is_left_out_is_noted_with_its_keyword(schema: Any, pointer: str | None) -> None:
    notes = [note for note in lower(schema).notes if "nest" not in note]
    assert any(note.startswith(f"{pointer}: ") for note in notes) if pointer else not notes, notes


def test_a_required_part_that_becomes_empty_is_refused() -> None:
    moment = {"type": "string", "oneOf": [{"format": "date"}, {"format": "time"}]}
    whole = {"type": "object", "properties": {"a": moment}, "required": ["a"]}
    for schema in (whole, {"type": "array", "items": whole, "minItems": 1}):
        with pytest.raises(UnsupportedSchema) as caught:
            lower(schema)
        assert caught.value.pointer.endswith("/properties/a/oneOf/1/format")
    assert lower({"anyOf": [whole, {"type": "null"}]}).notes


def test_one_automaton_inside_has_no_longer_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time ends inside of what a single value needs, not only between values."""
    reads = itertools.count()  # of the clock: each is a second later than the one before
    for module in ("schema.lower", "limits"):
        monkeypatch.setattr(f"ramify.actors.grammar.{module}.process_time", lambda: float(next(reads)))
    patterns = {f"{a}.*{b}.*{a}": {"type": "null"} for a in "abcd" for b in "efgh"}
    with pytest.raises(TooLarge):
        lower({"patternProperties": patterns})
    assert next(reads) <= MAX_SECONDS + 5
