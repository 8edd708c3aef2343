"""Rules that no text completes, in all the forms that a rule's body may have."""

import pytest

from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.unproductive_rules import endless_rules
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import ConstraintError

ENDLESS = {
    'start: "a" | /[a-z]/ x\nx: /[a-z]/ x': "x",
    'start: "a" | "b" x\nx: "c" x | y\ny: "d" x': "xy",
    'start: "a"\ny: ("b" | "c") y "d"': "y",
    'start: x? "a"\n// a comment: x\nx: "b"\n  | x "c" | y+\ny: "(" y ")"': "y",
    '?start: (x | "a") -> one\n!x: [ "b" ] x': "x",
    'start: "a" | x{2,3}\nx: x~2 | "b" x': "x",
}
FINE = [
    'start: "(" start ")" | "x"',
    'start: x* y? z{0,3} [w] ("a" | w)*\nx: "a"\ny: x\nz: x\nw: "b"',
    'start: item+\nitem: NAME ":" value\nvalue: NAME | "[" value* "]"\nNAME: /[a-z]+/',
    'start: a\na: "x"\n | "y" a\n\n%ignore / +/',
    'start: "->" | "|" | "y: y" // y: y\n',
    'start: A\nA: "a".."z" | B\nB.2: /[0-9]/ & /[1-5]/',
    "start: sub\nsub[max_tokens=5]: /.*/",
    'start: x\nx: %json { "type": "object" }',
    "start: x\n%import common.NUMBER -> x",
    "start: §",
    "",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_rules_that_need_themselves_are_found(text: str) -> None:
    found = endless_rules(text)
    assert "".join(name for name, _ in found) == ENDLESS[text]
    for name, at in found:
        assert text[at:].lstrip("!?").startswith(name)
    with pytest.raises(ConstraintError) as told:
        compile_constraint(ConstraintSpec("lark", text))
    if "can never end" in told.value.message:
        assert (told.value.details or {})["position"] == found[0][1]


@pytest.mark.parametrize("text", FINE)
def test_rules_that_can_end_are_not(text: str) -> None:
    assert endless_rules(text) == []


def test_a_long_grammar_takes_no_time_worth_telling() -> None:
    rules = [f'r{i}: "a" r{i + 1} | "b" r{i // 2}' for i in range(1500)]
    text = "start: r0\n" + "\n".join(rules) + '\nr1500: "z"'
    assert endless_rules(text) == []
    assert len(endless_rules(text.replace('"z"', 'r1500 "z"'))) == 1502


def test_nesting_is_no_way_to_stop_it() -> None:
    text = "start: " + "(" * 20_000 + '"a"' + ")" * 20_000
    assert endless_rules(text) == []
