"""Output tokens to text, incrementally: UTF-8 safe, stop strings held back. Pure.

Text is released up to *marks* only. A mark is a token count k and a character count m such that
the first k output tokens are exactly the first m characters: the bytes end with a whole character
there, and no later character can make a part of those m belong to a stop string. So a delta's
`position` and its text always agree, wherever a client resumes, forks or rolls back.

Bytes that can never become a character are U+FFFD at once (Unicode 3.9, maximal subparts, the rule
of Python's "replace"); at most three bytes are ever undecided. Work and memory are linear in the
output; nothing is decoded or sent twice. A stream starts with the output, so a prompt that ends
inside a character leaks nothing.

This file does not know the tokenizer: only the bytes of each id.
"""

from array import array
from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec


class Match(NamedTuple):
    """A stop string that ended `end` characters into the stream (its first one is `start`)."""

    stop: str
    start: int
    end: int


class StopSet:
    """Some stop strings, prepared. Immutable; scanners of many streams share it.

    Knuth, Morris and Pratt (1977), once for each string: the state is how many of its characters the
    text ends with, so the longest state says how many must be held back. One automaton of all (Aho and
    Corasick 1975) reads a text once, but with Python's objects 16 stops of 256 characters take 1.2 MB
    and 6 ms to build; this takes 9 KB and 1 ms, and a stop that has not begun costs one `str.find`.

    `borders[i][k]`: of the first k + 1 characters of stop i, the longest proper prefix that is a suffix.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty stop string."""
        self.stops = tuple(dict.fromkeys(stops))
        if "" in self.stops:
            raise ValueError("a stop string must not be empty")
        self.borders = [_borders(stop) for stop in self.stops]
        self.first = frozenset(stop[0] for stop in self.stops)


NO_STOPS = StopSet(())


def _borders(stop: str) -> "array[int]":
    borders = array("H", [0])
    length = 0
    for character in stop[1:]:
        while length and character != stop[length]:
            length = borders[length - 1]
        length += character == stop[length]
        borders.append(length)
    return borders


class StopScanner:
    """One stream of text. After a match it must not be fed any more."""

    def __init__(self, stop_set: StopSet) -> None:
        self._first = stop_set.first
        self._stops = list(
            zip(range(len(stop_set.stops)), stop_set.stops, stop_set.borders, strict=True)
        )
        self._states = [0] * len(stop_set.stops)
        self._fed = 0
        self.held = 0  # characters at the end of the stream that may be the beginning of a stop string

    def feed(self, text: str) -> Match | None:
        """Add text; the match that ends first, the longest one of those that end there."""
        fed, self._fed = self._fed, self._fed + len(text)
        if not self.held and self._first.isdisjoint(text):
            return None
        match: Match | None = None
        states = self._states
        for number, stop, borders in self._stops:
            state = states[number]
            if not state and stop[0] not in text:
                continue
            end = fed
            for character in text:
                while state and character != stop[state]:
                    state = borders[state - 1]
                if character == stop[state]:
                    state += 1
                end += 1
                if state == len(stop):
                    if match is None or end < match.end or end - state < match.start:
                        match = Match(stop, end - state, end)
                    text = text[: end - fed]  # what ends later does not matter
                    break
            else:
                states[number] = state
        self.held = max(states)
        return match


class Released(msgspec.Struct, frozen=True, gc=False):
    """Text up to a mark. `count`: output tokens released in all. `text`: new since the last one."""

    count: int
    text: str


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A stop string was found; the shown text ends before it.

    `offset`: the shown text's length in characters. `keep_tokens`: the output tokens that lie
    before it as a whole. `tail_text`: what is shown after those; it began in the middle of a
    token, so it has to be tokenized anew.
    """

    stop: str
    offset: int
    keep_tokens: int
    tail_text: str


class Detokenizer:
    """The model's table of token bytes, shared by all streams."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        self.token_text = [_whole_text(piece) for piece in token_bytes]  # None: not UTF-8 by itself

    def stream(self, stops: StopSet | Iterable[str] = ()) -> "TextStream":
        """A new output. Pass a `StopSet` where several streams have the same stop strings."""
        return TextStream(self, stops if isinstance(stops, StopSet) else StopSet(stops))


class TextStream:
    """The text of one generation's output."""

    def __init__(self, table: Detokenizer, stops: StopSet) -> None:
        self._bytes = table.token_bytes
        self._text = table.token_text
        self._scanner = StopScanner(stops) if stops.stops else None
        self._pending = b""  # the beginning of a character: 0 to 3 bytes
        self._parts: list[str] = []  # decoded, not released
        self._marks: deque[tuple[int, int]] = deque()  # (tokens, characters), not released
        self._chars = 0  # decoded
        self.count = 0  # output tokens seen
        self.released = (0, 0)  # (tokens, characters)
        self.stopped: Stop | None = None

    def push(self, tokens: Sequence[int]) -> Released | None:
        """Add output tokens; what can be shown now, or None.

        Nothing is added after a stop string was found (see `stopped`).
        """
        if self.stopped is not None:
            return None
        if self._scanner is None and not self._pending and len(tokens) == 1:  # the common case
            text = self._text[tokens[0]]
            if text is not None:
                self.count += 1
                self._chars += len(text)
                self.released = (self.count, self._chars)
                return Released(self.count, text)
        for token in tokens:
            match = self._add(token)
            if match is not None:
                return self._stop(match)
        return self._release(self._chars - (self._scanner.held if self._scanner else 0))

    def finish(self) -> Released | None:
        """The output has ended: everything held back, with U+FFFD for an unfinished character.

        None if nothing was held back. May find a stop string that contains U+FFFD.
        """
        if self.stopped is not None:
            return None
        if self._pending:
            text, self._pending = self._pending.decode("utf-8", "replace"), b""
            match = self._decoded(text)
            self._mark()
            if match is not None:
                return self._stop(match)
        return self._release(self._chars)

    def _add(self, token: int) -> Match | None:
        if self._pending and _breaks(self._pending, self._bytes[token]):
            # The bytes before this token are U+FFFD now: a mark between the two. Without it, a run
            # of lead bytes, each of which leaves something pending, would release nothing.
            self._pending = b""
            match = self._decoded("\ufffd")
            self._mark()
            if match is not None:
                return match
        self.count += 1
        text = None if self._pending else self._text[token]
        if text is None:
            text, self._pending = _decode(self._pending + self._bytes[token])
        match = self._decoded(text) if text else None
        if not self._pending:
            self._mark()
        return match

    def _decoded(self, text: str) -> Match | None:
        self._parts.append(text)
        self._chars += len(text)
        return self._scanner.feed(text) if self._scanner else None

    def _mark(self) -> None:
        if self._marks and self._marks[-1][1] == self._chars:  # control tokens have no text
            self._marks[-1] = (self.count, self._chars)
        else:
            self._marks.append((self.count, self._chars))

    def _release(self, upto: int) -> Released | None:
        """Release the last mark that is at most `upto` characters into the output."""
        mark = None
        while self._marks and self._marks[0][1] <= upto:
            mark = self._marks.popleft()
        if mark is None or mark == self.released:
            return None
        text = self._take(mark[1])
        self.released = mark
        return Released(mark[0], text)

    def _take(self, upto: int) -> str:
        """Cut what is not released yet up to character `upto`."""
        held = "".join(self._parts)
        size = upto - self.released[1]
        self._parts = [held[size:]]
        return held[:size]

    def _stop(self, match: Match) -> Released | None:
        released = self._release(match.start)
        self.stopped = Stop(match.stop, match.start, self.released[0], self._take(match.start))
        self._parts.clear()
        self._marks.clear()
        return released


def _decode(piece: bytes) -> tuple[str, bytes]:
    """The text of `piece`, and the bytes at its end that may still become a character."""
    text, used = utf_8_decode(piece, "replace", False)
    rest = piece[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # Python waits for the third byte of a surrogate (for its "surrogatepass"); none is valid.
        return text + rest.decode("utf-8", "replace"), b""
    return text, rest


def _breaks(pending: bytes, piece: bytes) -> bool:
    """Whether `pending`, the beginning of a character, cannot go on with `piece`."""
    if not piece:
        return False
    text, rest = _decode(pending + piece[:1])
    return len(text) + len(rest) > 1 and text[:1] == "\ufffd"


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
