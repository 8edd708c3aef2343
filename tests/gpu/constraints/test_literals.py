"""What is likely where an automaton leaves a choice: the schema's words, in order."""

import json
from concurrent.futures import Future
from typing import Any

from ramify.actors.grammar.compile import compile_constraint
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.literals import LONGEST
from ramify.gpu.constraints.matcher import AutomatonConstraint
from ramify.gpu.constraints.outputs import Output
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import ConstraintSpec

STOP = 256
WORDS = Vocabulary([bytes([i]) for i in range(256)] + [b""], [STOP], lambda text: list(text.encode()))
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["dog", "cat"]},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}


def machine_of(kind: Any, text: str) -> Any:
    body = compile_constraint(ConstraintSpec(kind, text)).body
    made = constraint_of(body, WORDS, lambda: None)  # type: ignore[arg-type,return-value]
    assert isinstance(made, AutomatonConstraint)
    return made


def text_behind(rule: Any, begin: str) -> str:
    machine = rule.machine
    state = machine.automaton.behind(machine.start, begin.encode())
    assert state >= 0
    return bytes(machine._literals.text(state)).decode()


def test_the_next_member_is_likely() -> None:
    pet = machine_of("json_schema", json.dumps(PET))
    assert text_behind(pet, "") == '{"name":"'
    assert text_behind(pet, '{"') == 'name":"'
    assert text_behind(pet, '{"na') == 'me":"'  # has to be
    assert text_behind(pet, '{"name":"Rex"') == ',"kind":"dog"'
    assert text_behind(pet, '{"kind":"') == 'dog","age":'
    assert text_behind(pet, '{"age":5,"') == 'tags":["'
    assert text_behind(pet, '{"tags":["a"') == ',"'


def test_free_text_and_numbers_are_not() -> None:
    pet = machine_of("json_schema", json.dumps(PET))
    assert text_behind(pet, '{"name":"na') == ""
    assert text_behind(pet, '{"age":') == ""
    assert text_behind(pet, '{"age":5') == ""
    assert text_behind(pet, '{"tags":[]}') == ""


def test_bounds() -> None:
    chain: dict[str, Any] = {"enum": [True, False]}
    for _ in range(6):
        members = {"a": chain, "b": chain}
        chain = {"type": "object", "properties": members, "additionalProperties": False}
    text = text_behind(machine_of("json_schema", json.dumps(chain)), "")
    assert text == '{"a":{"'  # three choices
    long = {"enum": ["x" * 60, "y" * 60]}
    assert len(text_behind(machine_of("json_schema", json.dumps(long)), '"')) < LONGEST + 16


def test_other_constraints_have_no_words() -> None:
    assert text_behind(machine_of("regex", "(yes|no), (a|b)"), "") == ""


def test_drafts_are_legal_and_end_with_what_must_follow() -> None:
    rule = machine_of("json_schema", json.dumps(PET))
    loaded = Future[Any]()
    loaded.set_result(rule)
    output = Output(loaded, list(b'{"name":"Rex"'), lambda: None)  # type: ignore[arg-type,return-value]
    ahead = output.look()
    assert bytes(ahead.tokens) == b',"kind":'
    assert len(ahead.legal) == 1 + len(ahead.tokens)
    output.advance(list(b',"kind":"'))
    assert bytes(output.look().tokens) == b'dog","ag'
    assert output.along(list(b"cat"))[-1].only == ord('"')
