"""Guesses by repetition: the tokens that followed the row's last tokens where these stood before.

The longest earlier match of a row's end is searched in its whole branch: prompt, earlier turns and
output. Code, JSON, quotes and agents repeat themselves (prompt lookup; Saxena 2023).

A match whose guesses are right stays the longest one, so it is only followed. Where it breaks, an index
finds the next: earlier places by the hash of the three tokens that end there, newest first, as in LZ77
compressors. The index grows only when it is asked, so a row without drafts pays for its tokens alone.
Eight bytes a token, of the last 32,768 at most.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ramify.gpu.drafting.base import Guesses
from ramify.gpu.drafting.histories import DraftHistories
from ramify.gpu.step.step_rows import Ints, StepRows, Tokens, leading
from ramify.protocol.plan import OpenRow

SHORTEST = 3  # tokens of a match
_LONGEST = 32  # that are compared
_CANDIDATES = 8  # earlier places that are compared
_WINDOW = 1 << 14  # tokens that an index holds at least; at most twice as many
_FEW = 64  # tokens that are indexed one by one
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_BITS = 16

Places = npt.NDArray[np.int32]


class _Index:
    """The places of a row's tokens by the hash of the SHORTEST tokens that end there."""

    def __init__(self) -> None:
        self._base = 0  # first place that is indexed
        self._end = 0  # behind the last one
        self._shift = 0
        self._heads: Places = np.empty(0, dtype=np.int32)  # the newest place of each hash, -1: none
        self._before: Places = np.empty(0, dtype=np.int32)  # the next older one, by place - base

    def candidates(self, tokens: Tokens, last: int, end: Tokens) -> list[int]:
        """Find places before `last` that may end like `end`, newest first. Indexes all before it."""
        self._reach(tokens, last)
        at = int(self._heads[_hash(end, len(end) - 1) >> self._shift])
        found: list[int] = []
        while at >= self._base and len(found) < _CANDIDATES:
            if at < last:
                found.append(at)
            at = int(self._before[at - self._base])
        return found

    def _reach(self, tokens: Tokens, end: int) -> None:
        if end - self._base > min(len(self._before), 2 * _WINDOW):
            self._rebuild(tokens, end)
        elif end - self._end > _FEW:
            self._add(tokens, self._end, end)
        else:
            for place in range(self._end, end):
                slot = _hash(tokens, place) >> self._shift
                self._before[place - self._base] = self._heads[slot]
                self._heads[slot] = place
        self._end = max(self._end, end)

    def _rebuild(self, tokens: Tokens, end: int) -> None:
        """Make room for twice as many tokens, up to the window."""
        self._base = max(SHORTEST - 1, end - _WINDOW)
        room = min(2 * (end - self._base) + _FEW, 2 * _WINDOW)
        self._shift = max(0, _BITS - room.bit_length())
        self._heads = np.full(1 << (_BITS - self._shift), -1, dtype=np.int32)
        self._before = np.full(room, -1, dtype=np.int32)
        self._add(tokens, self._base, end)

    def _add(self, tokens: Tokens, first: int, end: int) -> None:
        """Add many places at once: sorted by hash, the neighbour of each is the next older one."""
        places = np.arange(first, end, dtype=np.int32)
        hashes = _hashes(tokens, first, end) >> np.uint16(self._shift)
        order = np.argsort(hashes, kind="stable")  # a radix sort
        places, hashes = places[order], hashes[order]
        same = np.empty(len(places), dtype=np.bool_)
        same[:1], same[1:] = False, hashes[1:] == hashes[:-1]
        older = np.where(same, np.roll(places, 1), self._heads[hashes])
        self._before[places - self._base] = older
        self._heads[hashes] = places  # the last one of each hash is the newest


def _hash(tokens: Tokens, place: int) -> int:
    """Hash the SHORTEST tokens that end at `place` to 16 bits."""
    mixed = 0
    for factor, token in zip(_FACTORS, tokens[place - SHORTEST + 1 : place + 1].tolist(), strict=True):
        mixed = (mixed ^ token) * factor & 0xFFFFFFFF
    return mixed >> (32 - _BITS)


def _hashes(tokens: Tokens, first: int, end: int) -> npt.NDArray[np.uint16]:
    """Compute `_hash` of the places [first, end)."""
    mixed = np.zeros(end - first, dtype=np.uint64)
    for i, factor in enumerate(_FACTORS):
        begin = first - SHORTEST + 1 + i
        mixed = (mixed ^ tokens[begin : begin + len(mixed)].astype(np.uint64)) * np.uint64(factor)
        mixed &= np.uint64(0xFFFFFFFF)
    return (mixed >> np.uint64(32 - _BITS)).astype(np.uint16)


class NgramDrafter:
    """Drafter by repetition. A match of fewer than SHORTEST tokens gives no guess."""

    def __init__(self, max_rows: int) -> None:
        self._histories = DraftHistories(max_rows)
        self._indexes: dict[int, _Index] = {}
        # the place in the history of the next guess; -1: not known, to be looked for
        self._match: Ints = np.full(max_rows, -1, dtype=np.int64)

    def open(self, opened: OpenRow) -> None:
        self._histories.open(opened.row, opened.history)
        self._indexes[opened.row] = _Index()
        self._match[opened.row] = -1

    def close(self, row: int) -> None:
        self._histories.close(row)
        self._indexes.pop(row, None)
        self._match[row] = -1

    def propose(self, rows: Ints, most: Ints) -> Guesses:
        counts = np.zeros(len(rows), dtype=np.int64)
        found: list[Tokens] = []
        for i, row in enumerate(rows.tolist()):
            if most[i] and (match := self._find(row)) > 0:
                tokens = self._histories.of(row)
                # a match that overlaps the end goes round
                guess = tokens[match : match + int(most[i])]
                if len(guess) < most[i]:
                    guess = np.resize(guess, int(most[i]))
                counts[i] = len(guess)
                found.append(guess)
        return Guesses(counts, np.concatenate(found) if found else np.empty(0, dtype=np.int32))

    def continued(self, row: int, behind: Sequence[int], most: int) -> list[int]:
        tokens = self._histories.of(row)
        if len(tokens) <= SHORTEST:
            return []
        if not behind:
            match = self._find(row)
            return tokens[match : match + most].tolist() if match > 0 else []
        end = np.concatenate([tokens[-_LONGEST:], np.array(behind, dtype=np.int32)])[-_LONGEST:]
        match = self._longest(row, len(tokens), end)
        return tokens[match : match + most].tolist() if match > 0 else []

    def runs(self, step: StepRows) -> None:
        for row in self._histories.runs(step):
            self._match[row] = -1

    def observe(self, rows: Ints, counts: Ints, tokens: Tokens) -> None:
        end = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            sampled, end = tokens[end : end + count], end + count
            self._follow(row, sampled)
            self._histories.append(row, sampled)

    def _follow(self, row: int, sampled: Tokens) -> None:
        """Move the match along with the sampled tokens, if it guessed them."""
        match = int(self._match[row])
        if match > 0:
            tokens = self._histories.of(row)
            said = np.resize(tokens[match:], len(sampled))
            self._match[row] = match + len(sampled) if (said == sampled).all() else -1

    def _find(self, row: int) -> int:
        """Find the place after the longest earlier match of the row's end; 0: there is none."""
        match = int(self._match[row])
        if match > 0:
            return match
        tokens = self._histories.of(row)
        last = len(tokens) - 1
        if last < SHORTEST or row not in self._indexes:
            return 0
        self._match[row] = match = self._longest(row, last, tokens[-_LONGEST:])
        return match

    def _longest(self, row: int, last: int, end: Tokens) -> int:
        """Find the place after the longest match of `end` before `last`; 0: there is none."""
        tokens, end = self._histories.of(row), end[::-1]
        best, longest = -1, SHORTEST - 1
        for place in self._indexes[row].candidates(tokens, last, end[::-1]):
            earlier = tokens[max(0, place + 1 - _LONGEST) : place + 1][::-1]
            length = leading(earlier[: len(end)] == end[: len(earlier)])
            if length > longest:
                best, longest = place, length
            if longest == _LONGEST:
                break
        return best + 1
