"""JSON, character by character, against `json`."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.calls.scanner import Broken, Scanner

SCALARS = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scan(text: str) -> tuple[dict[str, str], int] | None:
    """(the text of each member's value, where the object ends); None if it is broken, or goes on."""
    scanner = Scanner()
    found: dict[str, str] = {}
    for at, c in enumerate(text):
        try:
            inside = scanner.push(c)
        except Broken:
            return None
        if inside:
            assert scanner.key is not None
            found[scanner.key] = found.get(scanner.key, "") + c
        if scanner.ended:
            return found, at + 1
    return None


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_objects_end_where_they_end(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    found = scan(text + "} and more")
    assert found is not None
    members, end = found
    assert end == len(text)
    assert {key: json.loads(member) for key, member in members.items()} == value


def fault(text: str) -> str | None:
    """What `json` says against it."""
    try:
        json.loads(text, strict=False)
    except ValueError as error:
        return str(error)
    return None


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.lists(st.sampled_from([*'{}[]:,"a\\ 1-.e', "true", '"k":'])).map("".join))
def test_what_is_no_json_is_broken(rest: str) -> None:
    text = "{" + rest
    found = scan(text)
    why = fault(text if found is None else text[: found[1]])
    if found is None:
        assert why is not None
    else:  # an escape that there is not: whoever decodes the object sees it
        assert why is None or "escape" in why


LONG = ['{"a": ' + "[" * 40, '{"a": ' + "1" * 500 + "}"]


@pytest.mark.parametrize("text", ["[1]", "1", '"a"', "x", *LONG])
def test_only_objects_that_travel(text: str) -> None:
    assert scan(text) is None


def test_a_value_is_known_while_it_comes() -> None:
    scanner = Scanner()
    inside = [scanner.push(c) for c in '{"name": "x", "b": {"name": {}}, "c": 1}']
    assert "".join("^" if each else "." for each in inside) == (
        ".........^^^.......^^^^^^^^^^^^.......^."
    )
