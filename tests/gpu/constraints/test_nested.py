"""Values that no schema describes, at any depth: the walks of an output against the automaton's own."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from ramify.actors.grammar.nested import Nested
from ramify.actors.grammar.schema.lower import lower
from ramify.gpu.constraints.byte_automaton import NestedAutomaton
from ramify.gpu.constraints.matcher import AutomatonMatcher
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.constraints.walk import NestedNumpyWalker, walker
from tests.gpu.constraints.machines import byte_automaton, machine_of

SPANS = (
    *(
        "}}",
        "]]",
        "[[",
        '{"',
        '"}',
        '":',
        "[]",
        "{}",
        "}]",
        "]}",
        '"a":[',
        "],[",
        "},{",
        '}],"a',
        "}}}]",
    ),
    *("[[[", "true", "]]]]]]"),
)
TOKENS = [bytes([i]) for i in range(256)] + [span.encode() for span in SPANS]
SCHEMAS: list[Any] = [
    {},
    {"type": "object", "properties": {"a": {"type": "object"}, "b": {}}, "required": ["a"]},
    {"type": "array", "prefixItems": [{}, {"type": "string"}, {"type": "array"}], "minItems": 2},
    {
        "anyOf": [
            {"properties": {"a": {"properties": {"b": {"type": "integer"}}}}, "required": ["a"]},
            {"type": "array"},
        ]
    },
]


def words() -> Vocabulary:
    ids = {data: i for i, data in enumerate(TOKENS)}

    def encode(text: str) -> list[int]:
        return [ids[bytes([byte])] for byte in text.encode()]

    return Vocabulary([*TOKENS, b""], [len(TOKENS)], encode)


def automaton_of(schema: Any) -> Nested:
    found = lower(schema, letters=True).automaton
    assert isinstance(found, Nested)
    return found


def deep(rng: random.Random, depth: int) -> Any:
    """A value with arrays and objects so deep in each other."""
    if not depth:
        return rng.choice((1, "a", None, [], {}))
    inner = deep(rng, depth - 1)
    return {"a": 1, "x": inner} if rng.random() < 0.5 else [2, inner, "]"]


def text_of(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_an_output_goes_where_the_automaton_does(schema: Any) -> None:
    automaton = automaton_of(schema)
    made = byte_automaton(automaton)
    assert isinstance(made, NestedAutomaton)
    rng = random.Random(3)
    taken = 0
    for _ in range(400):
        value = deep(rng, rng.randint(0, automaton.layout.depth + 3))
        wholes = value, {"a": value, "b": value}, {"a": {}, "b": value}, [value, "x", [value]]
        value = rng.choice(wholes)
        text = text_of(value)
        if rng.random() < 0.3:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice((b"", b"]", b"}", b"[", b",")) + text[at + 1 :]
        state = made.behind(0, text)
        assert (state >= 0 and made.is_final(state)) == automaton.accepts(text), text
        assert (state >= 0) == (automaton.walk(text) >= 0), text
        taken += state >= 0
    assert taken > 20


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_masks_are_those_of_each_token(schema: Any) -> None:
    tree = words()
    made = byte_automaton(automaton_of(schema))
    arguments = (tree, made.table, made.classes, made.nesting)
    assert made.nesting is not None
    walks = [walker(*arguments), NestedNumpyWalker(tree, made.table, made.classes, made.nesting)]
    assert len({type(walk) for walk in walks}) == 2
    rng = random.Random(5)
    states = {0}
    for _ in range(200):
        value = deep(rng, 26)
        text = text_of({"a": value, "b": []} if rng.random() < 0.5 else [value, "x", [{}]])
        state = 0
        for byte in text:
            state = made.over(state, byte)
            if state < 0:
                break
            states.add(state)
    some = rng.sample(sorted(states), min(len(states), 400))
    assert max(some) > made.states
    for state in some:
        expected = np.full(tree.size, -1)
        for i, data in enumerate(TOKENS):
            expected[i] = made.behind(state, data)
        for walk in walks:
            assert (walk.targets(state) == expected).all()
            assert (tree.unpack(walk.mask(state)) == (expected >= 0)).all()


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_way_comes_to_an_end(schema: Any) -> None:
    """Each token of a mask leads on, to the greatest depth and out again; all outputs are valid."""
    machine: TokenAutomaton = machine_of(words(), automaton_of(schema))
    rng = random.Random(7)
    deepest = 0
    for _ in range(20):
        matcher = AutomatonMatcher(machine)
        written = b""
        while not matcher.has_ended():
            legal = np.flatnonzero(machine.vocabulary.unpack(matcher.mask())).tolist()
            assert legal, written
            assert (matcher.only() >= 0) == (len(legal) == 1)
            token = draw(rng, legal, going_up=len(written) < 150)
            deepest = max(deepest, matcher.state)
            assert matcher.advance(token)
            assert all(isinstance(token, int) for token in (*matcher.likely(), *matcher.plan().forced))
            written += TOKENS[token] if token < len(TOKENS) else b""
            assert len(written) < 2000
        jsonschema.validate(json.loads(written), schema)
    assert deepest > 1 << machine.automaton.layout.shift + 7


def draw(rng: random.Random, legal: list[int], going_up: bool) -> int:
    """A token that opens something, or that closes something; in a string often its end."""
    some = set(legal)
    if ord("Q") in some:  # inside a string
        return ord('"') if ord('"') in some and rng.random() < 0.7 else rng.choice(legal)
    starts = b"{[" if going_up else b"}]"
    wanted = [i for i in legal if i < len(TOKENS) and TOKENS[i][0] in starts]
    ends = [i for i in legal if i >= len(TOKENS)]
    return rng.choice((wanted if rng.random() < 0.8 else []) or ends or legal)
