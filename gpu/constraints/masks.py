"""The cache of masks of all constraints, which drops those that were unused for longest.

A mask of a large vocabulary takes 20 KB and up to a millisecond to make, and a constraint may have tens
of thousands of states. So all constraints share one bound. Masks are kept in two generations: when the
young one has half of the bound, the old one is dropped and the young one takes its place. A mask of the
old one that is used becomes young again.

This file does not know automata. Every method may be called from any thread.
"""

from threading import Lock

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.int32]

MOST_BYTES = 128 << 20
MOST_KEYS = 1 << 17  # of one constraint, in a generation: equal masks take no bytes, but each a key


class MaskStore:
    """The cache. `bytes`: kept now. `made`, `dropped`: numbers of masks added and dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.made = self.dropped = 0
        self._half = most_bytes // 2
        self._lock = Lock()
        self._open: set[KeptMasks] = set()
        self._young = self._old = 0  # bytes

    @property
    def bytes(self) -> int:
        return self._young + self._old

    def open(self) -> "KeptMasks":
        """Open a part of the cache for a constraint, until it is closed."""
        kept = KeptMasks(self)
        with self._lock:
            self._open.add(kept)
        return kept

    def add(self, kept: "KeptMasks", key: int, row: Row, counts: bool) -> Row:
        """See `KeptMasks.put`."""
        with self._lock:
            if kept not in self._open:  # closed while the mask was made: its bytes would never go
                return row
            if len(kept.young) >= MOST_KEYS:
                self._age()
            if not counts:
                kept.young[key] = row
                return row
            if self._young and self._young + row.nbytes > self._half:
                self._age()
            content = row.tobytes()
            same = kept.same.get(content)
            if same is None:
                kept.same[content] = same = row
                row.flags.writeable = False
                self._young += row.nbytes
            kept.young[key] = same
            return same

    def close(self, kept: "KeptMasks") -> None:
        """See `KeptMasks.close`."""
        with self._lock:
            if kept in self._open:
                self._open.remove(kept)
                self._young -= _size(kept.same)
                self._old -= _size(kept.old_same)
                kept.young, kept.old, kept.same, kept.old_same = {}, {}, {}, {}

    def _age(self) -> None:
        for kept in self._open:
            self.dropped += len(kept.old_same)
            kept.old, kept.old_same = kept.young, kept.same
            kept.young, kept.same = {}, {}
        self._old, self._young = self._young, 0


class KeptMasks:
    """The masks of one constraint, by number; equal ones are kept once."""

    def __init__(self, store: MaskStore) -> None:
        self._store = store
        self.young: dict[int, Row] = {}
        self.old: dict[int, Row] = {}
        self.same: dict[bytes, Row] = {}  # the young ones by their content
        self.old_same: dict[bytes, Row] = {}

    def get(self, key: int) -> Row | None:
        """Return a mask, if it is still kept."""
        row = self.young.get(key)
        if row is None:
            row = self.old.get(key)
            if row is not None:
                row = self._store.add(self, key, row, row.tobytes() in self.old_same)
        return row

    def put(self, key: int, row: Row, *, counts: bool = True) -> Row:
        """Keep `row`, which must not change any more. Returns it, or an equal one that was kept.

        `counts`: False if it is also kept elsewhere.
        """
        self._store.made += 1
        return self._store.add(self, key, row, counts)

    def close(self) -> None:
        """Drop all of them."""
        self._store.close(self)


def _size(rows: dict[bytes, Row]) -> int:
    return sum(row.nbytes for row in rows.values())
