"""Values that no schema describes, as letters: what is accepted, how deep, and beside other values."""

import json
import random
from typing import Any

import jsonschema
import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.expression import Embedded, Literal, concat, union
from ramify.actors.grammar.nested import LEAST_DEPTH, Nested, Unsettled, nested
from ramify.actors.grammar.schema import lower as module
from ramify.actors.grammar.schema.lower import containers, lower
from ramify.actors.grammar.structure import ANYTHING

INNER = {"type": "object", "properties": {"c": {"type": "integer"}, "d": {}}, "required": ["c"]}
SCHEMAS: list[Any] = [
    {},
    {"type": "object"},
    {"properties": {"a": INNER}},
    {"anyOf": [{"type": "object", "properties": {"a": INNER}, "required": ["a"]}, {"type": "array"}]},
    {
        "anyOf": [
            {"properties": {"a": INNER}, "required": ["a"]},
            {"properties": {"b": {}}, "required": ["b"]},
        ]
    },
    {
        "anyOf": [
            {"type": "array", "items": INNER},
            {"type": "object", "required": ["a"]},
            {"type": "array"},
        ]
    },
    {"type": "object", "properties": {"a": {"anyOf": [{"const": {"b": [[]]}}, {}]}}},
    {
        "type": "array",
        "prefixItems": [{"anyOf": [{"type": "array", "prefixItems": [INNER]}, {}]}, INNER],
    },
    {"anyOf": [{"type": "array", "items": INNER}, {"type": "array"}]},
    {
        "anyOf": [
            {"items": {"items": INNER}},
            {"items": {"type": "array"}},
            {"items": {"type": "object"}},
        ]
    },
    {"type": "object", "patternProperties": {"^a": {"type": "object"}}, "additionalProperties": INNER},
]


def deep(rng: random.Random, depth: int) -> Any:
    if not depth:
        return rng.choice((1, -2.5, "a{", True, None, [], {}, "é"))
    values = [deep(rng, rng.randrange(depth)) for _ in range(rng.randrange(2))] + [deep(rng, depth - 1)]
    if rng.random() < 0.5:
        return values
    return dict(zip(rng.sample("abcd", 4), values, strict=False))


def spelled(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_is_accepted(schema: Any) -> None:
    """What was accepted to a small depth is so to a greater one, and nothing else."""
    automaton = lower(schema, spacing="spaced", letters=True).automaton
    small = lower(schema, spacing="spaced").automaton
    assert isinstance(automaton, Nested)
    validator = jsonschema.Draft202012Validator(schema)
    rng = random.Random(11)
    seen = {False: 0, True: 0}
    for _ in range(1500):
        value = deep(rng, rng.randrange(LEAST_DEPTH))
        if rng.random() < 0.6:
            value = rng.choice(
                ({"a": {"c": 1, "d": value}}, {"a": value}, [{"c": 2, "d": value}, {"c": 1}])
            )
        accepted = automaton.accepts(spelled(value))
        assert not accepted or validator.is_valid(value), value
        assert accepted or not small.accepts(spelled(value)), value
        seen[accepted] += 1
    assert seen[True] > 30


def test_depth() -> None:
    found = lower({"type": "array", "items": {}}, letters=True)
    assert isinstance(found.automaton, Nested)
    assert found.notes == ()
    depth = found.automaton.layout.depth
    assert depth >= 16
    for pair in (b"[]", b'{"a":}'):
        opening, closing = pair[:-1], pair[-1:]
        for levels, taken in (
            (depth + 1, True),
            (depth + 2, False),
        ):  # an item is of any type: described
            assert (
                found.automaton.accepts(b"[" + levels * opening + b"1" + levels * closing + b"]")
                == taken
            )
    assert not found.automaton.accepts(b'[[{"a":1]}]')
    assert not found.automaton.accepts(b"[\xf9]")


def test_no_more_states_than_one_level_needs() -> None:
    many: Any = {"type": "array", "items": {}, "minItems": 2, "maxItems": 100}
    found = lower(many, letters=True)
    assert isinstance(found.automaton, Nested)
    assert found.automaton.layout.depth >= 12
    assert len(found.automaton) < len(lower(many).automaton) / 2


def test_what_cannot_be_settled_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsettled(*_: object) -> None:
        raise Unsettled("no")

    monkeypatch.setattr(module, "nested", unsettled)
    found = lower({"type": "object"}, letters=True)
    assert not isinstance(found.automaton, Nested)
    assert found.notes == ("values that no schema describes nest at most 3 deep",)
    assert found.automaton.accepts(b'{"a":[[[]]]}')


def test_the_note_is_for_what_is_written_out() -> None:
    free: Any = {"type": "array", "items": {}}
    assert lower(free, letters=True).notes == ()
    assert "nest at most 3 deep" in "".join(lower(free).notes)
    different = lower({**free, "uniqueItems": True}, letters=True, checked=True)
    assert "nest at most 3 deep" in "".join(different.notes)


def test_letters_behind_other_parts_and_beside_brackets() -> None:
    value = lower({}, spacing="spaced", letters=True).automaton
    other = Automaton.from_regex(r'x\{"a": \[b\]')
    made = nested(
        Automaton.from_expression(
            union(concat(Literal(b"x"), Embedded(value), Literal(b";")), Embedded(other))
        ),
        containers("spaced"),
    )
    for text in (b"x[[1]];", b'x{"a": [[true]]};', b'x{"a": [b]', b"x1;"):
        assert made.accepts(text), text
    for text in (b'x{"a": [b]};', b"x[[1]]", b"x[[1}];", b"x\xf8;"):
        assert not made.accepts(text), text


def test_letters_beside_free_text() -> None:
    value = lower({}, spacing="spaced", letters=True).automaton
    both = Automaton.from_expression(union(Embedded(value), concat(Embedded(ANYTHING), Literal(b"."))))
    with pytest.raises(Unsettled, match="free text"):
        nested(both, containers("spaced"))
    behind = Automaton.from_expression(concat(Embedded(value), Literal(b";"), Embedded(ANYTHING)))
    made = nested(behind, containers("spaced"))
    assert made.accepts(b'{"a": [[]]};{ \xf8')
