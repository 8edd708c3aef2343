"""Canaries: prompts that could be loaded from host memory and are computed, to compare the two.

A seal says that a block is what was saved, not that what was saved was right. So of the prompts that
find blocks in host memory a share is computed instead. What was computed is what the request gets. Some
of its blocks are saved a second time, each under a *twin*'s key, and compared with those that would have
been loaded. A block that differs is dropped, here and on the disk.

The share is one of prompts in turn, not of keys, so any block may be looked at. Does not know what
compares them, or what a block holds.
"""

from collections.abc import Iterable, Mapping

from ramify.actors.cache.node import Node
from ramify.actors.cache.stored import StoredBlocks
from ramify.protocol.messages import CompareOrder, CompareResult

MOST_BLOCKS = 8  # of a prompt that are compared
MOST_UNDER_WAY = 32  # blocks, each of which holds two slots


class Canaries:
    """`share`: of the prompts that could be loaded, which are computed; 0: none is.

    `prompts`: those that could be loaded so far; `computed`: of these. `counts`: blocks by verdict.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self.prompts = self.computed = 0
        self.counts: dict[str, int] = {"equal": 0, "differs": 0, "unknown": 0}
        self._orders: list[CompareOrder] = []
        self._under_way: dict[bytes, bytes] = {}  # keys of blocks by those of their twins

    def held(self) -> Iterable[bytes]:
        """Keys of the blocks that are pinned until they were compared."""
        return self._under_way.values()

    def choose(self, keys: list[bytes], first: int) -> dict[int, bytes]:
        """Keys by number of the blocks to compare, if the prompt that could load `keys` is to be
        computed; `first`: the number of the first block. Empty: it is loaded.
        """
        due = (self.prompts + 1) * self.share >= self.computed + 1
        if not due or len(self._under_way) >= MOST_UNDER_WAY:
            return {}
        every = -(-len(keys) // MOST_BLOCKS)
        chosen = range(len(keys) - 1 - self.computed % every, -1, -every)
        return {first + at: keys[at] for at in chosen}

    def granted(self, computed: bool) -> None:
        """Count a prompt that could be loaded. `computed`: it is."""
        self.prompts += 1
        self.computed += computed

    def compare(self, stored: StoredBlocks, node: Node, blocks: Mapping[int, bytes]) -> None:
        """Compare pinned blocks with those of the path to `node`, which were computed."""
        for number, key in blocks.items():
            order = stored.save_twin(node, number, key)
            if order is None:
                self.give_up(stored, [key])
            else:
                self._under_way[order.twin] = key
                self._orders.append(order)

    def give_up(self, stored: StoredBlocks, keys: Iterable[bytes]) -> None:
        """Unpin blocks that cannot be compared."""
        for key in keys:
            stored.unpin([key])
            self.counts["unknown"] += 1

    def take_orders(self) -> list[CompareOrder]:
        orders, self._orders = self._orders, []
        return orders

    def done(self, stored: StoredBlocks, result: CompareResult) -> bool:
        """An order was carried out. Whether it tells anything: its executor may be gone."""
        key = self._under_way.pop(result.order.twin, None)
        if key is None:
            return False
        stored.arrived(result.order.twin, whole=False)
        if result.verdict == "differs":
            stored.drop([key])
            if stored.disk is not None:
                stored.disk.drop(key)
        stored.unpin([key])
        self.counts[result.verdict] += 1
        return True

    def renew(self) -> None:
        """Host memory is another one."""
        self.counts["unknown"] += len(self._under_way)
        self._under_way.clear()
        self._orders.clear()
