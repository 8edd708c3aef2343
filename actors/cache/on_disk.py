"""Which blocks of KV are on the disk, and what is to be moved between it and host memory.

Host memory lies before the disk: what is saved there is written to the disk behind it, and what the disk
has comes to host memory before it is loaded. What was not used for longest gives way.

A request waits for the disk as long as computing would take, not longer (`Acquire.rate`). Where the disk
is slower, one look in `PROBE` still asks it, so that one slow moment is not the last word.

Does not know what moves the blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ramify.protocol.cluster import BLOCK
from ramify.protocol.messages import ERASE, DiskOrder, DiskResult

MOST_WRITING = 64  # blocks on their way to the disk
PROBE = 16
_FORGET = 8  # results until a rate is half forgotten, about
SHORTEST, LONGEST = 0.05, 10.0  # seconds that a request waits

if TYPE_CHECKING:
    from ramify.actors.cache.stored import StoredBlocks


class OnDisk:
    """`places` of the disk, some of which hold blocks already: `found`, the oldest first. `notes`: what
    comes with some of them, see `StoredSnapshots`.
    """

    def __init__(
        self,
        places: int,
        found: Iterable[tuple[bytes, int]] = (),
        notes: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        self.places, self.notes = places, dict(notes)
        # called with each key that the disk has no more, and with those that it has now and their notes
        self.gone: Callable[[bytes], None] = lambda key: None
        self.came: Callable[[bytes, bytes], None] = lambda key, note: None
        self._place = OrderedDict(found)
        self.writing: dict[bytes, int] = {}  # places by key
        self.reading: dict[bytes, int] = {}
        self.erasing: dict[bytes, int] = {}
        self._wrong: set[bytes] = set()  # that are to be erased once they are written
        held = set(self._place.values())
        self.free = [place for place in range(places - 1, -1, -1) if place not in held]
        self._due: OrderedDict[bytes, None] = OrderedDict()  # that are to be written, as host has them
        self.orders: list[DiskOrder] = []  # for the mover
        self.broken = False
        self.block_s = 0.0  # of a block that is read, others meanwhile; 0: unknown
        self.write_s = 0.0  # of one that is written
        self.rate = 0.0  # tokens a second that were computed lately; 0: unknown
        self.seconds, self.moved = 0.0, 0  # that orders took; orders that were carried out
        self._looks = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: bytes) -> bool:
        return key in self._place

    def held(self) -> dict[bytes, int]:
        return dict(self._place)

    def has_or_gets(self, key: bytes) -> bool:
        there = key in self._place or key in self.writing or key in self.erasing
        return self.broken or there or key in self._due

    @property
    def backlog(self) -> int:
        """How many blocks wait to be written, or are being written."""
        return len(self._due) + len(self.writing)

    # --- to the disk --------------------------------------------------------------------------

    def want(self, key: bytes) -> None:
        """Block `key` is in host memory, or will be: write it, unless that is done."""
        if not self.has_or_gets(key):
            self._due[key] = None
            if len(self._due) > 4 * self.places:
                self._due.popitem(last=False)

    def write(self, host: "StoredBlocks") -> None:
        """Order writes of as many blocks as there is room for. `host`: tells where each is."""
        while self._due and len(self.writing) < MOST_WRITING:
            key, _ = self._due.popitem(last=False)
            slot = host.place(key)
            if slot is None:
                continue  # it has gone
            place = self._free_place()
            if place is None:
                return
            self.writing[key] = place
            self.orders.append(DiskOrder(True, key, slot, place, host.notes.get(key, b"")))

    def _free_place(self) -> int | None:
        if self.free:
            return self.free.pop()
        for key in self._place:
            if key not in self.reading:
                return self._lose(key)
        return None

    def _lose(self, key: bytes) -> int:
        """The place that held a block until now."""
        place = self._place.pop(key)
        self.notes.pop(key, None)
        self.gone(key)
        return place

    def drop(self, key: bytes) -> None:
        """Have a block erased, so that no restart finds it."""
        self._due.pop(key, None)
        if key in self.writing:
            self._wrong.add(key)
        elif key in self._place and key not in self.reading:
            place = self._lose(key)
            self.erasing[key] = place
            self.orders.append(DiskOrder(True, key, ERASE, place))

    # --- from the disk ------------------------------------------------------------------------

    @property
    def slow(self) -> bool:
        """Whether a block takes longer to read, or to write, than to compute, and that is no chance."""
        return self.moved >= _FORGET and max(self.block_s, self.write_s) * self.rate >= BLOCK

    def pays(self, rate: float) -> bool:
        """Whether reading takes less time than computing, at `rate` tokens a second; 0: unknown."""
        self.rate = rate or self.rate
        if self.block_s * rate < BLOCK:
            return True
        self._looks += 1
        return self._looks % PROBE == 0

    def cost(self, rate: float) -> int:
        """Tokens that are computed while one block is read; now and then 0, so that it is asked."""
        seconds = self.block_s * rate
        return int(seconds) if seconds < BLOCK or not self.pays(rate) else 0

    def read(self, keys: Sequence[bytes], host: "StoredBlocks", most: int) -> list[bytes]:
        """Have these blocks, which are on the disk, brought to host memory: at most `most`, and as there
        are slots. Returns those that are on their way.
        """
        coming: list[bytes] = []
        for key in keys[:most]:
            if key not in self.reading and host.place(key) is None:
                slot = host.reserve(key)
                if slot is None:
                    break
                self.reading[key] = place = self._place[key]
                self._place.move_to_end(key)
                self.orders.append(DiskOrder(False, key, slot, place))
            if key in self.reading:
                coming.append(key)
        return coming

    def done(self, result: DiskResult, host: "StoredBlocks") -> None:
        """An order was carried out, or could not be."""
        order = result.order
        self.seconds += result.seconds
        self.moved += 1
        self.broken = self.broken or result.broken
        if order.slot == ERASE:
            if self.erasing.pop(order.key, None) is not None:
                self.free.append(order.place)
            return
        moving = self.writing if order.write else self.reading
        if moving.get(order.key) != order.place:
            return
        del moving[order.key]
        if not order.write:
            host.arrived(order.key, whole=result.whole)
            self.block_s = _learnt(self.block_s, result.seconds / 2)  # several are read at once
            if not result.whole and order.key in self._place:
                self.free.append(self._lose(order.key))
        elif result.whole:
            self.write_s = _learnt(self.write_s, result.seconds)
            self._place[order.key] = order.place
            if order.note:
                self.notes[order.key] = order.note
                self.came(order.key, order.note)
            if order.key in self._wrong:
                self._wrong.discard(order.key)
                self.drop(order.key)
        else:
            self.free.append(order.place)


def _learnt(known: float, last: float) -> float:
    """A mean of the last results; `known` 0: there was none."""
    return known + (last - known) / _FORGET if known else last


class DiskWaits:
    """Requests that wait for blocks from the disk, and branches whose blocks are fetched ahead."""

    def __init__(self, stored: "StoredBlocks") -> None:
        self._stored = stored
        self._waits: dict[int, tuple[set[bytes], float]] = {}  # blocks, and until when
        self._ready: list[int] = []

    @property
    def deadline(self) -> float | None:
        """Clock seconds at which the first request has waited long enough; None: none waits."""
        return min((until for _, until in self._waits.values()), default=None)

    def begin(self, request: int, keys: Sequence[bytes], rate: float, now: float, gain: int = 0) -> bool:
        """Whether `request` waits for those of these blocks that are not in host memory.

        `gain`: tokens that need not be computed then; 0: their own, if reading them pays.
        """
        coming, missing = self._read(keys, 0.0 if gain else rate, self._stored.slots // 2)
        if coming:
            patience = min(LONGEST, max(SHORTEST, (gain or BLOCK * missing) / rate))
            self._waits[request] = set(coming), now + patience
        return bool(coming)

    def ahead(self, keys: Sequence[bytes]) -> None:
        """Fetch blocks that a request may need soon, as far as slots are free."""
        self._read(keys, 0.0, len(self._stored.free))

    def _read(self, keys: Sequence[bytes], rate: float, most: int) -> tuple[list[bytes], int]:
        """Blocks that are on their way, and how many there are."""
        stored, disk = self._stored, self._stored.disk
        if disk is None or not most:
            return [], 0
        missing = [key for key in keys if stored.place(key) is None]
        if not missing or not disk.pays(rate):
            return [], 0
        stored.touch(keys[::-1])
        return disk.read(missing, stored, most), len(missing)

    def done(self, result: DiskResult) -> None:
        """An order was carried out."""
        disk, key = self._stored.disk, result.order.key
        if disk is None:
            return
        disk.done(result, self._stored)
        if not result.order.write:
            for request, (keys, _) in list(self._waits.items()):
                keys.discard(key)
                if not keys:
                    self._end(request)

    def expire(self, now: float) -> None:
        """Let requests that have waited long enough go on with the blocks that are there."""
        for request, (_, until) in list(self._waits.items()):
            if until <= now:
                self._end(request)

    def renew(self, stored: "StoredBlocks") -> None:
        """Host memory is another one."""
        self._stored = stored
        for request in list(self._waits):
            self._end(request)

    def _end(self, request: int) -> None:
        del self._waits[request]
        self._ready.append(request)

    def take_ready(self) -> list[int]:
        """Take the requests that wait no more, for `Brought`."""
        ready, self._ready = self._ready, []
        return ready

    def take_orders(self) -> list[DiskOrder]:
        disk = self._stored.disk
        if disk is None:
            return []
        disk.write(self._stored)
        orders, disk.orders = disk.orders, []
        return orders
