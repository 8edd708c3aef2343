"""Values inside structures: JSON, and parameters between tags, against a reader of their own."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.values import any_parameters, json_value, parameters, until
from ramify.protocol.errors import ConstraintError
from tests.actors.grammar.samples import sample

PARAMETER = re.compile(r"<parameter=([^>]*)>\n(.*?)</parameter>\n", re.DOTALL)
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "any"},
        "mode": {"type": "string", "enum": ["r", "w\n"]},
        "code": {"type": "string", "pattern": "^[a-f]+$", "minLength": 2, "maxLength": 5},
        "n": {"type": ["integer", "null"], "minimum": 3},
        "list": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2},
    },
    "$defs": {"one": {"enum": ["</parameter>", 1, "x"]}},
    "required": ["path", "n"],
    "additionalProperties": False,
}


def read(text: str) -> dict[str, Any]:
    """As Qwen3-Coder's parser."""
    assert PARAMETER.sub("", text) == ""
    found: dict[str, Any] = {}
    for name, value in PARAMETER.findall(text):
        plain = value.removesuffix("\n")
        kind = SCHEMA["properties"].get(name, {}).get("type")  # type: ignore[attr-defined]
        found[name] = plain if kind == "string" else json.loads(plain)
    return found


def test_parameters_between_tags_are_valid() -> None:
    made, notes = parameters(SCHEMA)
    assert notes == ()
    rng = random.Random(3)
    seen: set[str] = set()
    for _ in range(150):
        value = read(sample(made, rng, 200).decode())
        jsonschema.validate(value, SCHEMA)
        seen |= set(value)
    assert seen == {"path", "n"}  # what is free is seldom left by chance
    listed = {
        **SCHEMA,
        "properties": {**SCHEMA["properties"], "path": {"type": "string", "enum": ["a"]}},
    }  # type: ignore[dict-item]
    made, _ = parameters(listed)
    for _ in range(150):
        value = read(sample(made, rng, 200).decode())
        jsonschema.validate(value, listed)
        seen |= set(value)
    assert seen == set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert not made.accepts(b"<parameter=n>\n3\n</parameter>\n")  # path is required


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}},
        {"type": "object", "properties": {"a>": {}}},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5000}}},
    ],
)
def test_what_tags_cannot_keep_is_refused(schema: Any) -> None:
    with pytest.raises(ConstraintError):
        parameters(schema)


def test_open_parameters_are_told() -> None:
    made, notes = parameters({"type": "object", "properties": {"a": {"type": "string"}}})
    assert "not list" in notes[0]
    assert made.accepts(b"")
    assert any_parameters().accepts(b"<parameter=zz>\nq\n</parameter>\n")


def test_a_recursive_schema_is_written_to_a_depth() -> None:
    made, notes, _ = json_value({"type": "array", "items": {"$ref": "#"}, "maxItems": 2})
    assert made.accepts(b"[[], [[]]]")
    assert "recursion is written" in notes[0]


def test_a_schema_may_be_text() -> None:
    assert json_value('{"const": 1}')[0].accepts(b"1")
    for wrong in ("{", "[]"):
        with pytest.raises(ConstraintError):
            json_value(wrong)
    with pytest.raises(UnsupportedSchema):
        json_value(False)


def test_until_has_the_first_one_only() -> None:
    made = until([b"</t>", b"\xff</t>\xfe"])
    assert made.accepts(b"a<</t>")
    assert made.accepts(b"a\xff<|q|>\xfe\xff</t>\xfe")
    assert not made.accepts(b"a</t>b</t>")
