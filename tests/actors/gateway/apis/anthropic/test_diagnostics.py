"""Why a prompt is not the beginning of the one before."""

from typing import Any

import pytest

from ramify.actors.gateway.apis.anthropic.diagnostics import ENTRY, RequestMark, RequestMarks
from ramify.protocol.wire import ChatMessage

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def said(*turns: str) -> list[ChatMessage]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [ChatMessage(role=roles[turn[0]], content=turn) for turn in turns]  # type: ignore[arg-type]


def mark(*turns: str, tools: Any = TOOLS) -> RequestMark:
    return RequestMark.of(said(*turns), tools)


@pytest.mark.parametrize(
    ("later", "change"),
    [
        (mark("s1", "u1", "a1", "u2"), None),
        (mark("s1", "u1"), None),
        (mark("s2", "u1", "a1", "u2"), "system_changed"),
        (mark("u1", "a1", "u2"), "system_changed"),
        (mark("s1", "u2", "a1", "u2"), "messages_changed"),
        (mark("s1"), "messages_changed"),
        (mark("s1", "u1", tools=None), "tools_changed"),
    ],
)
def test_what_changed(later: RequestMark, change: str | None) -> None:
    found = later.diverges(mark("s1", "u1"))
    assert (found.change if found is not None else None) == change


def test_how_many_tokens_are_missed() -> None:
    before = mark("s" * 100, "u" * 100, tools=None)
    changed = mark("s" * 100, "u" * 99 + "!", tools=None).diverges(before)
    assert changed is not None
    told = changed.told(1000)["cache_miss_reason"]
    assert told["type"] == "messages_changed"
    assert 400 < told["cache_missed_input_tokens"] < 600


def test_the_oldest_are_forgotten() -> None:
    marks = RequestMarks(most_bytes=3 * (ENTRY + 16))
    for number in range(5):
        marks.add("ann", f"msg_{number}", mark("u1"))
    assert [marks.find("ann", f"msg_{number}") is not None for number in range(5)] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert marks.find("bob", "msg_4") is None
    assert marks.size == 3 * (ENTRY + 16)
