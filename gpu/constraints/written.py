"""The written names and items of objects and arrays in which these must differ. Pure.

An automaton cannot remember names or items. So a `Cursor` goes along with it, byte by byte, through the
JSON that the automaton takes. It knows which arrays and objects are open, at which place of the schema
each one is (`protocol.constraints.CheckedPlace`), and what was written there. A byte that completes a
repeated name or an equal item is not taken. Text that is no JSON, around the calls of tools, is skipped;
each value begins anew.

Values are spelled in one way, except for the order of members, so two are equal if their texts are, or
if their members are the same in any order. A begun name or item is *near* as long as it is the beginning
of an earlier one: only then, and right after it, can the next bytes make it equal. Memory: the texts of
the names and items of open arrays and objects, each once for every level around it, and up to
`MOST_BYTES` of an output.

This file does not know tokens or automata.
"""

import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from ramify.protocol.constraints import CheckedPlace
from ramify.protocol.errors import ConstraintError

MOST_BYTES = 16 << 20  # of names and items that one output remembers

_PLAIN, _STRING, _ESCAPE = range(3)
_QUOTE, _BACKSLASH, _COMMA, _COLON, _SPACE = b'"\\,: '
OPENINGS, _CLOSED = b"[{", b"]}"


class Seen:
    """The texts of an array's items, or of an object's names. `texts`: ascending; `values`: canonical
    texts of those that other texts may equal.
    """

    __slots__ = ("texts", "values")

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.values: set[bytes] = set()

    def add(self, text: bytes) -> None:
        insort(self.texts, text)
        if (value := canonical(text)) is not text:
            self.values.add(value)

    def discard(self, text: bytes) -> None:
        """Remove a text that was added."""
        del self.texts[bisect_left(self.texts, text)]
        if (value := canonical(text)) is not text:
            self.values.discard(value)

    def begins(self, text: bytes) -> bool:
        """Whether a text begins with `text`."""
        at = bisect_left(self.texts, text)
        return at < len(self.texts) and self.texts[at].startswith(text)

    def has(self, text: bytes) -> bool:
        """Whether a text is equal to `text`."""
        at = bisect_left(self.texts, text)
        if at < len(self.texts) and self.texts[at] == text:
            return True
        return bool(self.values) and (value := canonical(text)) is not text and value in self.values


def canonical(text: bytes) -> bytes:
    """Return one text for all that are equal to `text`: `text` itself where it is the only one."""
    if b"{" not in text:
        return text
    return json.dumps(json.loads(text), sort_keys=True).encode()


class OpenValue:
    """An open array or object; changed by `WrittenOutput.commit` alone.

    `place`: its number. `begin`: where in the output the begun item or name begins, -1: none is begun;
    `reading`: an item or name is begun, or due. `near`: its text so far, if an earlier one begins so,
    else None. `added`: texts that the bytes since the last commit have completed. `count`: items before
    this one; `child`: the place of a member's value. `live`, `watched`: this one, or one around it, is
    near; must have differing names or items.
    """

    __slots__ = (
        "added",
        "begin",
        "child",
        "count",
        "is_array",
        "live",
        "near",
        "parent",
        "place",
        "reading",
        "seen",
        "watched",
    )

    def __init__(self, parent: "OpenValue | None", place: int, is_array: bool, checked: bool) -> None:
        self.parent = parent
        self.place = place
        self.is_array = is_array
        self.seen = Seen() if checked else None
        self.added: tuple[bytes, ...] = ()
        self.near: bytes | None = None
        self.begin = self.child = -1
        self.count = 0
        self.reading = True
        self.live: bool = parent is not None and parent.live
        self.watched: bool = checked or (parent is not None and parent.watched)

    def copy(self) -> "OpenValue":
        found = OpenValue.__new__(OpenValue)
        for name in OpenValue.__slots__:
            setattr(found, name, getattr(self, name))
        return found

    def nears(self, text: bytes) -> bool:
        """Whether an earlier item or name begins with `text`."""
        if self.seen is None:
            return False
        return self.seen.begins(text) or any(added.startswith(text) for added in self.added)

    def has(self, text: bytes) -> bool:
        """Whether an earlier item or name is equal to `text`."""
        if self.seen is None:
            return False
        if self.seen.has(text):
            return True
        return bool(self.added) and canonical(text) in map(canonical, self.added)


class Cursor:
    """A position after `size` bytes of values. `top`: the innermost open array or object that is at a
    place; `skip`: how many at no place are open inside it; `tail`: the bytes since the last commit.
    """

    __slots__ = ("mode", "size", "skip", "tail", "top")

    def __init__(self, top: OpenValue | None, mode: int, skip: int, size: int, tail: bytes) -> None:
        self.top = top
        self.mode = mode
        self.skip = skip
        self.size = size
        self.tail = tail

    @property
    def outside(self) -> bool:
        """Whether no checked value is open."""
        return self.top is None

    @property
    def near(self) -> bool:
        """Whether a begun name or item is the beginning of an earlier one."""
        return self.top is not None and self.top.live

    @property
    def watched(self) -> bool:
        """Whether names or items have to differ here."""
        return self.top is not None and self.top.watched

    @property
    def in_string(self) -> bool:
        return self.mode != _PLAIN

    def many(self) -> int:
        """Count the names and items that are kept of open values."""
        count, frame = 0, self.top
        while frame is not None:
            count += 0 if frame.seen is None else len(frame.seen.texts)
            frame = frame.parent
        return count


class WrittenOutput:
    """The output of a row, and its names and items."""

    def __init__(self, places: Sequence[CheckedPlace]) -> None:
        self._places = places
        self._text = bytearray()
        self._bytes = 0

    @staticmethod
    def start() -> Cursor:
        return Cursor(None, _PLAIN, 0, 0, b"")

    def walk(self, cursor: Cursor, data: Iterable[int], root: int = 0) -> Cursor | None:
        """Move behind `data`, which begins a value of place `root` or goes on in one. None: a name or an
        item is repeated there.
        """
        for byte in data:
            found = self.step(cursor, byte, root)
            if found is None:
                return None
            cursor, root = found, -1
        return cursor

    def step(self, at: Cursor, byte: int, root: int = -1) -> Cursor | None:
        """Move behind one byte. None: it repeats a name or an item. `root`: the place of the value that
        begins there, if none is open and this byte opens one; -1: no value that is checked.
        """
        top, skip = at.top, at.skip
        if top is None and (root < 0 or byte not in OPENINGS):
            return at
        tail, mode = at.tail + bytes((byte,)), at.mode
        if mode != _PLAIN:
            return self._in_string(at, byte, tail)
        ends: OpenValue | None
        if byte == _QUOTE:
            mode = _STRING
            ends = _grown(_begun(top, at.size) if skip == 0 else top, byte)
        elif skip:
            ends = _grown(top, byte)
            skip += (byte in OPENINGS) - (byte in _CLOSED)
            if not skip and ends is not None:
                ends = self._value_ended(ends, at.size + 1, tail)
                if ends is None:
                    return None
        elif byte in OPENINGS:
            place = root if top is None else self._place_in(top)
            ends = _grown(_begun(top, at.size), byte)
            if place < 0:
                skip = 1
            else:
                one, is_array = self._places[place], byte == OPENINGS[0]
                ends = OpenValue(ends, place, is_array, one.unique if is_array else one.distinct)
        elif byte in _CLOSED or byte == _COMMA:
            return self._behind_value(at, byte, tail)
        elif byte in (_SPACE, _COLON):
            assert top is not None
            ends, parent = top, _grown(top.parent, byte)
            if parent is not top.parent:
                ends = top.copy()
                ends.parent = parent
                _look(ends)
        else:
            ends = _grown(_begun(top, at.size), byte)
        return Cursor(ends, mode, skip, at.size + 1, tail)

    def _in_string(self, at: Cursor, byte: int, tail: bytes) -> Cursor | None:
        mode, ends = at.mode, _grown(at.top, byte)
        if mode == _ESCAPE:
            mode = _STRING
        elif byte == _BACKSLASH:
            mode = _ESCAPE
        elif byte == _QUOTE:
            mode = _PLAIN
            if at.skip == 0 and ends is not None:
                ends = self._string_ended(ends, at.size + 1, tail)
                if ends is None:
                    return None
        return Cursor(ends, mode, at.skip, at.size + 1, tail)

    def _behind_value(self, at: Cursor, byte: int, tail: bytes) -> Cursor | None:
        top = at.top
        assert top is not None
        if top.is_array and top.begin >= 0:
            top = self._value_ended(top, at.size, at.tail)
            if top is None:
                return None
        if byte == _COMMA:
            return Cursor(_following(top, byte), _PLAIN, at.skip, at.size + 1, tail)
        ends = _grown(top.parent, byte)
        if ends is not None and (ends := self._value_ended(ends, at.size + 1, tail)) is None:
            return None
        return Cursor(ends, _PLAIN, at.skip, at.size + 1, tail)

    def commit(self, cursor: Cursor) -> list[tuple[Seen, bytes]]:
        """Keep the names and items that the bytes since the last commit completed. Returns these.

        Raises ConstraintError where an output writes too much.
        """
        self._text += cursor.tail
        cursor.tail = b""
        kept: list[tuple[Seen, bytes]] = []
        frame = cursor.top
        while frame is not None:
            if frame.added and frame.seen is not None:
                for text in frame.added:
                    frame.seen.add(text)
                    self._bytes += len(text)
                    kept.append((frame.seen, text))
                frame.added = ()
            frame = frame.parent
        if self._bytes > MOST_BYTES:
            raise ConstraintError(
                f"the names and items that have to differ take more than {MOST_BYTES} bytes"
            )
        return kept

    def take_back(self, size: int, kept: Iterable[tuple[Seen, bytes]]) -> None:
        """Go back to `size` bytes of output. `kept`: what was kept since, in reverse."""
        del self._text[size:]
        for seen, text in kept:
            seen.discard(text)
            self._bytes -= len(text)

    def _string_ended(self, frame: OpenValue, size: int, tail: bytes) -> OpenValue | None:
        if frame.is_array or not frame.reading:
            return self._value_ended(frame, size, tail)
        text = self._between(frame.begin, size, tail)
        if frame.has(text):
            return None
        found = frame.copy()
        place = self._places[frame.place]
        name = json.loads(text) if _BACKSLASH in text else text[1:-1].decode()
        found.child = place.names.get(name, place.others)
        if found.seen is not None:
            found.added = (*found.added, text)
        _read(found)
        return found

    def _value_ended(self, frame: OpenValue, size: int, tail: bytes) -> OpenValue | None:
        """End an item or a member's value, at `size` bytes of the output."""
        if not frame.is_array or frame.seen is None:
            if not frame.is_array or frame.begin < 0:
                return frame
            found = frame.copy()
            _read(found)
            return found
        text = self._between(frame.begin, size, tail)
        if frame.has(text):
            return None
        found = frame.copy()
        found.added = (*found.added, text)
        _read(found)
        return found

    def _place_in(self, frame: OpenValue) -> int:
        """Find the place of the begun value in `frame`."""
        if not frame.is_array:
            return frame.child
        place = self._places[frame.place]
        return place.items[frame.count] if frame.count < len(place.items) else place.rest

    def _between(self, begin: int, end: int, tail: bytes) -> bytes:
        if begin >= len(self._text):
            return tail[begin - len(self._text) : end - len(self._text)]
        return bytes(self._text[begin:end]) + tail[: max(0, end - len(self._text))]


def _look(frame: OpenValue) -> None:
    """Set `live` from `near` and the frames around."""
    frame.live = frame.near is not None or (frame.parent is not None and frame.parent.live)


def _read(frame: OpenValue) -> None:
    """End the begun item or name."""
    frame.begin, frame.reading, frame.near = -1, False, None
    _look(frame)


def _begun(frame: OpenValue | None, size: int) -> OpenValue | None:
    """Begin an item or a name at byte `size`, if one is due."""
    if frame is None or not frame.reading or frame.begin >= 0:
        return frame
    found = frame.copy()
    found.begin = size
    return found


def _grown(frame: OpenValue | None, byte: int) -> OpenValue | None:
    """Add a byte to the begun item or name."""
    if frame is None or not frame.live:
        return frame
    found = frame.copy()
    found.parent = _grown(frame.parent, byte)
    if frame.near is not None:
        text = frame.near + bytes((byte,))
        found.near = text if frame.nears(text) else None
    _look(found)
    return found


def _following(frame: OpenValue, comma: int) -> OpenValue:
    """Move behind the comma between two items or members."""
    found = frame.copy()
    found.parent = _grown(frame.parent, comma)
    found.begin, found.reading, found.child = -1, True, -1
    found.count += 1
    found.near = b"" if found.nears(b"") else None
    _look(found)
    return found
