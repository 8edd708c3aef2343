"""Histories that stateless requests have brought, with their tokens: sampled ones stay as they are.

A request of an HTTP API brings its whole conversation as text. The fingerprint of its messages names
what it became: the tokens of the prompt and of the answer, with the text of each piece. When the
conversation comes back, the template renders it anew. As far as that text begins with the pieces, their
tokens stand for it, and only the rest is tokenized. So the prompt is always the text that the template
makes, whatever was edited. `find` changes nothing, so another thread may call it. What memory does not
have a store may (`keep`): of another process, or of before a restart.
"""

from array import array
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec

from ramify.protocol.limits import Limits
from ramify.protocol.saved import SavedHistory
from ramify.protocol.wire import ChatMessage, Effort, JsonObject, Miss

Outcome = Literal["bound", "new", "edited", "evicted"]
TOKENIZED = "tokenized"

PIECE = 256  # bytes that a piece takes beside text and tokens, about
MARK = 128  # that the mark of a message takes, about
SLACK = 64  # tokens that are no miss: an answer's last have no KV, and pages and states end before
ANSWERS = 4  # to one request that are kept: choices, and answers to it when it came again
MOST_DROPPED = 256  # for one that is added: more small ones than that make room by and by
TRIES = 16  # of a request's fingerprints that a store is asked for, the longest history first
EVICTED = 1 << 12  # fingerprints that are remembered without their tokens


class HistoryPiece:
    """Text with its tokens, behind others: a stack that longer histories share.

    `uses`: pieces right behind it, and entries of the table that end with it. `marks`: of the messages
    that came with it. `until`: when the retention of what it ends with is over; 0: there was none.
    """

    __slots__ = ("before", "marks", "raw", "size", "tokens", "until", "uses")

    def __init__(
        self, before: "HistoryPiece | None", raw: str, tokens: "array[int]", marks: Sequence[int] = ()
    ) -> None:
        self.before = before
        self.raw = raw
        self.tokens = tokens
        self.marks = marks
        self.until = 0.0
        self.uses = 0
        self.size: int = PIECE + len(raw) + tokens.itemsize * len(tokens) + MARK * len(marks)


class Key(NamedTuple):
    """Stands for the first `messages`. `marks`: of those behind the key before, each with all before it.

    `size`: bytes of the messages, and of the assistant's turn behind them.
    """

    messages: int
    digest: bytes
    marks: tuple[int, ...] = ()
    size: int = 0


class Bound(NamedTuple):
    """What is known of a request's text: its first `chars` characters are those of `piece`.

    `found`: the fingerprint that led there. `asked`: that of the whole request. `marks`: of messages
    behind those of `found`. `changed`: the first message that no request before had there, `reason`: and
    why. `history`: the share of the messages up to the last answer.
    """

    asked: bytes
    outcome: Outcome
    found: bytes | None = None
    piece: HistoryPiece | None = None
    chars: int = 0
    changed: int = 0
    marks: tuple[int, ...] = ()
    reason: Literal["new", "edited"] = "new"
    history: float = 0.0

    @property
    def length(self) -> int:
        """How many tokens the known text has."""
        return sum(len(piece.tokens) for piece in _pieces(self.piece))

    def pieces(self) -> "Iterator[tuple[str, array[int]]]":
        """The known text with its tokens."""
        return ((piece.raw, piece.tokens) for piece in _pieces(self.piece))

    def tokens(self) -> "array[int]":
        """Those of the known text."""
        out: array[int] = array("i")
        for piece in _pieces(self.piece):
            out.extend(piece.tokens)
        return out

    def missed(self, prompt: int, cached: int, now: float) -> Miss | None:
        """Why the history's tokens, of so many of the prompt, were not all cached; None: they were."""
        piece = self.piece if self.outcome in ("bound", "new") else None
        known = min(self.length, prompt - 1) if piece is not None else round(prompt * self.history)
        tokens = max(0, known - cached)
        if tokens <= SLACK and (piece is not None or self.history):
            return None
        if piece is None and self.outcome != "evicted":
            return Miss(reason=self.reason, message=self.changed, tokens=tokens)
        expired = piece is not None and 0.0 < piece.until <= now
        return Miss(reason="expired" if expired else "evicted", tokens=tokens)


class _Owner:
    """The histories of one name, by the fingerprint of the request; the oldest first.

    `marks`: how many pieces have each.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[HistoryPiece, ...]] = OrderedDict()
        self.marks: Counter[int] = Counter()
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
        self._model = ""
        self._save: Callable[[str, SavedHistory], None] | None = None
        self._recall: Callable[[Sequence[bytes]], list[SavedHistory]] | None = None

    def keep(
        self,
        model: str,
        save: Callable[[str, SavedHistory], None],
        recall: Callable[[Sequence[bytes]], list[SavedHistory]],
    ) -> None:
        """Use a store. `save(owner, saved)`. `recall(asked)` may wait for it, in `find`: what it has of
        the first of these that is there, and before that all that it stands behind."""
        self._model, self._save, self._recall = model, save, recall

    @property
    def waits(self) -> bool:
        """Whether `find` may wait for a store."""
        return self._recall is not None

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
        roles = [message.role for message in messages]
        marks = [mark for key in keys for mark in key.marks]
        table = self._owners.get(owner) or _Owner()
        same = next((i for i in range(len(marks), 0, -1) if marks[i - 1] in table.marks), 0)
        outcome: Outcome = "new"
        answered = "assistant" in roles
        found, piece, chars, at, changed = None, None, 0, 0, same
        entries = ChainMap(table.entries, self._recalled(table, keys[:-1], marks))
        for key in reversed(keys):
            known = entries.get(key.digest)
            if known:
                piece, chars, whole = _best(known, rendered, inside)
                found, at = key.digest, key.messages
                changed = max(same, at + 1) if whole else at
                if outcome == "new" and answered:
                    outcome = "bound" if whole and "assistant" not in roles[at + 1 :] else "edited"
                break
            if answered and key.digest in self._evicted:
                outcome = "evicted"
        history = keys[-2].size / keys[-1].size if len(keys) > 1 else 0.0
        told = outcome == "edited" or same > (roles[0] == "system")
        reason: Literal["new", "edited"] = "edited" if told and history else "new"
        behind = tuple(marks[at:])
        return Bound(keys[-1].digest, outcome, found, piece, chars, changed, behind, reason, history)

    def _recalled(
        self, table: _Owner, keys: Sequence[Key], marks: Sequence[int]
    ) -> dict[bytes, tuple[HistoryPiece, ...]]:
        """What the store has of the longest history that memory does not have, if it is longer."""
        deeper = list(takewhile(lambda key: key.digest not in table.entries, reversed(keys)))
        if self._recall is None or not deeper:
            return {}
        saved = self._recall([key.digest for key in deeper[:TRIES]])
        stack: list[HistoryPiece] = []
        for each in saved:
            if each.model != self._model or each.kept > len(stack):
                return {}
            del stack[each.kept :]
            for raw, tokens in each.pieces:
                stack.append(HistoryPiece(stack[-1] if stack else None, raw, array("i", tokens)))
        at = {key.digest: key.messages for key in deeper}
        for top in stack[-1:]:
            top.marks = marks[: at[saved[-1].asked]]
            top.size += MARK * len(top.marks)
        return {saved[-1].asked: (stack[-1],)} if stack else {}

    def _saved(self, bound: Bound, top: HistoryPiece) -> SavedHistory:
        """What the store lacks of a history that ends with `top`."""
        kept = len(_pieces(bound.piece)) if bound.found != bound.asked else 0
        pieces = [(piece.raw, piece.tokens.tobytes()) for piece in _pieces(top)[kept:]]
        return SavedHistory(bound.asked, self._model, bound.found if kept else None, kept, pieces)

    def use(self, owner: str, bound: Bound) -> None:
        """A request goes on from there."""
        self.outcomes[bound.outcome] += 1
        table = self._owners.get(owner)
        if table is not None and bound.found is not None and bound.found in table.entries:
            table.entries.move_to_end(bound.found)

    def add(
        self,
        owner: str,
        bound: Bound,
        pieces: Sequence[tuple[str, "array[int]"]],
        until: float = 0.0,
    ) -> None:
        """An answer to a request has ended. `pieces`: text and tokens behind what was known.

        `until`: when its retention is over.
        """
        top, marks = bound.piece, bound.marks
        for raw, tokens in pieces:
            top, marks = HistoryPiece(top, raw, tokens, marks), ()
        if top is None:
            return
        top.until = until
        if self._save is not None:
            self._save(owner, self._saved(bound, top))
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

    def _retain(self, table: _Owner, piece: HistoryPiece) -> None:
        at: HistoryPiece | None = piece
        while at is not None:
            at.uses += 1
            if at.uses > 1:
                return
            table.size += at.size
            self.size += at.size
            table.marks.update(at.marks)
            at = at.before

    def _release(self, table: _Owner, piece: HistoryPiece) -> None:
        at: HistoryPiece | None = piece
        while at is not None:
            at.uses -= 1
            if at.uses:
                return
            table.size -= at.size
            self.size -= at.size
            for mark in at.marks:
                table.marks[mark] -= 1
                if not table.marks[mark]:
                    del table.marks[mark]
            at = at.before


def fingerprints(
    owner: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[JsonObject] | None,
    effort: Effort | None,
) -> list[Key]:
    """Of the messages before each turn of the assistant, and of all. O(bytes)."""
    encode = msgspec.json.Encoder().encode
    head = encode([owner, tools, effort])
    running = blake2b(head, digest_size=16)
    digest, size = running.digest(), len(head)
    keys: list[Key] = []
    marks: list[int] = []
    for count, message in enumerate(messages):
        raw = encode(message)
        size += len(raw)
        if count and message.role == "assistant":
            keys.append(Key(count, digest, tuple(marks), size))
            marks = []
        running.update(raw)
        digest = running.digest()
        marks.append(int.from_bytes(digest[:8], "little"))
    keys.append(Key(len(messages), digest, tuple(marks), size))
    return keys


def _pieces(top: HistoryPiece | None) -> list[HistoryPiece]:
    """The first one first."""
    found: list[HistoryPiece] = []
    while top is not None:
        found.append(top)
        top = top.before
    found.reverse()
    return found


def _best(
    known: Sequence[HistoryPiece], rendered: str, inside: Callable[[str, int], bool]
) -> tuple[HistoryPiece | None, int, bool]:
    """The pieces with which `rendered` begins, of the answer with most of them, and their length.

    The third: nothing of that answer is otherwise.
    """
    best: tuple[HistoryPiece | None, int, bool] = (None, 0, False)
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
