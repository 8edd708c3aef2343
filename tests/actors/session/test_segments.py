"""Segments by themselves: marks, what a cut keeps, and what is metered of them."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.actors.session.meter import LOGPROB, Holdings, Meter
from ramify.actors.session.segments import InputSegment, OutputSegment, Tail
from ramify.protocol.config import Limits
from ramify.protocol.wire import ChatMessage, TokenLogprob


def decode(tokens: Sequence[int]) -> str:
    """A token is a letter."""
    return "".join(chr(token) for token in tokens)


def letters(text: str) -> "array[int]":
    return array("i", map(ord, text))


def meter() -> Meter:
    return Holdings(Limits()).open("")


def output(*chunks: tuple[int, str], start: int = 10, more: str = "", held: Meter | None = None) -> Any:
    """Chunks of (tokens, text), and `more` that is not released yet."""
    segment = OutputSegment(start, op=3, client="c")
    segment.charge(held, 0)
    count = 0
    for size, text in chunks:
        segment.tokens.extend(letters(text.ljust(size, ".")[:size]))
        count += size
        segment.release(count, text)
    segment.tokens.extend(letters(more))
    return segment


def logprobs(count: int, top: int) -> list[TokenLogprob]:
    return [TokenLogprob(token=i, logprob=-1.0, top=[(1, -2.0)] * top) for i in range(count)]


def test_marks_name_positions_and_texts() -> None:
    segment = output((2, "Hel"), (1, "lo"), (3, " wor"), more="xyz")
    assert (segment.start, segment.released, segment.end) == (10, 16, 19)
    assert [segment.mark_at(position) for position in (10, 11, 12, 13, 15, 16, 19)] == [
        0,
        0,
        1,
        2,
        2,
        3,
        3,
    ]
    assert [segment.mark_position(mark) for mark in range(4)] == [10, 12, 13, 16]
    assert [segment.offset_mark(chars) for chars in (0, 2, 3, 4, 5, 8, 9, 99)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert OutputSegment(5).released == 5


def test_a_text_needs_a_token() -> None:
    segment = output((2, "ab"))
    segment.release(2, "")  # nothing new
    assert segment.counts == [2]
    with pytest.raises(ValueError, match="without a token at mark 2"):
        segment.release(2, "c")
    with pytest.raises(ValueError, match="mark 0"):
        OutputSegment(0).release(0, "c")


def test_what_is_released_is_metered_with_its_tokens_and_text() -> None:
    held = meter()
    segment = output(held=held)
    before = held.held
    segment.release(1, "")
    one = held.held - before
    segment.release(101, "x" * 1000)
    assert 1000 + 100 * 8 <= held.held - before - one <= 1000 + 100 * 8 + 2 * one
    kept = held.held
    segment.release(102, "")
    assert held.held - kept == one


def test_a_cut_at_a_mark_keeps_the_chunks_before_it() -> None:
    cut = output((2, "Hel"), (1, "lo"), (3, " wor")).cut(13, decode)
    assert (cut.text, cut.counts, cut.end, cut.ended) == ("Hello", [2, 3], 13, True)
    assert (cut.op, cut.client, cut.tail, cut.role) == (3, "c", Tail.OPEN, "assistant")


def test_a_cut_inside_a_chunk_decodes_what_is_left_of_it() -> None:
    cut = output((2, "He"), (3, "llo")).cut(14, decode)
    assert (cut.text, cut.counts) == ("Hell", [2, 4])
    first = output((3, "llo")).cut(11, decode)
    assert (first.text, first.counts) == ("l", [1])


def test_a_cut_is_metered_with_what_it_keeps() -> None:
    held = meter()
    segment = output((100, "x" * 100), (100, "y" * 100), held=held)
    segment.logprobs = logprobs(200, top=4)
    before = held.held
    cut = segment.cut(110, decode)
    assert cut.logprobs == logprobs(100, top=4)
    grown = held.held - before
    assert grown >= 100 * LOGPROB * 5 + 100 * 8 + 100
    assert grown <= 100 * LOGPROB * 5 + 100 * 8 + 100 + 2000
    plain = output((100, "x" * 100), held=held)
    before = held.held
    half = plain.cut(60, decode)
    assert 50 * 9 <= held.held - before <= 50 * 9 + 2000
    assert half.logprobs is None


def test_a_cut_stays_what_it_was() -> None:
    segment = output((2, "ab"), (2, "cd"))
    segment.quiet, segment.lead, segment.tail, segment.role = True, 1, Tail.RAW, None
    cut = segment.cut(12, decode)
    assert (cut.quiet, cut.lead, cut.tail, cut.role) == (True, 1, Tail.RAW, None)
    segment.tail, segment.role, segment.eos_text = Tail.EOS, "assistant", "<end>"
    cut = segment.cut(12, decode)
    assert (cut.tail, cut.role, cut.raw) == (Tail.OPEN, "assistant", "ab")  # its end is gone


def test_a_cut_keeps_what_its_text_is() -> None:
    segment = output((2, "ab"), (2, "cd"), (2, "ef"))
    segment.labels = ["reasoning", "text"]
    assert segment.labelled == 2
    assert [(p.kind, p.text) for p in segment.cut(14, decode).parts(0, 2)] == [
        ("reasoning", "ab"),
        ("text", "cd"),
    ]
    inside = segment.cut(11, decode)
    assert [(p.kind, p.text) for p in inside.parts(0, 1)] == [("reasoning", "a")]
    behind = segment.cut(15, decode)  # of the last chunk it is not known yet
    assert [(p.kind, p.text) for p in behind.parts(0, 3)] == [("reasoning", "ab"), ("text", "cde")]
    assert output((2, "ab")).cut(11, decode).labels is None


def turn(content: str, role: Any = "user", **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)


def shown(*messages: ChatMessage, tail: Tail = Tail.CLOSED) -> InputSegment:
    text = "".join(f"<{message.role}>{message.content}" for message in messages)
    return InputSegment(5, letters(text), text, tail=tail, role="user", messages=messages, chat=True)


def test_a_cut_of_input_keeps_the_messages_that_are_still_there() -> None:
    segment = shown(turn("same"), turn("same", "system"), turn("other and much longer"))
    first = len("<user>same")
    second = first + len("<system>same")
    assert segment.cut(5 + first, decode).messages == (turn("same"),)
    cut = segment.cut(5 + second, decode)
    assert cut.messages == (turn("same"), turn("same", "system"))
    assert (cut.text, cut.role, cut.tail, cut.chat) == (
        "<user>same<system>same",
        "system",
        Tail.OPEN,
        True,
    )
    inside = segment.cut(5 + second + len("<user>other and much lo"), decode)
    assert inside.messages[-1] == turn("other and much lo")
    assert (len(inside.messages), inside.role) == (3, "user")
    between = segment.cut(5 + second + len("<us"), decode)
    assert between.messages == (turn("same"), turn("same", "system"))


def test_a_cut_inside_a_content_loses_the_calls_behind_it() -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    segment = shown(turn("a long beginning of a text", tool_calls=[call]))
    (message,) = segment.cut(5 + len("<user>a long beginning of"), decode).messages
    assert (message.content, message.tool_calls) == ("a long beginning of", None)


def test_a_content_that_only_begins_alike_is_not_kept() -> None:
    text = "<user>a long beginning of something else"
    segment = InputSegment(
        0, letters(text), text, tail=Tail.CLOSED, messages=[turn("a long beginning of a text")]
    )
    assert segment.cut(len(text) - 1, decode).messages == ()


def test_a_content_may_be_the_very_beginning() -> None:
    messages = [turn("ab"), turn("cd")]
    segment = InputSegment(0, letters("abcdef"), "abcdef", tail=Tail.CLOSED, messages=messages)
    assert segment.cut(3, decode).messages == (turn("ab"),)


def test_templates_may_trim_what_they_show() -> None:
    text = "<user>hello<user>hello"
    messages = [turn("  hello "), turn("hello")]
    segment = InputSegment(0, letters(text), text, tail=Tail.CLOSED, messages=messages)
    assert segment.cut(len("<user>hello<us"), decode).messages == (messages[0],)


def test_raw_input_stays_raw() -> None:
    segment = InputSegment(3, letters("abc"), "abc", tail=Tail.RAW, op=9, turn=1)
    cut = segment.cut(5, decode)
    assert (cut.text, cut.tail, cut.role, cut.op, cut.turn) == ("ab", Tail.RAW, None, 9, 1)


def test_input_is_metered_with_its_texts_and_messages() -> None:
    sizes = []
    for more in (
        {},
        {"raw": "y" * 1000},
        {"messages": [turn("z" * 1000)]},
        {"messages": [turn("", reasoning="z" * 1000)]},
    ):
        held = meter()
        before = held.held
        segment = InputSegment(0, letters("x" * 100), "x" * 100, tail=Tail.RAW, **more)  # type: ignore[arg-type]
        segment.count(held)
        sizes.append(held.held - before)
    assert 100 * 9 <= sizes[0] <= 100 * 9 + 1000
    assert all(1000 <= size - sizes[0] <= 2000 for size in sizes[1:])
