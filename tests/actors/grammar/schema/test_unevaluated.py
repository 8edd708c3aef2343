"""`unevaluatedProperties` beside other schemas of the same object, against jsonschema."""

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.schema.lower import Lowered, lower
from tests.amount import examples

NAMES = ("a", "b", "xc")
VALUES = (0, "s")
OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(len(NAMES) + 1)
    for names in itertools.permutations(NAMES, count)
    for values in itertools.product(VALUES, repeat=count)
]


def accepted(lowered: Lowered, value: object) -> bool:
    return lowered.automaton.accepts(json.dumps(value, separators=(",", ":")).encode())


A = {"properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}}
REST = {"type": "object", "unevaluatedProperties": False}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({**REST, "allOf": [A, B]}, [{}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "s"}]),
        ({**REST, "$ref": "#/$defs/a", "$defs": {"a": A}, **B}, [{"a": 1, "b": 2}], [{"a": 1, "c": 1}]),
        (
            {**REST, "oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
            [{"a": 1}, {"b": 2}],
            [{}, {"a": 1, "b": 2}, {"a": 1, "b": "s"}],
        ),
        ({**REST, "if": {**A, "required": ["a"]}, "then": B}, [{}, {"a": 1, "b": 2}], [{"b": 2}]),
        ({**REST, "allOf": [{"patternProperties": {"^x": True}}]}, [{"xy": 1}], [{"a": 1}]),
        ({**REST, "allOf": [{"additionalProperties": True}]}, [{"a": 1, "c": 1}], []),
        ({**REST, "unevaluatedProperties": {"const": 0}, "allOf": [A]}, [{"a": 1, "c": 0}], [{"c": 1}]),
        ({**REST, "allOf": [{"const": {"a": 1}}]}, [], [{"a": 1}]),
    ],
)
def test_members_that_a_branch_describes(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    try:
        lowered = lower(schema)
    except UnsupportedSchema:
        assert not valid
        return
    for value in valid:
        assert accepted(lowered, value)
    for value in invalid:
        assert not accepted(lowered, value)


def test_what_stands_below_not_describes_no_member() -> None:
    lowered = lower({**REST, "not": {"not": A}})
    assert accepted(lowered, {})
    assert not accepted(lowered, {"a": 1})


def test_what_two_branches_describe_together_is_told() -> None:
    lowered = lower({**REST, "anyOf": [A, B]})
    assert accepted(lowered, {"a": 1})
    assert any("several branches" in note for note in lowered.notes)
    assert not any("branches" in note for note in lower({**REST, "allOf": [A, B]}).notes)


PARTS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(
            st.sampled_from(NAMES),
            st.sampled_from([True, {"type": "integer"}, {"const": 0}]),
            max_size=2,
        ),
        "required": st.lists(st.sampled_from(NAMES), max_size=1),
        "patternProperties": st.just({"^x": {"type": "integer"}}),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
    },
)
APPLIED = st.recursive(
    PARTS,
    lambda inner: st.builds(
        lambda own, more, closed: {**own, **more, **closed},
        PARTS,
        st.one_of(
            st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
            st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
            st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)}),
            st.fixed_dictionaries({"not": inner}),
            st.fixed_dictionaries({"if": inner, "then": inner}, optional={"else": inner}),
            st.fixed_dictionaries(
                {"dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, max_size=1)}
            ),
        ),
        st.sampled_from([{}, {"unevaluatedProperties": False}, {"unevaluatedProperties": {"const": 0}}]),
    ),
    max_leaves=4,
)


@settings(max_examples=examples(60, 2_000), deadline=None)
@given(APPLIED, st.sampled_from([False, {"const": 0}]))
def test_nothing_invalid_is_accepted(schema: dict[str, Any], rest: Any) -> None:
    schema = {"type": "object", "unevaluatedProperties": rest, **schema}
    try:
        lowered = lower(schema)
    except UnsupportedSchema:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in OBJECTS:
        if accepted(lowered, value):
            assert validator.is_valid(value), value
