"""Incremental output text against decoding everything at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.tokenizer.detokenizer import Detokenizer, Released, Stop, StopSet, TextStream, _breaks

# Whole words, segments of characters, invalid bytes, control tokens: ids are indices.
WORDS = [b"a", b"b", b"ab", b"ba ", "\u4e2d".encode(), "\U0001f600".encode(), b""]
PIECES = [
    b"\xe4",
    b"\xb8",
    b"\xad",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x80a",
    b"\xff",
    b"\xed",
    b"\xa0",
    b"b\xe4\xb8",
]
TABLE = WORDS + PIECES
BYTES = Detokenizer([bytes([i]) for i in range(256)])
IDS = st.lists(st.integers(0, len(TABLE) - 1), max_size=30)
CUTS = st.lists(st.integers(1, 4), max_size=30)
STOPS = st.lists(st.text("ab \u4e2d\ufffd", min_size=1, max_size=4), max_size=3)


def pushes(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    found, at = [], 0
    for cut in cuts:
        found.append(ids[at : at + cut])
        at += cut
    return [*found, ids[at:]]


def run(output: TextStream, parts: Sequence[Sequence[int]]) -> list[Released]:
    released = [output.push(part) for part in parts]
    released.append(output.finish())
    return [r for r in released if r is not None]


def text_of(ids: Sequence[int]) -> str:
    return b"".join(TABLE[i] for i in ids).decode("utf-8", "replace")


@settings(derandomize=True, deadline=None, max_examples=300)
@given(IDS, CUTS)
def test_concatenation_is_the_whole_decode(ids: list[int], cuts: list[int]) -> None:
    released = run(Detokenizer(TABLE).stream(), pushes(ids, cuts))
    assert "".join(r.text for r in released) == text_of(ids)
    counts = [r.count for r in released]
    assert counts == sorted(set(counts))
    assert counts[-1:] == ([len(ids)] if ids else [])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(IDS, CUTS, STOPS)
def test_marks_are_exact(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    """At each mark the shown text is the text of exactly that many tokens."""
    output = Detokenizer(TABLE).stream(stops)
    shown = ""
    for released in run(output, pushes(ids, cuts)):
        shown += released.text
        assert shown == text_of(ids[: released.count])
    assert output.released == (len(output_tokens(output, ids)), len(shown))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.one_of(st.integers(0x7F, 0xFF), st.sampled_from([0xED, 0xF4, 0xE0, 0xA0, 0x80, 0x90])))
)
def test_any_bytes_one_at_a_time(raw: list[int]) -> None:
    """Whatever can never become a character is shown at once; only an unfinished one waits."""
    output, shown = BYTES.stream(), ""
    for k, byte in enumerate(raw, 1):
        released = output.push([byte])
        shown += released.text if released else ""
        whole = bytes(raw[:k]).decode("utf-8", "replace")
        assert shown == (whole[:-1] if unfinished(bytes(raw[:k])) else whole)
    last = output.finish()
    assert shown + (last.text if last else "") == bytes(raw).decode("utf-8", "replace")


def output_tokens(output: TextStream, ids: list[int]) -> list[int]:
    return ids if output.stopped is None else ids[: output.stopped.keep_tokens]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(IDS, CUTS, STOPS)
def test_stops_against_the_whole_text(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    output = Detokenizer(TABLE).stream(stops)
    shown = "".join(r.text for r in run(output, pushes(ids, cuts)))
    whole = text_of(ids)
    hits = [(whole.find(s) + len(s), whole.find(s), s) for s in stops if s in whole]
    if not hits:
        assert output.stopped is None
        assert shown == whole
        return
    _, start, stop = min(hits)
    assert output.stopped is not None
    assert (output.stopped.stop, output.stopped.offset) == (stop, start)
    assert shown + output.stopped.tail_text == whole[:start]
    assert output.stopped.keep_tokens == output.released[0]
    # The longest run of whole tokens before the stop that ends between characters.
    assert all(
        len(text_of(ids[:k])) > start or not clean(ids[:k])
        for k in range(output.stopped.keep_tokens + 1, output.count)
    )


def clean(ids: list[int]) -> bool:
    """No character is unfinished after `ids`: text that follows cannot change what they show."""
    return not unfinished(b"".join(TABLE[i] for i in ids))


def unfinished(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" or unfinished(raw[error.end :])
    return False


@settings(derandomize=True, deadline=None, max_examples=300)
@given(IDS, STOPS)
def test_what_is_held_may_still_become_a_stop(ids: list[int], stops: list[str]) -> None:
    """Nothing waits longer than it has to: after each token, all that is safe has been shown."""
    output = Detokenizer(TABLE).stream(stops)
    for k, token in enumerate(ids, 1):
        output.push([token])
        if output.stopped is not None:
            return
        if clean(ids[:k]):
            text = text_of(ids[:k])
            held = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
            marks = [
                j
                for j in range(k + 1)
                if text_of(ids[:j]) + text_of(ids[j:k]) == text  # between two characters
                and len(text_of(ids[:j])) <= len(text) - held
            ]
            assert output.released[0] == max(marks)


def test_one_token_is_released_at_once() -> None:
    output = Detokenizer([b"Hello", b" world"]).stream()
    assert output.push([0]) == Released(1, "Hello")
    assert output.push([1]) == Released(2, " world")
    assert output.finish() is None


def test_a_character_in_pieces_waits_for_its_last_byte() -> None:
    output = BYTES.stream()
    assert [output.push([byte]) for byte in "\u4e2d".encode()] == [None, None, Released(3, "\u4e2d")]


def test_invalid_bytes_are_shown_promptly() -> None:
    """A run of bytes that can never be characters costs and waits nothing (SGLang #34740)."""
    output = BYTES.stream()
    assert [output.push([0xFF]) for _ in range(3)] == [Released(k, "\ufffd") for k in (1, 2, 3)]
    assert output.push([0xE4]) is None
    assert output.push([0x41]) == Released(5, "\ufffdA")


@pytest.mark.parametrize("run", [b"\xf0", b"\xe2\x82", b"\xf0\x9f\x98", b"a\xe2\x82"])
def test_a_run_of_beginnings_of_characters_is_shown_while_it_comes(run: bytes) -> None:
    """Each beginning is U+FFFD as soon as the next one shows that it never becomes a character."""
    output, shown, position = BYTES.stream(), "", 0
    for byte in (raw := run * 50):
        released = output.push([byte])
        if released is not None:
            shown, position = shown + released.text, released.count
            assert shown == raw[:position].decode("utf-8", "replace")
        assert output.count - position <= len(run)
    last = output.finish()
    assert last is not None
    assert shown + last.text == raw.decode("utf-8", "replace")


def test_a_run_in_tokens_of_several_bytes_keeps_marks_between_tokens() -> None:
    output = Detokenizer([b"x\xe2\x82", b"\xac\xf0", b"\x9f"]).stream()
    assert output.push([0]) is None
    assert output.push([0]) == Released(1, "x\ufffd")  # between the two, not inside the second
    assert output.push([1]) is None  # a whole character spans the border
    assert output.push([0]) == Released(3, "x\u20ac\ufffd")
    assert output.push([2]) == Released(5, "x\u209f")


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    output = BYTES.stream()
    assert output.push([0xF0, 0x9F, 0x98]) is None
    assert output.finish() == Released(3, "\ufffd")
    assert output.finish() is None


def test_control_tokens_move_the_mark_without_text() -> None:
    output = Detokenizer([b"hi", b""]).stream()
    assert output.push([0]) == Released(1, "hi")
    assert output.push([1]) == Released(2, "")
    assert output.push([1, 1]) == Released(4, "")


def test_stop_inside_a_token_leaves_a_tail() -> None:
    output = Detokenizer([b"one", b" two STO", b"P three"]).stream(["STOP"])
    assert output.push([0]) == Released(1, "one")
    assert output.push([1]) is None
    assert output.push([2]) is None
    assert output.stopped == Stop(stop="STOP", offset=8, keep_tokens=1, tail_text=" two ")
    assert output.push([0]) is None
    assert output.finish() is None


def test_tokens_behind_a_stop_in_the_same_push_are_ignored() -> None:
    output = Detokenizer([b"a", b"\n", b"b"]).stream(["\n"])
    assert output.push([0, 0, 1, 2, 1]) == Released(2, "aa")
    assert output.stopped == Stop(stop="\n", offset=2, keep_tokens=2, tail_text="")


def test_a_false_alarm_is_released() -> None:
    output = Detokenizer([b"x", b"\n", b"#"]).stream(["\n##"])
    assert output.push([0]) == Released(1, "x")
    assert output.push([1]) is None
    assert output.push([2]) is None
    assert output.push([0]) == Released(4, "\n#x")


def test_held_text_is_released_at_the_end() -> None:
    output = Detokenizer([b"wait ST", b"O"]).stream(["STOP"])
    assert output.push([0]) is None
    assert output.push([1]) is None
    assert output.finish() == Released(2, "wait STO")


def test_streams_share_a_table_and_a_stop_set() -> None:
    table, stops = Detokenizer([b"a", b"b"]), StopSet(["ab"])
    one, other = table.stream(stops), table.stream(stops)
    assert one.push([0]) is None
    assert other.push([1]) == Released(1, "b")
    assert one.push([1]) is None
    assert one.stopped is not None
    assert other.stopped is None


def test_a_long_output_that_releases_nothing_costs_linear_time() -> None:
    """Every token ends inside a character, so nothing is released until the end."""
    output = Detokenizer([b"\xb8\xad\xe4", b"\xe4"]).stream()
    output.push([1])
    for _ in range(20_000):
        assert output.push([0]) is None
    released = output.finish()
    assert released == Released(20_001, "\u4e2d" * 20_000 + "\ufffd")


def test_a_token_without_bytes_does_not_end_a_character() -> None:
    table = [b"\xe4", b"", b"\xb8\xad"]
    output = Detokenizer(table).stream()
    assert output.push([0, 1]) is None
    assert output.push([2]) == Released(3, "\u4e2d")


def test_the_replacement_character_itself_may_come_in_pieces() -> None:
    """Its bytes are valid: they are not taken for a character that cannot go on."""
    output = BYTES.stream()
    assert output.push([0xEF]) is None
    assert output.push([0xBF]) is None
    assert output.push([0xBD]) == Released(3, "\ufffd")
    assert output.push([ord("a")]) == Released(4, "a")


def test_what_is_decoded_behind_the_last_mark_waits_for_its_own() -> None:
    """Also after a token that was released the short way."""
    output = Detokenizer([b"a", b"b\xe4\xb8", b"\xad"]).stream()
    assert output.push([0]) == Released(1, "a")
    assert output.push([0, 1]) == Released(2, "a")
    assert output.push([2]) == Released(4, "b\u4e2d")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"\xed\xa0", b"x"], "\ufffd\ufffdx"),  # the least surrogate: no third byte can make it valid
        ([b"\xed\x9f", b"\xbf"], "\ud7ff"),  # the last character before them
        ([b"\xed", b"\x9f", b"\xbf"], "\ud7ff"),
    ],
)
def test_surrogates_are_no_characters(pieces: list[bytes], text: str) -> None:
    output = Detokenizer(pieces).stream()
    released = run(output, [[i] for i in range(len(pieces))])
    assert "".join(each.text for each in released) == text
    if text.endswith("x"):
        assert released[0] == Released(1, "\ufffd\ufffd")  # at once


def test_how_much_was_released_is_known_after_each_push() -> None:
    output = Detokenizer([b"ab", b"c\xe4", b""]).stream()
    assert (output.count, output.released) == (0, (0, 0))
    output.push([0])
    assert (output.count, output.released) == (1, (1, 2))
    output.push([1])
    assert (output.count, output.released) == (2, (1, 2))
    output.push([2])
    assert (output.count, output.released) == (3, (1, 2))
    output.finish()
    assert (output.count, output.released) == (3, (3, 4))


def test_a_stop_string_of_replacement_characters_is_found_where_bytes_break() -> None:
    output = BYTES.stream(["\ufffd"])
    assert output.push([0x61, 0xE4]) == Released(1, "a")
    assert output.push([0x62]) is None
    assert output.stopped == Stop(stop="\ufffd", offset=1, keep_tokens=1, tail_text="")
    ended = BYTES.stream(["\ufffd"])
    assert ended.push([0x61, 0xE4]) == Released(1, "a")
    assert ended.finish() is None
    assert ended.stopped == Stop(stop="\ufffd", offset=1, keep_tokens=1, tail_text="")


@pytest.mark.parametrize(
    ("pending", "piece", "breaks"),
    [
        (b"\xe4", b"", False),
        (b"\xe4", b"\xb8", False),
        (b"\xe4", b"\xb8\xad", False),
        (b"\xe4", b"a", True),
        (b"\xe4", b"\xe4", True),
        (b"\xf0\x9f", b"\x98", False),
        (b"\xf0\x9f", b"a", True),
        (b"\xef\xbf", b"\xbd", False),  # the replacement character itself
        (b"\xed", b"\xa0", True),
        (b"\xed", b"\x9f", False),
    ],
)
def test_where_a_character_cannot_go_on(pending: bytes, piece: bytes, breaks: bool) -> None:
    assert _breaks(pending, piece) is breaks
