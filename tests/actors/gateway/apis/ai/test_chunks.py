"""Deltas become UI message chunks."""

from typing import Any

import msgspec
import pytest

from ramify.actors.gateway.apis.ai.chunks import ChatDialogue, ChatTranscript
from ramify.actors.gateway.apis.ai.requests import SendRequest
from ramify.protocol.errors import Overloaded
from ramify.protocol.wire import Delta, Done, Error, JsonObject, Part
from tests.messages import usage

REQUEST = {
    "requestId": "r",
    "id": "c",
    "trigger": "submit-message",
    "messages": [{"role": "user", "parts": [{"type": "text", "text": "Hi"}]}],
}
USAGE = usage(prompt=5, cached=4, output=3, ttft_ms=0)


@pytest.fixture
def dialogue() -> ChatDialogue:
    return ChatDialogue(msgspec.convert(REQUEST, SendRequest), "msg-1")


def delta(*parts: Part) -> Delta:
    return Delta(branch="main", position=9, text="".join(p.text for p in parts), parts=list(parts))


def done(reason: Any = "stop", **more: Any) -> Done:
    return Done(id=2, branch="main", position=9, reason=reason, usage=USAGE, **more)


def kinds(chunks: list[JsonObject]) -> list[str]:
    return [chunk["type"] for chunk in chunks]


def text(said: str) -> Part:
    return Part(kind="text", text=said)


def test_thoughts_text_and_the_end(dialogue: ChatDialogue) -> None:
    dialogue.receive([delta(Part(kind="markup", text="<think>"), Part(kind="reasoning", text="hm"))])
    dialogue.receive([delta(Part(kind="markup", text="</think>"), text("\n\n"))])
    dialogue.receive([delta(text("Yes")), delta(text(".")), done()])
    chunks = dialogue.take()
    assert kinds(chunks) == [
        *("start", "start-step", "reasoning-start", "reasoning-delta", "reasoning-end"),
        *("text-start", "text-delta", "text-delta", "text-end", "finish-step", "finish"),
    ]
    assert chunks[0] == {"type": "start", "messageId": "msg-1"}
    assert [chunk["delta"] for chunk in chunks if chunk["type"] == "text-delta"] == ["\n\nYes", "."]
    usage = {"inputTokens": 5, "cachedInputTokens": 4, "outputTokens": 3, "totalTokens": 8, "queueMs": 0}
    assert chunks[-1] == {"type": "finish", "finishReason": "stop", "messageMetadata": {"usage": usage}}
    assert (dialogue.over, dialogue.error, dialogue.take()) == (True, None, [])


def test_calls_whole_cut_and_forced(dialogue: ChatDialogue) -> None:
    opening = Part(kind="call", text="", call=0, id="c0", name="look")
    dialogue.receive(
        [
            delta(text("\n"), opening),
            delta(Part(kind="call", text="", call=0, arguments='{"a"')),
            delta(Part(kind="call", text="", call=0, arguments=":1}"), text("\n")),
            delta(Part(kind="call", text="", call=1, id="c1", name="cut", arguments="{")),
            done(
                "tool",
                tool_calls=[
                    {"id": "c0", "function": {"name": "look", "arguments": '{"a":1}'}},
                    {"id": "c9", "function": {"name": "forced", "arguments": "{}"}},
                ],
            ),
        ]
    )
    chunks = dialogue.take()
    assert kinds(chunks)[2:] == [
        *("tool-input-start", "tool-input-delta", "tool-input-delta"),
        *("tool-input-start", "tool-input-delta"),
        *("tool-input-available", "tool-input-start", "tool-input-available", "tool-input-error"),
        *("finish-step", "finish"),
    ]
    assert chunks[7]["input"] == {"a": 1}
    assert (chunks[9]["toolCallId"], chunks[10]["input"]) == ("c9", "{")
    assert chunks[-1]["finishReason"] == "tool-calls"


def test_what_fails_has_no_chunks_of_its_own(dialogue: ChatDialogue) -> None:
    dialogue.receive([Error(code="skipped", message="s", id=2), Error(code="too_long", message="long")])
    assert (dialogue.over, dialogue.error, dialogue.take()) == (True, "long", [])
    dialogue.fail(Overloaded("later"))
    assert dialogue.error == "long"


def test_the_server_ends_it(dialogue: ChatDialogue) -> None:
    dialogue.receive([delta(text("So"))])
    dialogue.fail(Overloaded("the server stops"))
    assert (dialogue.over, dialogue.error) == (True, "the server stops")
    assert kinds(dialogue.take())[-1] == "text-delta"


def test_a_generation_that_fails_or_is_cancelled(dialogue: ChatDialogue) -> None:
    dialogue.receive([done("error", error="internal", message="NaN")])
    assert dialogue.error == "NaN"
    other = ChatDialogue(msgspec.convert(REQUEST, SendRequest), "m")
    other.receive([done("cancelled")])
    assert kinds(other.take()) == ["start", "start-step", "finish-step", "abort", "finish"]


def test_a_transcript_joins_what_belongs_together() -> None:
    transcript = ChatTranscript()
    said = [
        {"type": "start", "messageId": "m"},
        *({"type": "text-delta", "id": "t", "delta": piece} for piece in "abc"),
        {"type": "text-delta", "id": "u", "delta": "d"},
        *({"type": "tool-input-delta", "toolCallId": "c", "inputTextDelta": piece} for piece in "xy"),
        {"type": "finish"},
    ]
    for chunk in said:
        transcript.add(chunk)
    whole = transcript.chunks()
    assert [chunk.get("delta") or chunk.get("inputTextDelta") for chunk in whole] == [
        *(None, "abc", "d", "xy", None)
    ]
    assert transcript.size > 6
    transcript.add({"type": "text-delta", "id": "u", "delta": "e"})
    assert len(transcript.chunks()) == 6
