"""Outputs that are checked against what they have written: their masks, ways back, and ends."""

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jsonschema
import numpy as np
import pytest

from ramify.actors.grammar.compile import compile_constraint
from ramify.gpu.constraints import checked
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.checked import CheckedAutomaton, CheckedMatcher
from ramify.gpu.constraints.outputs import Output
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import ConstraintError
from ramify.protocol.structure import (
    JsonPart,
    ListPart,
    SequencePart,
    Structure,
    StructureTag,
    TagsPart,
    TextPart,
    ThoughtPart,
    UnionPart,
    encode_structure,
)

SPANS = [
    *(', ', '", "', '": ', '"}', '"]', '}, {"', '["', '{"', '[1', '[1, 1', '1, ', '1, 1', '11', '12'),
    *('"a"', '"a', 'a"', '"a": 1', ', "a": 1', 'true, true', '1]', '1}', 'ab', 'ab"', '"ab", "', 'e, f'),
    *('11', '{"id": 1', '}, {"id": 1'),  # one twice
    *("<n>", "</n>", "<n>[1, 1", "<n>[1, 1, ", "]</n>", '}</n><n>[1, 1', "<call>", '": {"a', "}}"),
]  # fmt: skip
TOKENS = [*(bytes([i]) for i in range(256)), *(text.encode() for text in SPANS), b""]
STOP = len(TOKENS) - 1
WORDS = Vocabulary(TOKENS, [STOP], lambda text: list(text.encode()))

NAMES = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 3}
RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 12}, "s": {"enum": ["x", "xy"]}},
    "required": ["id"],
    "additionalProperties": False,
}


def of(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


SCHEMAS: dict[str, dict[str, Any]] = {
    "names": NAMES,
    "few names": {**NAMES, "propertyNames": {"pattern": "^(a|ab|b)$"}},
    "listed, then few names": {
        "type": "object",
        "properties": {"x": {"const": 1}, "y": {"const": 1}},
        "patternProperties": {"^[ab]$": {"enum": [1, 11]}},
        "additionalProperties": False,
        "minProperties": 4,
    },
    "integers": of({"type": "integer"}, minItems=3),
    "every integer there is": of({"type": "integer", "minimum": 1, "maximum": 12}, minItems=12),
    "numbers": of({"type": "number", "minimum": 0, "maximum": 2, "multipleOf": 0.5}, minItems=5),
    "strings": of({"type": "string", "pattern": "^[ab]{1,2}$"}, minItems=6),
    "records": of(RECORD, minItems=4),
    "any members": of({"type": "object", "additionalProperties": {"enum": [1]}}, minItems=3),
    "anything": of({}, minItems=3),
    "nested": of(of({"type": "string"}, maxItems=2), minItems=3),
    "a wanted one": of({"enum": [0, 1, 2, 3]}, minItems=3, contains={"const": 2}),
    "places": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": {"type": ["integer", "string"]},
        "uniqueItems": True,
        "minItems": 4,
    },
    "beside others": {
        "type": "object",
        "properties": {"one": of({"type": "integer"}), "two": {"type": "array", "items": {"const": 1}}},
        "required": ["one", "two"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Callable[[str], CheckedAutomaton]:
    known: dict[str, CheckedAutomaton] = {}

    def make(name: str) -> CheckedAutomaton:
        if name not in known:
            spec = ConstraintSpec("json_schema", json.dumps(SCHEMAS[name]), True)
            found = constraint_of(compile_constraint(spec).body, WORDS, lambda: pytest.fail("a grammar"))
            assert isinstance(found, CheckedAutomaton)
            known[name] = found
        return known[name]

    return make


def legal(matcher: CheckedMatcher) -> list[int]:
    return list(np.flatnonzero(WORDS.unpack(matcher.mask())).tolist())


def drawn(matcher: CheckedMatcher, rng: random.Random, taken: int) -> int:
    tokens = legal(matcher)
    assert tokens, "nothing can follow"
    if STOP in tokens and rng.random() < 0.4:
        return STOP
    closing = [token for token in tokens if TOKENS[token] in (b'"', b"]", b"}")]
    if closing and rng.random() < (0.9 if taken > 60 else 0.3):
        return rng.choice(closing)
    return rng.choice(tokens)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_is_valid(made: Callable[[str], CheckedAutomaton], name: str) -> None:
    """At random through the masks, with drafts that are taken back; nobody gets stuck."""
    rng, ended = random.Random(5), set()
    for _ in range(30):
        matcher, tokens = made(name).matcher(), list[int]()
        while len(tokens) < 400 and not matcher.has_ended():
            if rng.random() < 0.1:
                mask, ahead = matcher.mask().copy(), 0
                while ahead < 4 and not matcher.has_ended():
                    assert matcher.advance(drawn(matcher, rng, len(tokens)))
                    ahead += 1
                matcher.rollback(ahead)
                assert (matcher.mask() == mask).all()
            token = drawn(matcher, rng, len(tokens))
            assert matcher.advance(token)
            tokens.append(token)
        if not matcher.has_ended():
            continue
        text = b"".join(TOKENS[token] for token in tokens).decode()
        hook = distinct if name != "beside others" else None
        jsonschema.validate(json.loads(text, object_pairs_hook=hook), SCHEMAS[name])
        ended.add(text)
        again = made(name).matcher()  # as a row that is opened again
        assert all(map(again.advance, tokens))
    assert len(ended) > 5


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_mask_has_all_that_can_be_taken(made: Callable[[str], CheckedAutomaton], name: str) -> None:
    rng = random.Random(7)
    cleared = 0
    for _ in range(4):
        matcher, taken = made(name).matcher(), 0
        while taken < 60 and not matcher.has_ended():
            machine, state = made(name).machine, matcher._states[-1]
            if machine.forced_token(state) is None:
                own = set(legal(matcher))
                whole = np.flatnonzero(WORDS.unpack(machine.mask(state))).tolist()
                for token in whole:
                    can = matcher.advance(token)
                    assert can == (token in own), (taken, TOKENS[token])
                    if can:
                        matcher.rollback(1)
                cleared += len(whole) - len(own)
                assert (matcher.mask() is machine.mask(state)) == (len(own) == len(whole))
            assert matcher.advance(drawn(matcher, rng, taken))
            taken += 1
    assert cleared


def test_masks_that_need_no_change_are_the_automaton_s(made: Callable[[str], CheckedAutomaton]) -> None:
    constraint = made("beside others")
    one, other = constraint.matcher(), constraint.matcher()
    for byte in b'{"one": [1], "two": [1, 1, ':
        assert one.advance(byte)
    for byte in b'{"one": [2, 3, 4], "two": [1, ':
        assert other.advance(byte)
    assert one.mask() is other.mask()


def test_a_row_asks_for_it_as_for_any_other(made: Callable[[str], CheckedAutomaton]) -> None:
    """Drafts are accepted as far as they double nothing; what must follow is proposed."""
    loaded = Future[Any]()
    loaded.set_result(made("integers"))
    output = Output(loaded, list(b"[1, 12, "), lambda: pytest.fail("nothing takes long"))
    legal = output.along(list(b"1, 7"))
    assert len(legal) == 2  # the comma doubles
    assert not legal[-1].has(ord(","))
    assert legal[-1].has(ord("1"))
    assert not legal[-1].has(TOKENS.index(b", "))
    assert len(output.along(list(b"13, 7"))) == 6
    output.advance(list(b"13"))
    assert output.along([])[0].has(ord(","))


def test_many_names_are_looked_at_in_a_thread(
    made: Callable[[str], CheckedAutomaton], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "FEW", 1)
    matcher = made("integers").matcher()
    for byte in b"[1, 2, ":
        assert matcher.advance(byte)
    assert not matcher.knows()
    matcher.mask()
    assert matcher.knows()


def test_back_and_ends(made: Callable[[str], CheckedAutomaton]) -> None:
    matcher = made("every integer there is").matcher()
    text = json.dumps(list(range(1, 13))).encode()
    assert all(map(matcher.advance, text))
    assert matcher.only() == STOP
    assert matcher.is_final()
    assert matcher.advance(STOP)
    assert len(matcher) == len(text) + 1
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(len(text) + 2)
    matcher.rollback(len(matcher))
    assert all(map(matcher.advance, b"[12, 1, 11"))  # what was taken back may be written again
    assert matcher.only() == ord(",")


# --- in structures: calls of tools, tags, behind a thought --------------------------------------------

SETS = of({"type": "integer"}, minItems=2)
TOOL = {
    "type": "object",
    "properties": {"ids": of({"type": "integer"}), "rest": {**NAMES, "minProperties": 2}},
    "required": ["ids", "rest"],
    "additionalProperties": False,
}
LISTS = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"enum": [1, 11]}, "minItems": 3}},
    "required": ["ids"],
    "additionalProperties": False,
}


def call(name: str, schema: Any) -> StructureTag:
    return StructureTag(f'<call>{{"name": "{name}", "arguments": ', JsonPart(schema, name), "}</call>")


PARAMETERS = {"sets": TOOL, "lists": LISTS, "names": {**NAMES, "minProperties": 2}}
CALLS = [call(name, schema) for name, schema in PARAMETERS.items()]
STRUCTURES: dict[str, Any] = {
    "free": TagsPart(list(CALLS), ["<call>"]),
    "forced": ListPart(
        UnionPart([SequencePart([TextPart(c.begin), c.content, TextPart(c.end)]) for c in CALLS]), "\n"
    ),
    "tags": TagsPart(
        [StructureTag("<n>", JsonPart(SETS), "</n>"), StructureTag("<n>!", JsonPart(NAMES), "</n>")],
        ["<n>"],
    ),
    "behind a thought": ThoughtPart("<n>", "</n>", JsonPart(TOOL)),
}
VALUES: dict[str, dict[str, Any]] = {
    "free": dict(zip([each.begin for each in CALLS], PARAMETERS.values(), strict=True)),
    "forced": dict(zip([each.begin for each in CALLS], PARAMETERS.values(), strict=True)),
    "tags": {"<n>[": SETS, "<n>!": NAMES},
    "behind a thought": {"": TOOL},
}


def structured(root: Any, **fields: Any) -> CheckedAutomaton:
    spec = ConstraintSpec("structure", encode_structure(Structure(root, **fields)))
    found = constraint_of(compile_constraint(spec).body, WORDS, lambda: pytest.fail("a grammar"))
    assert isinstance(found, CheckedAutomaton)
    return found


def checked_values(name: str, text: str) -> int:
    """How many values `text` has; each is valid, and none has a name twice."""
    if name == "behind a thought":  # or several
        text = re.sub(r"\A(?:\s*<n>.*?</n>)*\s*", "", text, flags=re.DOTALL)
    found, count, at = VALUES[name], 0, 0
    decoder = json.JSONDecoder(object_pairs_hook=distinct)
    while True:
        places = [(place, begin) for begin in found if (place := text.find(begin, at)) >= 0]
        if not places:
            return count
        place, begin = min(places)
        start = place + len(begin.removesuffix("["))
        start += len(text[start:]) - len(text[start:].lstrip())
        value, at = decoder.raw_decode(text, start)
        jsonschema.validate(value, found[begin])
        count += 1
        if not begin:
            return count


def onward(matcher: CheckedMatcher, rng: random.Random, taken: int) -> int:
    """As `drawn`, but where text is free it soon goes on to what is held to a schema."""
    tokens = legal(matcher)
    openings = [token for token in tokens if TOKENS[token] in (b"<call>", b"<n>", b"</n>")]
    if len(tokens) > 250:
        if STOP in tokens and taken > 150:
            return STOP
        if openings and rng.random() < 0.7:
            return rng.choice(openings)
        texts = [token for token in tokens if TOKENS[token].isalpha() or token in openings]
        return rng.choice(texts)
    return drawn(matcher, rng, taken)


@pytest.mark.parametrize("name", STRUCTURES)
def test_whatever_is_drawn_in_a_structure_is_valid(name: str) -> None:
    """Several calls in one output, each anew; with drafts that are taken back, and rows opened again."""
    rng, ended, values = random.Random(11), 0, 0
    constraint = structured(STRUCTURES[name])
    for _ in range(40):
        matcher, tokens = constraint.matcher(), list[int]()
        while len(tokens) < 500 and not matcher.has_ended():
            if rng.random() < 0.05:
                mask, ahead = matcher.mask().copy(), 0
                while ahead < 6 and not matcher.has_ended():
                    assert matcher.advance(onward(matcher, rng, len(tokens)))
                    ahead += 1
                matcher.rollback(ahead)
                assert (matcher.mask() == mask).all()
            if rng.random() < 0.02:  # continued: on a fork, or as a row that is opened again
                again = constraint.matcher()
                assert all(map(again.advance, tokens))
                assert (again.mask() == matcher.mask()).all()
                matcher = again
            token = onward(matcher, rng, len(tokens))
            assert matcher.advance(token)
            tokens.append(token)
        if matcher.has_ended():
            text = b"".join(TOKENS[token] for token in tokens).decode()
            values += checked_values(name, text)
            ended += 1
    assert ended > 10
    assert values > (12 if name == "behind a thought" else 25)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_mask_in_a_structure_has_all_that_can_be_taken(name: str) -> None:
    rng, cleared = random.Random(13), 0
    constraint = structured(STRUCTURES[name])
    for _ in range(6):
        matcher, taken = constraint.matcher(), 0
        while taken < 80 and not matcher.has_ended():
            state = matcher._states[-1]
            if constraint.machine.forced_token(state) is None:
                own = set(legal(matcher))
                for token in np.flatnonzero(WORDS.unpack(constraint.machine.mask(state))).tolist():
                    can = matcher.advance(token)
                    assert can == (token in own), (taken, TOKENS[token])
                    if can:
                        matcher.rollback(1)
                    cleared += not can
            assert matcher.advance(onward(matcher, rng, taken))
            taken += 1
    assert cleared


def test_one_token_may_end_a_value_and_begin_the_next_one() -> None:
    matcher = structured(STRUCTURES["tags"]).matcher()
    assert all(map(matcher.advance, b'so <n>!{"a": 1, "b": 1, "c": 1'))
    both = TOKENS.index(b"}</n><n>[1, 1")
    assert both in legal(matcher)
    assert matcher.advance(both)
    assert not matcher.advance(ord(","))
    assert matcher.advance(ord("1"))


def test_a_list_may_double_where_a_set_may_not() -> None:
    for name, can in (("lists", True), ("sets", False)):
        matcher = structured(STRUCTURES["forced"]).matcher()
        assert all(
            map(matcher.advance, b'<call>{"name": "%b", "arguments": {"ids": [1, 1' % name.encode())
        )
        assert matcher.advance(ord(",")) == can


def test_free_text_has_the_mask_of_everything_and_is_not_looked_at() -> None:
    constraint = structured(STRUCTURES["free"])
    constraint.look_around()
    matcher = constraint.matcher()
    for byte in b'well, [1, 1] {"a": 1, "a": 2} "':
        assert matcher.mask() is WORDS.everything
        assert matcher.knows()
        assert matcher.advance(byte)
    assert not constraint.doubling


def test_tokens_that_begin_a_value_are_looked_at_once() -> None:
    constraint = structured(STRUCTURES["tags"])
    one, other = constraint.matcher(), constraint.matcher()
    assert not one.knows()  # in a thread
    assert TOKENS.index(b"<n>[1, 1") in legal(one)  # it may become 11
    assert one.knows()
    assert other.knows()
    assert TOKENS.index(b"<n>[1, 1, ") not in legal(other)


def test_drafts_in_a_structure_are_accepted_as_far_as_they_double_nothing() -> None:
    loaded = Future[Any]()
    loaded.set_result(structured(STRUCTURES["forced"]))
    said = b'<call>{"name": "sets", "arguments": {"ids": [1, 12, '
    output = Output(loaded, list(said), lambda: pytest.fail("nothing takes long"))
    assert len(output.along(list(b"1, 7"))) == 2
    assert len(output.along(list(b'13], "rest": {"a": 1, "b'))) == 25
    output.advance(list(b'13], "rest": {"a": 1, "a'))
    assert not output.along([])[0].has(ord('"'))


def test_what_a_structure_had_said_already() -> None:
    matcher = structured(STRUCTURES["free"], after='<call>{"name": "names", "arguments": ').matcher()
    assert all(
        map(matcher.advance, b'{"a": 1, "b": 2}}</call> and <call>{"name": "names", "arguments": ')
    )
    assert all(map(matcher.advance, b'{"a": 1, "a'))  # the call before is none of its business
    assert not matcher.advance(ord('"'))
    inside = structured(STRUCTURES["tags"], after="so <n>[1, 2, ")
    matcher = inside.matcher()
    assert all(map(matcher.advance, b"12, 2"))
    assert not matcher.advance(ord("]"))
    matcher.rollback(5)
    assert all(map(matcher.advance, b"11]</n> <n>[12, 1"))
    assert matcher.advance(ord("]"))
    with pytest.raises(ConstraintError, match="twice"):
        structured(STRUCTURES["tags"], after="so <n>[1, 1, ")


def test_a_value_that_is_checked_behind_one_that_no_schema_describes() -> None:
    tags = TagsPart(
        [StructureTag("<n>", JsonPart(SETS), "</n>"), StructureTag("<n>!", JsonPart({}), "</n>")],
        ["<n>"],
    )
    constraint = structured(tags)
    automaton = constraint.machine.automaton
    assert automaton.nesting is not None
    matcher = constraint.matcher()
    assert all(map(matcher.advance, b'so <n>!{"a": {"b": [1, 1], "b": [{"c": {"d": 1'))
    assert matcher.state > automaton.states  # two are open around it
    assert constraint.may_begin(matcher.state)  # `}}]}}</n><n>[` could be one token
    assert all(map(matcher.advance, b"}}]}"))
    both = TOKENS.index(b"}</n><n>[1, 1")
    assert both in legal(matcher)
    assert matcher.advance(both)
    assert ord("]") not in legal(matcher)
    assert matcher.advance(ord("2"))
    assert all(map(matcher.advance, b"]</n>"))
    assert matcher.is_final()
