"""JSON, character by character, against `json`."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.calls.scanner import Broken, Scanner
from ramify.protocol.json_value import MAX_DEPTH
from tests.amount import examples

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


@settings(derandomize=True, deadline=None, max_examples=examples(80, 200))
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


@settings(derandomize=True, deadline=None, max_examples=examples(200, 400))
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


def test_only_members_of_the_object_itself_are_named() -> None:
    scanner = Scanner()
    keys: list[str | None] = []
    for c in '{"a\\"b": {"c": [1]}, "d": "e"}':
        scanner.push(c)
        keys.append(scanner.key)
    assert list(dict.fromkeys(keys)) == [None, 'a"b', "d"]
    assert scanner.ended


@pytest.mark.parametrize("digits", [399, 400])
def test_a_number_has_so_many_characters_at_most(digits: int) -> None:
    assert scan('{"a":' + "1" * digits + "}") is not None
    assert scan('{"a":' + "1" * 401 + "}") is None


def test_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> str:
        return '{"a":' + "[" * depth + "]" * depth + "}"

    assert scan(nested(MAX_DEPTH)) is not None
    assert scan(nested(MAX_DEPTH + 1)) is None


def test_a_key_that_no_one_can_decode_is_broken() -> None:
    assert scan('{"\\x": 1}') is None
    assert scan('{"a\nb": 1}') == ({"a\nb": "1"}, 10)  # line breaks are allowed


def test_a_string_that_is_no_key_may_be_read_at_once() -> None:
    scanner = Scanner()
    asked = []
    for c in '{"k": "v\\"", "l": {"m": "n"}}':
        asked.append(scanner.in_string)
        scanner.push(c)
    asked.append(scanner.in_string)
    places = [at for at, each in enumerate(asked) if each]
    assert places == [7, 8, 10, 25, 26]  # not the character behind a backslash
