"""Which replicas have KV of which prefixes: block hashes, each with a set of replicas.

A set is an integer with a bit for each *slot*; a slot is a replica's place in this index. KV is
there from a branch's start without gaps, so along a prompt the sets only get smaller, and a few
look-ups find where they change: no walk over the blocks.

Memory is bounded by sampling. When there are too many entries, only hashes that are multiples of 2,
4, 8, ... count from then on, everywhere alike: no long prefix is lost, but its length is known less
exactly (to 2^k blocks, on average). Entries that do not count any more, and those of replicas that
have gone, are swept out a part at a time, so no call takes long.

Does not know load, time, or what the hashes are of.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ramify.actors.kit.blocks import Hashes

ENTRY = 136  # bytes: a place in a dict (at its mean fill), the hash, a share of the sets
_SHARD = 512  # entries of one, if it is full
_MOST_SHARDS = 4096
_MOST_SWEPT = 100  # shards in one call: some milliseconds
_LEVELS = 12  # different sets along one prompt that are looked for, from the deepest on
_MOST_SHARED = 1 << 16  # sets that are kept once for all entries that have them


class PrefixIndex:
    """`memory`: bytes that the entries may take, about."""

    def __init__(self, memory: int) -> None:
        self.most = max(_SHARD, memory // ENTRY)  # entries
        self.stride = 1  # hashes that are multiples of it count
        self.entries = 0
        bits = min(_MOST_SHARDS, self.most // _SHARD).bit_length() - 1
        self._shards: list[dict[int, int]] = [{} for _ in range(1 << bits)]
        self._shift = 64 - bits
        self._shared: dict[int, int] = {}
        self._single = [1 << slot for slot in range(64)]
        self._alive = 0
        self._dead = 0  # slots whose entries are still there
        self._dying = 0  # those that the sweep under way takes away
        self._sweep = 0  # shards that it has not seen yet
        self._slots = 0

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        return ENTRY * self.entries + len(self._shared) * (140 + self._slots // 7)

    def join(self) -> int:
        """A slot without entries."""
        slot = 0
        while (self._alive | self._dead) >> slot & 1:
            slot += 1
        self._alive |= 1 << slot
        self._slots = max(self._slots, slot + 1)
        while slot >= len(self._single):
            self._single.append(1 << len(self._single))
        return slot

    def leave(self, slot: int) -> None:
        """Its entries do not count from now on."""
        self._alive &= ~(1 << slot)
        self._dead |= 1 << slot

    def add(self, slot: int, hashes: Hashes) -> None:
        """A replica has these now. What it has already is no error."""
        bit, shards, shared = self._single[slot], self._shards, self._shared
        for each in self._sampled(hashes):
            shard = shards[each >> self._shift]
            before = shard.get(each)
            if before is None:
                shard[each] = bit
                self.entries += 1
            elif not before & bit:
                both = before | bit
                shard[each] = shared.setdefault(both, both)
        if len(shared) > _MOST_SHARED:
            shared.clear()  # who has one keeps it
        if self.entries > self.most and not self._sweep:
            self.stride *= 2
            self._sweep = len(self._shards)
        self.tidy(1 + len(hashes) // 16)

    def remove(self, slot: int, hashes: Hashes) -> None:
        """A replica has these no longer. What it has not is no error."""
        bit, shards, shared = self._single[slot], self._shards, self._shared
        for each in self._sampled(hashes):
            shard = shards[each >> self._shift]
            before = shard.get(each, 0)
            if before == bit:
                del shard[each]
                self.entries -= 1
            elif before & bit:
                rest = before ^ bit
                shard[each] = shared.setdefault(rest, rest)
        self.tidy()

    def tidy(self, shards: int = 1) -> None:
        """Sweep at most `shards` shards (and `_MOST_SWEPT`), if there is anything to sweep."""
        for _ in range(min(shards, _MOST_SWEPT)):
            if not self._sweep:
                if not self._dead:
                    return
                self._sweep = len(self._shards)
            self._tidy()

    def _tidy(self) -> None:
        if self._sweep == len(self._shards):
            self._dying = self._dead
        self._sweep -= 1
        gone, stride = self._dying, self.stride
        kept: dict[int, int] = {}
        shard = self._shards[self._sweep]
        for each, slots in shard.items():
            if each % stride == 0:
                left = slots & ~gone if slots & gone else slots
                if left:
                    kept[each] = left
        self.entries += len(kept) - len(shard)
        self._shards[self._sweep] = kept
        if not self._sweep:
            self._dead &= ~gone

    def get(self, each: int) -> int:
        """The replicas that have this block."""
        return self._shards[each >> self._shift].get(each, 0) & self._alive

    def _sampled(self, hashes: Hashes) -> Iterable[int]:
        if self.stride > 1:
            hashes = hashes[hashes % np.uint64(self.stride) == 0]
        found: list[int] = hashes.tolist()
        return found


class Promises:
    """Prefixes that placed requests are going to compute: an index that forgets.

    Entries are kept for at least `seconds`, at most twice as long. `most`: entries.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, slot: int, hashes: Iterable[int], now: float) -> None:
        self.age(now)
        bit, new = 1 << slot, self._new
        for each in hashes:
            new[each] = new.get(each, 0) | bit
        if len(new) > self._most // 2:
            self._old, self._new = new, {}

    def age(self, now: float) -> None:
        while now - self._since >= self._seconds and (self._new or self._old):
            self._old, self._new = self._new, {}
            self._since += self._seconds
        if not self._new and not self._old:
            self._since = now

    def leave(self, slot: int) -> None:
        """Forget a replica's. O(entries)."""
        rest = ~(1 << slot)
        self._new = {each: slots & rest for each, slots in self._new.items() if slots & rest}
        self._old = {each: slots & rest for each, slots in self._old.items() if slots & rest}

    def get(self, each: int) -> int:
        return self._new.get(each, 0) | self._old.get(each, 0)


def levels(index: PrefixIndex, promises: Promises, hashes: Hashes) -> list[tuple[int, int]]:
    """Prefix lengths in blocks, longest first, each with the replicas whose cache ends there.

    At most `_LEVELS` of them, then one for all other replicas with any block, at their least.
    O(log(blocks)) look-ups for each.
    """
    places = np.arange(len(hashes))
    if index.stride > 1:
        places = np.flatnonzero(hashes % np.uint64(index.stride) == 0)
    known: dict[int, int] = {}

    def at(i: int) -> int:
        found = known.get(i)
        if found is None:
            each = int(hashes[places[i]])
            found = known[i] = index.get(each) | promises.get(each)
        return found

    found: list[tuple[int, int]] = []
    if not len(places) or not at(0):
        return found
    low, high = 0, len(places) - 1  # the last place that anybody has
    if at(high):
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle):
            low = middle
        else:
            high = middle
    above = 0
    while True:
        slots = at(low)
        found.append((int(places[low]) + 1, slots & ~above))
        above |= slots
        if low == 0 or at(0) | above == above:
            return found
        if len(found) == _LEVELS:
            found.append((int(places[0]) + 1, at(0) & ~above))
            return found
        left, right = 0, low  # the last place where there are more
        while right - left > 1:
            middle = (left + right) // 2
            if at(middle) | above != above:
                left = middle
            else:
                right = middle
        low = left


def members(slots: int) -> npt.NDArray[np.intp] | list[int]:
    """The numbers of the bits that are set."""
    if slots.bit_count() > 16:
        size = (slots.bit_length() + 7) // 8
        bits = np.frombuffer(slots.to_bytes(size, "little"), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    found = []
    while slots:
        low = slots & -slots
        found.append(low.bit_length() - 1)
        slots ^= low
    return found
