"""Which back end a schema is served by."""

from typing import Any

import pytest

from ramify.actors.grammar import grammars
from ramify.actors.grammar.route import route
from ramify.protocol.errors import ConstraintError
from tests.actors.grammar.random_schemas import FAULTS, SchemaCampaign
from tests.amount import examples

CELL = {
    "type": "array",
    "prefixItems": [{"type": "integer"}, {"$ref": "#/$defs/l"}],
    "minItems": 2,
    "items": False,
}
LIST = {"$ref": "#/$defs/l", "$defs": {"l": {"anyOf": [{"type": "null"}, CELL]}}}


def test_what_is_regular_is_an_automaton() -> None:
    routed = route({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    assert routed.grammar is None
    assert routed.automaton is not None
    assert routed.automaton.accepts(b'{"a":1}')
    assert routed.automaton.accepts(b'{"a":1,"b":[{"c":[{"d":[{"e":[[[{}]]]}]}]}]}')
    assert routed.notes == ()


@pytest.mark.skipif(grammars.llguidance is None, reason="llguidance has no wheel here")
def test_recursion_is_for_llguidance() -> None:
    routed = route(LIST)
    assert routed.automaton is None
    assert routed.grammar is not None
    assert "$defs" in routed.grammar


@pytest.mark.skipif(grammars.llguidance is None, reason="llguidance has no wheel here")
def test_llguidance_gets_no_format_that_it_does_not_know() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "colour"}},
    }
    schema["properties"]["b"] = {"$ref": "#"}
    routed = route(schema)
    assert routed.grammar is not None
    assert "colour" not in routed.grammar
    assert any("'colour'" in note for note in routed.notes)


def test_without_llguidance_recursion_goes_to_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "llguidance", None)
    routed = route(LIST)
    assert routed.automaton is not None
    assert routed.automaton.accepts(b"[1,[2,null]]")
    assert any("deep" in note for note in routed.notes)


def test_nobody_serves_it() -> None:
    schema = {"properties": {"a": {"type": "array", "unevaluatedItems": False}}}
    with pytest.raises(ConstraintError, match="unevaluatedItems") as caught:
        route(schema)
    assert caught.value.details == {"pointer": "/properties/a/unevaluatedItems"}


FREE: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    "schema",
    [
        FREE | {"minProperties": 2},
        FREE | {"minProperties": 3, "required": ["a"]},
        {"patternProperties": {"^a": True}, "additionalProperties": False, "minProperties": 2},
        {
            "$defs": {"n": FREE | {"minProperties": 2, "properties": {"n": {"$ref": "#/$defs/n"}}}},
            "properties": {"n": {"$ref": "#/$defs/n"}},
        },
    ],
)
def test_names_that_must_differ_are_checked_and_llguidance_counts_none(schema: dict[str, Any]) -> None:
    routed = route(schema)
    assert routed.grammar is None
    assert any(place.distinct for place in routed.places)


@pytest.mark.skipif(grammars.llguidance is None, reason="llguidance has no wheel here")
def test_what_llguidance_says_is_told_in_short() -> None:
    """It quoted a regex of 8,000 characters that it had made itself."""
    with pytest.raises(ConstraintError, match="llguidance: the grammar") as told:
        route({"properties": {"a": {"minimum": 1e-300}}})
    assert len(told.value.message) < 600
    assert told.value.details == {"pointer": "/properties/a/minimum"}


@pytest.mark.skipif(grammars.llguidance is None, reason="llguidance has no wheel here")
def test_what_only_llguidance_could_hold_is_refused_where_it_weakens() -> None:
    long = {"type": "string", "maxLength": 5000}
    assert route({"properties": {"a": long}}).grammar is not None
    assert route({"properties": {"a": long}, "required": ["a"], "minProperties": 1}).grammar is not None
    with pytest.raises(ConstraintError, match="/properties/b/minProperties is not kept"):
        route({"properties": {"a": long, "b": FREE | {"minProperties": 2}}})


@pytest.mark.skipif(grammars.llguidance is None, reason="llguidance has no wheel here")
def test_random_schemas_against_jsonschema() -> None:
    """A few of the campaign `benchmarks/random_schemas.py`: random outputs and instances of each."""
    campaign = SchemaCampaign(show=3)
    for seed in range(examples(40, 400)):
        campaign.one(seed)
    counts = campaign.counts
    assert not [kind for kind in FAULTS if counts[kind]]
    assert counts["served: AutomatonConstraint"] > 20
    assert counts["outputs: ended"] > 100
    assert counts["invalid instances"] > 200
