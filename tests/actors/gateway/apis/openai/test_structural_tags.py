"""Both forms of a structural tag become the same constraint."""

from typing import Any

import pytest

from ramify.actors.gateway.apis.openai.structural_tags import structural_constraint
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import Constraint, StructuralTag, Tag

SCHEMA: dict[str, Any] = {"type": "object"}
TAG = Tag(begin="<f=g>", json_schema=SCHEMA, end="</f>")


def test_the_older_form() -> None:
    found = structural_constraint([{"begin": "<f=g>", "schema": SCHEMA, "end": "</f>"}], ["<f="], None)
    assert found == Constraint(
        structural_tag=StructuralTag(tags=[TAG], triggers=["<f="]), after_thought=True
    )


def test_the_newer_form() -> None:
    content = {"type": "json_schema", "json_schema": SCHEMA}
    others = [
        {"type": "tag", "begin": "<r>", "content": {"type": "regex", "pattern": "a+"}, "end": ""},
        {"begin": "<c>", "content": {"type": "const_string", "value": "x"}, "end": ">"},
    ]
    found = structural_constraint(
        None,
        None,
        {
            "type": "triggered_tags",
            "triggers": ["<"],
            "tags": [{"begin": "<f=g>", "content": content, "end": "</f>"}, *others],
            "at_least_one": True,
            "stop_after_first": True,
        },
    )
    tags = [TAG, Tag(begin="<r>", regex="a+"), Tag(begin="<c>", choices=["x"], end=">")]
    assert found.structural_tag == StructuralTag(
        tags=tags, triggers=["<"], at_least_one=True, stop_after_first=True
    )


@pytest.mark.parametrize(
    ("structures", "form", "fault"),
    [
        (None, None, "structures"),
        ([], {}, "structures"),
        ([], None, "tags"),
        ([{"begin": "", "schema": {}, "end": ""}], None, "begin"),
        ([{"begin": "<", "end": ""}], None, "schema"),
        (None, {"type": "sequence", "elements": []}, "sequence"),
        (None, {"type": "triggered_tags", "triggers": [], "tags": [{"begin": "<"}]}, "content"),
        ([{"begin": "<", "schema": {}, "end": ""}] * 200, None, "128"),
    ],
)
def test_others_are_refused_by_name(structures: Any, form: Any, fault: str) -> None:
    with pytest.raises(InvalidField, match=fault):
        structural_constraint(structures, None, form)
