"""Histories that stateless requests have brought, with their tokens: sampled ones stay as they are.

A request of an HTTP API brings its whole conversation as text. The fingerprint of its messages names
what it became: the tokens of the prompt and of the answer, with the text of each piece. When the
conversation comes back, the template renders it anew. As far as that text begins with the pieces, their
tokens stand for it, and only the rest is tokenized. So the prompt is always the text that the template
makes, whatever was edited. Pure; `find` changes nothing, so another thread may call it.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from ramify.protocol.limits import Limits
from ramify.protocol.wire import ChatMessage, Effort, JsonObject

Outcome = Literal["bound", "new", "edited", "evicted"]
TOKENIZED = "tokenized"

PIECE = 256  # bytes that a piece takes beside text and tokens, about
ANSWERS = 4  # to one request that are kept: choices, and answers to it when it came again
MOST_DROPPED = 256  # for one that is added: more small ones than that make room by and by
EVICTED = 1 << 12  # fingerprints that are remembered without their tokens


class Piece:
    """Text with its tokens, behind others: a stack that longer histories share.

    `uses`: pieces right behind it, and entries of the table that end with it.
    """

    __slots__ = ("before", "raw", "size", "tokens", "uses")

    def __init__(self, before: "Piece | None", raw: str, tokens: "array[int]") -> None:
        self.before = before
        self.raw = raw
        self.tokens = tokens
        self.uses = 0
        self.size: int = PIECE + len(raw) + tokens.itemsize * len(tokens)


class Key(NamedTuple):
    """Stands for the first `messages`."""

    messages: int
    digest: bytes


class Bound(NamedTuple):
    """What is known of a request's text: its first `chars` characters are those of `piece`.

    `found`: the fingerprint that led there. `asked`: that of the whole request.
    """

    asked: bytes
    outcome: Outcome
    found: bytes | None = None
    piece: Piece | None = None
    chars: int = 0

    @property
    def length(self) -> int:
        """How many tokens the known text has."""
        return sum(len(piece.tokens) for piece in _pieces(self.piece))

    def tokens(self) -> "array[int]":
        """Those of the known text."""
        out: array[int] = array("i")
        for piece in _pieces(self.piece):
            out.extend(piece.tokens)
        return out


class _Owner:
    """The histories of one name, by the fingerprint of the request; the oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[Piece, ...]] = OrderedDict()
        self.size = 0


class Histories:
    """One for all sessions of a process. Where there is no room, the name with most loses its oldest.

    `tokenized`, `outcomes`: counted for the metrics.
    """

    def __init__(self, limits: Limits) -> None:
        self._most, self._most_bytes = limits.histories, limits.history_bytes
        self._owners: dict[str, _Owner] = {}
        self._count = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self.size = 0
        self.tokenized = 0
        self.outcomes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    def counts(self) -> dict[str, int]:
        """Tokens that were made of text, and requests by what became of their history."""
        return {TOKENIZED: self.tokenized, **self.outcomes}

    def find(
        self,
        owner: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        effort: Effort | None,
        rendered: str,
        inside: Callable[[str, int], bool],
    ) -> Bound:
        """What is known of a request that is `rendered`. O(bytes).

        `inside(text, char)`: whether a token that is written in the text spans that character.
        """
        keys = fingerprints(owner, messages, tools, effort)
        asked = keys[-1].digest
        roles = [message.role for message in messages]
        if "assistant" not in roles:
            known = self._answers(owner, asked)
            piece, chars, _ = _best(known, rendered, inside)
            return Bound(asked, "new", asked if piece is not None else None, piece, chars)
        for key in reversed(keys):
            known = self._answers(owner, key.digest)
            if not known:
                if key.digest in self._evicted:
                    return self._shallower(owner, keys, key, rendered, inside)
                continue
            piece, chars, whole = _best(known, rendered, inside)
            last = "assistant" not in roles[key.messages + 1 :]
            outcome: Outcome = "bound" if whole and last else "edited"
            return Bound(asked, outcome, key.digest, piece, chars)
        return Bound(asked, "new")

    def _shallower(
        self,
        owner: str,
        keys: Sequence[Key],
        lost: Key,
        rendered: str,
        inside: Callable[[str, int], bool],
    ) -> Bound:
        """What is known before a place that had to make room."""
        asked = keys[-1].digest
        for key in reversed(keys):
            known = self._answers(owner, key.digest) if key.messages < lost.messages else ()
            if known:
                piece, chars, _ = _best(known, rendered, inside)
                return Bound(asked, "evicted", key.digest, piece, chars)
        return Bound(asked, "evicted")

    def use(self, owner: str, bound: Bound) -> None:
        """A request goes on from there."""
        self.outcomes[bound.outcome] += 1
        table = self._owners.get(owner)
        if table is not None and bound.found is not None and bound.found in table.entries:
            table.entries.move_to_end(bound.found)

    def add(self, owner: str, bound: Bound, pieces: Sequence[tuple[str, "array[int]"]]) -> None:
        """An answer to a request has ended. `pieces`: text and tokens behind what was known."""
        top = bound.piece
        for raw, tokens in pieces:
            top = Piece(top, raw, tokens)
        if top is None:
            return
        table = self._owners.setdefault(owner, _Owner())
        known = table.entries.get(bound.asked, ())
        self._retain(table, top)
        table.entries[bound.asked] = (*known, top)[-ANSWERS:]
        table.entries.move_to_end(bound.asked)
        self._evicted.pop(bound.asked, None)
        if not known:
            self._count += 1
        for piece in known[: len(known) + 1 - ANSWERS]:
            self._release(table, piece)
        for _ in range(MOST_DROPPED):
            if self._count > self._most:
                self._drop_oldest(max(self._owners, key=lambda name: len(self._owners[name].entries)))
            elif self.size > self._most_bytes:
                self._drop_oldest(max(self._owners, key=lambda name: self._owners[name].size))
            else:
                break

    def _answers(self, owner: str, key: bytes) -> tuple[Piece, ...]:
        table = self._owners.get(owner)
        return table.entries.get(key, ()) if table is not None else ()

    def _drop_oldest(self, owner: str) -> None:
        table = self._owners[owner]
        key, known = table.entries.popitem(last=False)
        self._count -= 1
        for piece in known:
            self._release(table, piece)
        self._evicted[key] = None
        if len(self._evicted) > EVICTED:
            self._evicted.popitem(last=False)
        if not table.entries:
            del self._owners[owner]

    def _retain(self, table: _Owner, piece: Piece) -> None:
        at: Piece | None = piece
        while at is not None:
            at.uses += 1
            if at.uses > 1:
                return
            table.size += at.size
            self.size += at.size
            at = at.before

    def _release(self, table: _Owner, piece: Piece) -> None:
        at: Piece | None = piece
        while at is not None:
            at.uses -= 1
            if at.uses:
                return
            table.size -= at.size
            self.size -= at.size
            at = at.before


def fingerprints(
    owner: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[JsonObject] | None,
    effort: Effort | None,
) -> list[Key]:
    """Of the messages before each turn of the assistant, and of all. O(bytes)."""
    encode = msgspec.json.Encoder().encode
    running = blake2b(encode([owner, tools, effort]), digest_size=16)
    keys: list[Key] = []
    for count, message in enumerate(messages):
        if count and message.role == "assistant":
            keys.append(Key(count, running.digest()))
        running.update(encode(message))
    keys.append(Key(len(messages), running.digest()))
    return keys


def _pieces(top: Piece | None) -> list[Piece]:
    """The first one first."""
    found: list[Piece] = []
    while top is not None:
        found.append(top)
        top = top.before
    found.reverse()
    return found


def _best(
    known: Sequence[Piece], rendered: str, inside: Callable[[str, int], bool]
) -> tuple[Piece | None, int, bool]:
    """The pieces with which `rendered` begins, of the answer with most of them, and their length.

    The third: nothing of that answer is otherwise.
    """
    best: tuple[Piece | None, int, bool] = (None, 0, False)
    for top in known:
        piece, chars, whole = None, 0, True
        for each in _pieces(top):
            end = chars + len(each.raw)
            if not rendered.startswith(each.raw, chars) or inside(rendered, end):
                whole = chars == len(rendered)
                break
            piece, chars = each, end
        if chars >= best[1]:
            best = piece, chars, whole
    return best
