"""Segments by themselves: marks, what a cut keeps, and what is metered of them."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.actors.calls.labels import label_bytes
from ramify.actors.kit.memory import LOGPROB, MARK, SEGMENT, TOKEN, Holdings, Meter
from ramify.actors.session.branches.segments import History, InputSegment, OutputSegment, Tail
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


def test_input_is_metered_as_a_segment_its_tokens_and_its_texts() -> None:
    def held(**fields: Any) -> int:
        meter_, text = meter(), "x" * 10
        before = meter_.held
        segment = InputSegment(0, letters(text), text, tail=Tail.RAW, **fields)
        segment.count(meter_)
        return meter_.held - before

    plain = SEGMENT + 10 * TOKEN + 10
    assert held() == plain
    assert held(raw="y" * 7) == plain + 7
    assert held(messages=[turn("abc", reasoning="de"), turn("f")]) == plain + 2 * SEGMENT + 6
    older = History(None, [turn("a" * 50)])
    history = History(older, [turn("ab")])  # what stands before it is held by another segment
    assert held(history=history) == plain + SEGMENT + 2


def test_output_is_metered_with_each_mark_token_and_letter() -> None:
    held = meter()
    segment = output(held=held)
    for count, text, cost in [(1, "", MARK + TOKEN), (4, "abc", MARK + 3 * TOKEN + 3), (4, "", 0)]:
        before = held.held
        segment.release(count, text)
        assert held.held - before == cost


def test_a_cut_is_metered_exactly_like_what_it_is() -> None:
    held = meter()
    segment = output((4, "abcd"), (4, "efgh"), held=held)
    segment.logprobs = logprobs(8, top=2)
    before = held.held
    at_mark = segment.cut(14, decode)
    assert held.held - before == SEGMENT + 4 * TOKEN + MARK + 4 + 4 * 3 * LOGPROB
    before = held.held
    inside = segment.cut(15, decode)  # its last token belongs to a mark of its own
    rest = MARK + TOKEN + 1
    assert held.held - before == SEGMENT + 5 * TOKEN + MARK + 4 + rest + 5 * 3 * LOGPROB
    assert (at_mark.counts, inside.counts) == ([4], [4, 5])


def test_a_history_is_read_from_its_beginning() -> None:
    first, second = turn("a"), turn("b", "assistant")
    begun = History(None, [first])
    assert (begun.count, begun.all()) == (1, [first])
    following = History(begun, [second, first])
    assert (following.count, following.all()) == (3, [first, second, first])


def test_what_was_said_leaves_out_what_stood_before_and_thoughts() -> None:
    segment = output((1, "lead"), (1, " think"), (1, " say"))
    assert segment.said == "lead think say"
    segment.lead = 4
    assert segment.said == " think say"
    segment.labels = ["text", "text", "text"]
    assert segment.said == " think say"
    segment.labels = ["text", "reasoning", "text"]
    assert segment.said == "lead say"


def test_a_new_segment_is_open_and_heard() -> None:
    segment = OutputSegment(3)
    assert (segment.quiet, segment.ended, segment.lead, segment.eos_text) == (False, False, 0, "")
    assert (segment.turn, segment.messages, segment.history, segment.mean) == (0, (), None, None)
    assert (segment.tail, segment.role, segment.labelled, segment.raw) == (Tail.OPEN, "assistant", 0, "")
    fresh = InputSegment(1, letters("a"), "a", tail=Tail.RAW)
    assert (fresh.turn, fresh.chat, fresh.raw, fresh.end) == (0, False, "a", 2)


def test_a_cut_of_input_keeps_whose_it_was() -> None:
    history = History(None, [turn("old")])
    segment = InputSegment(
        3,
        letters("abcd"),
        "abcd",
        tail=Tail.CLOSED,
        role="user",
        op=8,
        turn=-2,
        chat=True,
        history=history,
    )
    cut = segment.cut(5, decode)
    assert (cut.start, cut.end, cut.op, cut.turn, cut.chat) == (3, 5, 8, -2, True)
    assert (cut.history, cut.role, cut.tail, cut.raw) == (history, "user", Tail.OPEN, "ab")


def test_a_content_is_recognized_by_its_first_sixteen_letters() -> None:
    content = "0123456789abcdefghij"
    text = f"<user>{content}"
    segment = InputSegment(0, letters(text), text, tail=Tail.CLOSED, messages=[turn(content)])
    assert segment.cut(len("<user>") + 15, decode).messages == ()
    assert [m.content for m in segment.cut(len("<user>") + 16, decode).messages] == [content[:16]]


class Reading:
    """Labels a chunk when the next one is known; holds 1000 bytes for each chunk that it was given."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, text: str) -> list[Any]:
        self.count += 1
        return ["text"] if self.count > 1 else []

    def finish(self) -> list[Any]:
        return ["reasoning"]

    def grown(self) -> int:
        return 1000


def test_labels_are_metered_as_they_become_known_and_their_reader_goes() -> None:
    held = meter()
    segment = output(held=held)
    reading: Any = Reading()
    segment.read(reading)
    before = held.held
    segment.release(1, "a")
    assert (held.held - before, segment.labelled) == (MARK + TOKEN + 1 + 1000, 0)
    before = held.held
    segment.release(2, "b")
    assert held.held - before == MARK + TOKEN + 1 + label_bytes("text") + 1000
    assert (segment.labels, segment.labelled) == (["text"], 1)
    before = held.held
    segment.ends()
    assert held.held - before == label_bytes("reasoning") + 1000
    assert (segment.labels, segment.reading, segment.ended) == (["text", "reasoning"], None, True)


def test_a_cut_is_metered_with_its_labels_and_texts() -> None:
    held = meter()
    segment = output((4, "abcd"), (4, "efgh"), (4, "ijkl"), held=held)
    segment.labels = ["reasoning"]
    before = held.held
    cut = segment.cut(18, decode)  # the second chunk has no label yet
    labels = label_bytes("reasoning") + label_bytes("text")
    assert cut.labels == ["reasoning", "text"]
    assert held.held - before == SEGMENT + 8 * TOKEN + 2 * MARK + 8 + labels
    typed = InputSegment(0, letters("abcd"), "abcd", tail=Tail.RAW)
    typed.count(held)
    before = held.held
    part = typed.cut(3, decode)
    assert held.held - before == SEGMENT + 3 * TOKEN + 3
    assert part.text == "abc"


def test_thoughts_before_the_first_words_are_not_said() -> None:
    segment = output((1, "hm"), (1, "  yes"), (1, "no"))
    segment.labels = ["reasoning", "text", "text"]
    assert segment.said == "yesno"
    segment.labels = ["text", "text", "text"]
    segment.chunks[0] = "  hm"
    assert segment.said == "  hm  yesno"  # as it is, where nothing was thought


def test_a_content_that_begins_the_text_is_kept_as_far_as_it_goes() -> None:
    content = "0123456789abcdefghij"
    segment = InputSegment(0, letters(content), content, tail=Tail.CLOSED, messages=[turn(content)])
    assert [m.content for m in segment.cut(18, decode).messages] == [content[:18]]
