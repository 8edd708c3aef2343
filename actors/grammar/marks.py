r"""Texts with marks in them, as bytes. Pure.

A mark is a token that is no text. An automaton sees it as its name between 0xFF and 0xFE, which no text
has (`gpu/constraints/vocabulary.py`): the token `<tool_call>` is `\xff<tool_call>\xfe`, and the same
text spelled by other tokens is itself.
"""

import re
from collections.abc import Iterable, Iterator

BEGIN, END = 0xFF, 0xFE


def name(mark: str) -> bytes:
    """The bytes of a mark."""
    return b"\xff%b\xfe" % mark.encode()


class Marks:
    """The names of a model's tokens that are no text."""

    def __init__(self, names: Iterable[str]) -> None:
        longest_first = sorted({each for each in names if each}, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str) -> bytes:
        """`text` with its marks as tokens."""
        return b"".join(data for data, _ in self.pieces(text))

    def pieces(self, text: str) -> Iterator[tuple[bytes, int]]:
        """The characters and marks of `text`: the bytes of each, and how many characters it has."""
        at = 0
        for found in self._found.finditer(text):
            yield from ((c.encode(), 1) for c in text[at : found.start()])
            yield name(found[0]), len(found[0])
            at = found.end()
        yield from ((c.encode(), 1) for c in text[at:])

    def triggers(self, trigger: str, begin: str) -> Iterator[tuple[bytes, bytes]]:
        """The spellings of `begin`, which begins with `trigger`: the text that is searched for, and the
        rest.

        First with tokens, where a trigger that ends inside a mark has all of it; then with the trigger
        spelled.
        """
        head, size = b"", 0
        pieces = list(self.pieces(begin))
        while size < len(trigger):
            data, length = pieces.pop(0)
            head += data
            size += length
        rest = b"".join(data for data, _ in pieces)
        yield head, rest
        if (spelled := trigger.encode()) != head:
            yield spelled, begin[len(trigger) : size].encode() + rest


def symbols(data: bytes) -> list[bytes]:
    """The bytes of `data`, each alone, but a mark as one."""
    found, at = [], 0
    while at < len(data):
        end = data.index(END, at) + 1 if data[at] == BEGIN else at + 1
        found.append(data[at:end])
        at = end
    return found
