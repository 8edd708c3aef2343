"""StopScanner against str.find."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.tokenizer.detokenizer import Match, StopScanner, StopSet

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
CHUNKS = st.lists(st.text("abc", max_size=6), max_size=12)


def expected(text: str, stops: list[str]) -> Match | None:
    """The match that ends first; the longest of those that end there."""
    found = [Match(s, text.find(s), text.find(s) + len(s)) for s in stops if s in text]
    return min(found, key=lambda m: (m.end, m.start), default=None)


def held(text: str, stops: list[str]) -> int:
    """The longest suffix of `text` that is a proper prefix of some stop."""
    return max(n for s in stops for n in range(len(s)) if text.endswith(s[:n]) or n == 0)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(STOPS, CHUNKS)
def test_any_chunking_agrees_with_find(stops: list[str], chunks: list[str]) -> None:
    scanner = StopScanner(StopSet(stops))
    seen = ""
    for chunk in chunks:
        match = scanner.feed(chunk)
        seen += chunk
        assert match == expected(seen, stops)
        if match is not None:
            return
        assert scanner.held == held(seen, stops)


def test_scanners_of_one_set_are_independent() -> None:
    shared = StopSet(["END"])
    one, other = StopScanner(shared), StopScanner(shared)
    assert one.feed("..E") is None
    assert other.feed("ND") is None
    assert one.feed("ND") == Match("END", 2, 5)
    assert other.held == 0


def test_a_stop_inside_another_wins_when_it_ends_first() -> None:
    assert StopScanner(StopSet(["abcd", "bc"])).feed("abcd") == Match("bc", 1, 3)


def test_the_longest_wins_when_several_end_together() -> None:
    assert StopScanner(StopSet(["c", "abc", "bc"])).feed("xabc") == Match("abc", 1, 4)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopSet(["a", ""])


def test_no_stops_match_nothing() -> None:
    scanner = StopScanner(StopSet([]))
    assert scanner.feed("anything") is None
    assert scanner.held == 0


def test_work_is_linear_for_hostile_stops() -> None:
    """Text that fails at the last character of a long stop again and again; naive search: 6.4e7."""
    scanner = StopScanner(StopSet(["a" * 255 + "b"]))
    for _ in range(1000):
        assert scanner.feed("a" * 250) is None
    assert scanner.held == 255


def test_hostile_stops_take_little() -> None:
    """Sixteen stops of 256 characters, the most that a frame may ask for."""
    stops = StopSet(chr(97 + i) * 255 + "!" for i in range(16))
    assert sum(len(borders) * borders.itemsize for borders in stops.borders) == 16 * 256 * 2
    scanner = StopScanner(stops)
    assert scanner.feed("a" * 1000 + "b" * 255 + "!") == Match("b" * 255 + "!", 1000, 1256)
