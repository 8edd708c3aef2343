"""Tool calls in the shapes that models write them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.toolcalls import call_id, parse, tool_names

NAMES = frozenset({"weather", "add"})
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'


def called(text: str) -> list[tuple[str, Any]] | None:
    parsed = parse(text, NAMES, 40)
    if parsed is None:
        return None
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.calls]


WEATHER = ("weather", {"city": "Köln"})
ADD = ("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "calls", "left"),
    [
        (f"<tool_call>{CALL}</tool_call>", [WEATHER], ""),
        (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", [WEATHER], "Let me see."),
        (f"<tool_call>\n{CALL}\n", [WEATHER], ""),
        (
            f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name":"add","arguments":{{"a":1}}}}</tool_call>!',
            [WEATHER, ADD],
            "!",
        ),
        ('{"name": "add", "parameters": {"a": 1}}', [ADD], ""),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            [ADD, ADD],
            "",
        ),
        (f"Sure. [TOOL_CALLS] [{CALL}]", [WEATHER], "Sure."),
        (f" [{CALL}, {CALL}]\n", [WEATHER, WEATHER], ""),
        ('{"name": "add"}', [("add", {})], ""),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [ADD], ""),
    ],
)
def test_shapes(text: str, calls: list[tuple[str, Any]], left: str) -> None:
    assert called(text) == calls
    parsed = parse(text, NAMES, 40)
    assert parsed is not None
    assert parsed.text == left


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 4.",
        '{"answer": 4}',
        '{"name": "unknown", "parameters": {}}',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>weather(Köln)</tool_call>",
        f"<tool_call>{CALL} and more</tool_call>",
        f"{CALL} is how you would call it",
        f"[{CALL}, 4]",
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": 1}',
        "[]",
        "[" * 100_000,
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert parse(text, NAMES, 0) is None


def test_an_invalid_block_stays_in_the_text() -> None:
    parsed = parse(f"<tool_call>oops</tool_call><tool_call>{CALL}</tool_call>", NAMES, 0)
    assert parsed is not None
    assert len(parsed.calls) == 1
    assert parsed.text == "<tool_call>oops</tool_call>"


def test_tags_inside_a_string_are_a_string() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>'
    assert called(text) == [("add", {"a": "</tool_call><tool_call>"})]


def test_line_breaks_inside_a_string() -> None:
    assert called('{"name": "add", "arguments": {"a": "1\n2"}}') == [("add", {"a": "1\n2"})]


def test_the_shape_is_openais() -> None:
    parsed = parse(CALL, NAMES, 40)
    assert parsed is not None
    assert parsed.calls == [
        {
            "id": call_id(40, 0),
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
        }
    ]


def test_ids_are_unique_and_nine_alphanumeric_characters() -> None:
    ids = [call_id(position, index) for position in (0, 40, 2**31 - 1) for index in (0, 1, 99)]
    assert len(set(ids)) == len(ids)
    assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_no_tools_no_calls() -> None:
    assert parse(CALL, frozenset(), 0) is None


def test_tool_names() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "weather"}},
        {"name": "add"},
        {"function": "?"},
        {},
    ]
    assert tool_names(tools) == NAMES
    assert tool_names(None) == frozenset()


PIECES = [
    '{"name": "add"',
    "}",
    "[",
    "]",
    ",",
    ";",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "x",
    '"',
    " ",
]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_mixture_is_read(text: str) -> None:
    parsed = parse(text, NAMES, 0)
    assert parsed is None or parsed.calls


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": ' + "[" * 900 + "]" * 900 + "}",  # the template would exhaust the stack
        '{"x": NaN}',
        r'{"x": "\ud800"}',  # half a surrogate pair: no frame can carry it
    ],
)
def test_a_call_that_nobody_could_read_is_text(arguments: str) -> None:
    call = f'{{"name": "add", "arguments": {arguments}}}'
    assert parse(f"<tool_call>{call}</tool_call>", NAMES, 0) is None
    assert parse(call, NAMES, 0) is None
    quoted = json.dumps({"name": "add", "arguments": arguments})
    assert parse(quoted, NAMES, 0) is None
