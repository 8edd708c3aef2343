"""Blocks of KV that go to other replicas, and come from them, as their fronts ask for it.

The cache says in which slots of host memory they are, or are to be (`Settle`). Something else copies
them (`CopyOut`, `CopyIn`), beside the steps: what leaves the device first, once that step is over.

Does not know sessions, nor which block is worth a move.
"""

from collections import deque

from ramify.protocol.cluster import (
    BlocksPut,
    BlocksRead,
    CopiedIn,
    CopyIn,
    CopyOut,
    PutBlocks,
    ReadBlocks,
    ReadOrPut,
)
from ramify.protocol.messages import Settle, Settled
from ramify.protocol.plan import unpack


class KvExchange:
    """Requests to move blocks, in order. `copies`: blocks to copy now; `answers`: for fronts."""

    def __init__(self) -> None:
        self.copies: list[CopyOut | CopyIn] = []
        self.answers: list[BlocksPut | BlocksRead] = []
        self.asks = False  # something is to be settled
        self._asked: list[ReadOrPut] = []
        self._copied: list[CopiedIn] = []
        self._settling: deque[tuple[list[PutBlocks], list[ReadBlocks]]] = deque()
        self._saving: list[CopyOut] = []  # whose blocks the next plans save
        self._under_way: deque[list[CopyOut]] = deque()  # of each step that does

    def ask(self, message: ReadOrPut | CopiedIn) -> None:
        self.asks = True
        if isinstance(message, CopiedIn):
            self._copied.append(message)
            self.answers.append(BlocksPut(message.session, message.branch))
        else:
            self._asked.append(message)

    def settle(self, settle: Settle) -> None:
        """Add to `settle` the puts and reads that were asked for since the last one."""
        self.asks = False
        asked, self._asked = self._asked, []
        puts = [each for each in asked if isinstance(each, PutBlocks)]
        reads = [each for each in asked if isinstance(each, ReadBlocks)]
        if asked:
            self._settling.append((puts, reads))
        settle.puts.extend(b"".join(block.key for block in put.read.blocks) for put in puts)
        settle.notes.extend(put.note for put in puts if put.note)
        settle.reads.extend(reads)
        copied, self._copied = self._copied, []
        settle.kept.extend(each.kept for each in copied)
        settle.refused.extend(each.refused for each in copied)

    def settled(self, message: Settled, down: bool, saving: bool) -> None:
        """Turn the cache's answer to puts or reads into copies.

        `down`: there is no executor, so nothing is copied. `saving`: the next plans save some blocks.
        """
        puts, reads = self._settling.popleft()
        for put, slots in zip(puts, map(unpack, message.slots), strict=True):
            self.copies.append(CopyIn(put, [-1] * len(slots) if down else slots.tolist()))
        outs = [
            CopyOut(read, [] if down else blocks)
            for read, blocks in zip(reads, message.reads, strict=True)
        ]
        (self._saving if saving and not down else self.copies).extend(outs)

    def plan(self) -> bool:
        """Note that the next plan saves the last blocks that wait. Returns whether any do."""
        if not self._saving:
            return False
        self._under_way.append(self._saving)
        self._saving = []
        return True

    def landed(self) -> None:
        """Order the copies that waited for a step, which is over. `plan` was true for it."""
        self.copies += self._under_way.popleft()

    def lost(self) -> None:
        """Answer all reads that wait with nothing: the executor is gone, and their blocks with it."""
        for out in [*(out for outs in self._under_way for out in outs), *self._saving]:
            self.copies.append(CopyOut(out.read, []))
        self._under_way.clear()
        self._saving.clear()
