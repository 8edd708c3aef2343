"""One call from a spec to a body, and what is refused."""

import importlib
import json
import random
import re
import zlib
from functools import cache
from typing import Any

import numpy as np
import pytest

from ramify.actors.grammar import compile as module
from ramify.actors.grammar import grammars
from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.compile_program import warm_up
from ramify.actors.grammar.schema.lower import containers, free_value
from ramify.actors.grammar.schema.strings import any_string
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.matcher import OutputConstraint
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import AutomatonBody, ConstraintSpec, GrammarBody, Kind, decode_body
from ramify.protocol.errors import ConstraintError

BYTES = Vocabulary([*(bytes([b]) for b in range(256)), b""], [256], lambda text: list(text.encode()))


def built(kind: Kind, text: str, *, spaced: bool = False) -> OutputConstraint:
    compiled = compile_constraint(ConstraintSpec(kind, text, spaced))
    return constraint_of(compiled.body, BYTES, lambda: GrammarVocabulary(BYTES))


def accepts(constraint: OutputConstraint, text: str) -> bool:
    matcher = constraint.matcher()
    return all(matcher.advance(byte) for byte in text.encode()) and matcher.advance(256)


def test_a_regex() -> None:
    found = built("regex", "(no|none)")
    assert [text for text in ("no", "none", "non", "") if accepts(found, text)] == ["no", "none"]


def test_choices() -> None:
    choices = ["no", "none", "a (b)", "é", 'x"y']
    found = built("choices", json.dumps(choices))
    assert all(accepts(found, text) for text in choices)
    assert not any(accepts(found, text) for text in ("", "non", "a", "a (b))"))
    assert accepts(built("choices", '[""]'), "")


def test_many_choices() -> None:
    choices = [f"option {i * 7919 % 10007}" for i in range(2000)]
    found = built("choices", json.dumps(choices))
    assert all(accepts(found, text) for text in choices[::100])
    assert not accepts(found, "option")


def test_it_says_what_its_tables_take() -> None:
    compiled = compile_constraint(ConstraintSpec("regex", "[a-z]{0,1000}[0-9]{0,1000}"))
    automaton = decode_body(compiled.body)
    assert isinstance(automaton, AutomatonBody)
    words = zlib.decompress(automaton.words) if automaton.packed else automaton.words
    columns, states = np.frombuffer(words, "<i4")[:2].tolist()
    assert compiled.held == 8 * states * columns > 2 * len(compiled.body)


def test_large_ones_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKED_FROM", 1 << 20)
    plain = compile_constraint(ConstraintSpec("regex", "[a-z]{0,1000}x"))
    monkeypatch.setattr(module, "PACKED_FROM", 1000)
    packed = compile_constraint(ConstraintSpec("regex", "[a-z]{0,1000}x"))
    assert [decode_body(each.body).packed for each in (plain, packed)] == [False, True]  # type: ignore[union-attr]
    assert len(packed.body) * 5 < len(plain.body)
    found = built("regex", "[a-z]{0,1000}x")
    assert accepts(found, "abcx")
    assert not accepts(found, "abc")


def test_a_schema_that_is_regular() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 12},
            "b": {"enum": ["x", None]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert compile_constraint(ConstraintSpec("json_schema", json.dumps(schema))).backend == "automaton"
    found = built("json_schema", json.dumps(schema))
    texts = ['{"a":3,"b":"x"}', '{"a":12,"b":null}', '{"a":13,"b":null}', '{"a":3}', '{"a": 3,"b":"x"}']
    assert [accepts(found, text) for text in texts] == [True, True, False, False, False]
    assert accepts(built("json_schema", json.dumps(schema), spaced=True), '{"a": 3, "b": "x"}')


@pytest.mark.parametrize("texts", [["1", "12"], ["no", "none"], ["1", "1.5", "-3", "2e5"]])
def test_every_alternative_is_reached(texts: list[str]) -> None:
    """What a leftmost-first automaton could never write."""
    schemas: list[dict[str, Any]] = [{"enum": [json.loads(t) if t[0] != "n" else t for t in texts]}]
    if "1.5" in texts:
        schemas = [{"anyOf": [{"type": "integer"}, {"type": "number"}]}]
    for schema in schemas:
        found = built("json_schema", json.dumps(schema))
        for text in texts:
            assert accepts(found, f'"{text}"' if text[0] == "n" else text), text


def test_options_of_a_schema_cannot_weaken_it() -> None:
    pytest.importorskip("llguidance")
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/n"}},
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node | {"not": {"required": ["x"]}}}}
    spec = ConstraintSpec("json_schema", json.dumps(schema | {"x-guidance": {"lenient": True}}))
    compiled = compile_constraint(spec)  # llguidance would leave `not` out
    assert compiled.backend == "automaton"


def test_a_recursive_schema() -> None:
    pytest.importorskip("llguidance")
    schema = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    found = built("json_schema", json.dumps(schema))
    assert accepts(found, "[[],[[]]]")
    assert not accepts(found, "[[], []]")
    assert accepts(built("json_schema", json.dumps(schema), spaced=True), "[[], []]")


def test_a_lark_grammar() -> None:
    pytest.importorskip("llguidance")
    found = built("lark", 'start: "(" start ")" | ""')
    assert accepts(found, "(())")
    assert not accepts(found, "(()")


def test_a_lark_grammar_of_tags() -> None:
    pytest.importorskip("llguidance")
    found = built("lark", 'start: "<b>" /<\\/?i>/ "\\"<" // <no token>')
    assert accepts(found, '<b></i>"<')


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "a(", "never closed"),
        ("regex", r"a\bb", "no text at all"),
        ("regex", "x" * 70_000, "65536"),
        ("regex", "\ud800", "surrogate"),
        ("choices", "[]", "1 to 2000"),
        ("choices", "[1]", "`choices`"),
        ("choices", "{", "`choices`"),
        ("choices", json.dumps(["x"] * 2001), "2001"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[" * 20_000, "not JSON"),
        ("json_schema", "[1]", "an object, true or false"),
        ("lark", "start: other", "unknown name"),
        ("json_schema", r'{"const": "\ud800"}', "surrogate"),
        ("json_schema", r'{"type": "object", "properties": {"\ud800": {}}}', "surrogate"),
        ("lark", 'start: "a" <|tool|> "b"', "character 11"),
        ("lark", "start: <[5]>", "names a token"),
        ("lark", r'start: "\"" /<\/>/ <*> // <', "character 19"),
        ("json_schema", '{"$ref": "#"}', "refers to itself"),
        (
            "json_schema",
            '{"type": "array", "items": {"$ref": "#/a"}, "a": {"$ref": "#/a"}, "minItems": 1}',
            "refers to itself",
        ),
        ("json_schema", '{"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}', "to itself"),
        (
            "json_schema",
            '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}',
            "cannot be followed",
        ),
        ("lark", "start: start", "no output can begin"),
        ("lark", 'start: "a" start', "cannot be followed"),
    ],
)
def test_what_is_refused(kind: Kind, text: str, says: str) -> None:
    with pytest.raises(ConstraintError, match=says):
        compile_constraint(ConstraintSpec(kind, text))


def test_a_table_with_too_many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CELLS", 10)
    with pytest.raises(ConstraintError, match="cells"):
        compile_constraint(ConstraintSpec("regex", "abcdef"))


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "llguidance", None)
    with pytest.raises(ConstraintError, match="llguidance"):
        compile_constraint(ConstraintSpec("lark", 'start: "a"'))


def test_a_worker_starts_with_what_schemas_share() -> None:
    shared = (free_value, containers, any_string)
    for made in shared:
        made.cache_clear()
    warm_up()
    assert all(made.cache_info().currsize for made in shared)


# --- regexes that no table holds -------------------------------------------------------------------


@cache
def followed(text: str) -> Any:
    """llguidance behind nothing, by a grammar; a byte is a token."""
    llguidance: Any = importlib.import_module("llguidance")
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text, log_level=0)


def taken(body: Any, text: str) -> bool:
    """Whether llguidance takes all of `text`, and may end there."""
    assert isinstance(body, GrammarBody)
    matcher = followed(body.text).deep_copy()
    return all(map(matcher.consume_token, text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    "pattern", [r"[a-c]*a[a-c]{18}", r"^(?:\d|[b-d])*b\w{17}(?:\s|é)$", r"(?i:[a-c]*a[a-z]{18})"]
)
def test_a_regex_that_is_too_ambiguous_is_followed_by_llguidance(pattern: str) -> None:
    """It was refused; texts near it are what Python's `re` says."""
    compiled = compile_constraint(ConstraintSpec("regex", pattern))
    assert compiled.backend == "grammar"
    body = decode_body(compiled.body)
    rng = random.Random(1)
    seen = set()
    for _ in range(300):
        text = "".join(rng.choice("abcabcabcabcabcabcabcabcA1") for _ in range(rng.randrange(16, 24)))
        text += rng.choice(["", "", "", " ", "é", "\u0661"])
        wanted = re.fullmatch(pattern, text, re.A) is not None
        assert taken(body, text) == wanted, text
        seen.add(wanted)
    assert seen == {True, False}


def test_what_llguidance_cannot_follow_either_stays_refused() -> None:
    with pytest.raises(ConstraintError, match="ambiguous"):
        compile_constraint(ConstraintSpec("regex", r"(?=x)[a-z]*a[a-z]{18}"))
