"""How other routers choose a replica, written from their documents as policies of `routing_sim.py`.

They see what those routers see: requests that they have sent and that have not ended, prefixes that they
have sent, and, where they scrape them, numbers of waiting requests and KV use that are up to 50 ms old.
One gateway has all of it; where theirs are several, each would know its part only.

Block ids are those of the traces: an id stands for a block and all that is before it.
"""

import random
from collections import OrderedDict
from typing import Protocol

import numpy as np

from ramify.actors.kit.blocks import mix


class Asked(Protocol):
    """A request. `blocks`: ids of its prompt's blocks; `session`: its conversation."""

    blocks: list[int]
    session: int


class View(Protocol):
    """What a gateway knows of `count` replicas: numpy arrays, one number for each."""

    count: int
    in_flight: "np.ndarray"  # sent and not ended
    started: "np.ndarray"  # of those, the ones whose first token has come
    waiting: "np.ndarray"  # scraped: requests that wait or are being prefilled
    kv: "np.ndarray"  # scraped: the share of the pool that running requests hold
    prefill_blocks: "np.ndarray"  # blocks without a hit of requests that were sent and have not started
    decode_blocks: "np.ndarray"  # blocks of requests that were sent and have not ended


class Sent:
    """Which prefixes were sent where: for each replica, the `most` blocks that were used last."""

    def __init__(self, count: int, most: int) -> None:
        self.most = most
        self.trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self._who: dict[int, int] = {}

    def add(self, replica: int, blocks: list[int]) -> None:
        tree, bit = self.trees[replica], 1 << replica
        for block in blocks:
            if block in tree:
                tree.move_to_end(block)
            else:
                tree[block] = None
                self._who[block] = self._who.get(block, 0) | bit
        while len(tree) > self.most:
            gone, _ = tree.popitem(last=False)
            rest = self._who[gone] & ~bit
            if rest:
                self._who[gone] = rest
            else:
                del self._who[gone]

    def depths(self, blocks: list[int], count: int) -> "np.ndarray":
        """How many of the first blocks were sent to each replica."""
        found = np.zeros(count)
        slots = (1 << count) - 1
        for depth, block in enumerate(blocks):
            left = slots & self._who.get(block, 0)
            gone = slots ^ left
            if gone and depth:
                found[_members(gone)] = depth
            slots = left
            if not slots:
                return found
        found[_members(slots)] = len(blocks)
        return found


def _members(slots: int) -> "np.ndarray":
    raw = np.frombuffer(slots.to_bytes((slots.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))


class Peer:
    """`tree`: blocks of a replica that prefix trees remember."""

    def __init__(self, view: View, seed: int, tree: int) -> None:
        self.view, self.dice = view, random.Random(seed)
        self.sent = Sent(view.count, tree)

    def least(self) -> int:
        loads = self.view.in_flight
        near = np.flatnonzero(loads == loads.min())
        return int(near[self.dice.randrange(len(near))])

    def two(self) -> int:
        a, b = self.dice.randrange(self.view.count), self.dice.randrange(self.view.count)
        return a if self.view.in_flight[a] <= self.view.in_flight[b] else b

    def smallest_tree(self) -> int:
        return min(range(self.view.count), key=lambda replica: len(self.sent.trees[replica]))

    def choose(self, asked: Asked) -> int:
        raise NotImplementedError


class Random(Peer):
    def choose(self, asked: Asked) -> int:
        return self.dice.randrange(self.view.count)


class RoundRobin(Peer):
    at = -1

    def choose(self, asked: Asked) -> int:
        self.at = (self.at + 1) % self.view.count
        return self.at


class LeastLoaded(Peer):
    """Fewest requests in flight."""

    def choose(self, asked: Asked) -> int:
        return self.least()


class TwoChoices(Peer):
    """The less loaded of two random ones (Ray Serve's default)."""

    def choose(self, asked: Asked) -> int:
        return self.two()


class ConsistentHash(Peer):
    """By the conversation: the first of a ring of 160 places for each replica."""

    def __init__(self, view: View, seed: int, tree: int) -> None:
        super().__init__(view, seed, tree)
        places = mix(np.arange(160 * view.count, dtype=np.uint64))
        order = np.argsort(places)
        self.places, self.owners = places[order], (order // 160)

    def choose(self, asked: Asked) -> int:
        key = mix(np.array([asked.session + (1 << 40)], dtype=np.uint64))[0]
        return int(self.owners[np.searchsorted(self.places, key) % len(self.owners)])


class CacheAware(Peer):
    """sglang-gateway and vllm-router: the longest shared prefix if more than 0.3 of the prompt, else the
    smallest tree; the least loaded once the busiest has 64 requests and 1.5 times more than the idlest.
    """

    def choose(self, asked: Asked) -> int:
        loads = self.view.in_flight
        most, fewest = loads.max(), loads.min()
        if most - fewest > 64 and most > 1.5 * fewest:
            chosen = self.least()
        else:
            depths = self.sent.depths(asked.blocks, self.view.count)
            best = depths.max()
            if best > 0.3 * len(asked.blocks):
                chosen = int(depths.argmax())
            else:
                chosen = self.smallest_tree()
        self.sent.add(chosen, asked.blocks)
        return chosen


class RayPrefix(Peer):
    """Ray Serve LLM: two choices if queues differ by 10 or more; else who shares most, if at least a
    tenth of the prompt, else the smallest trees.
    """

    def choose(self, asked: Asked) -> int:
        loads = self.view.in_flight
        if loads.max() - loads.min() >= 10:
            chosen = self.two()
        else:
            depths = self.sent.depths(asked.blocks, self.view.count)
            if depths.max() >= 0.1 * len(asked.blocks):
                near = np.flatnonzero(depths == depths.max())
                chosen = int(near[self.dice.randrange(len(near))])
            else:
                chosen = self.smallest_tree()
        self.sent.add(chosen, asked.blocks)
        return chosen


class LlmD(Peer):
    """llm-d: 3 x share of the prompt that was sent there + 2 x (1 - queue, scaled to the fleet) + 2 x
    (1 - KV in use), the highest; ties at random.
    """

    def choose(self, asked: Asked) -> int:
        view = self.view
        share = self.sent.depths(asked.blocks, view.count) / max(1, len(asked.blocks))
        least, most = view.waiting.min(), view.waiting.max()
        queue = (most - view.waiting) / (most - least) if most > least else np.ones(view.count)
        score = 3 * share + 2 * queue + 2 * (1 - view.kv)
        near = np.flatnonzero(score >= score.max() - 1e-9)
        chosen = int(near[self.dice.randrange(len(near))])
        self.sent.add(chosen, asked.blocks)
        return chosen


class LoadAware(Peer):
    """vLLM production-stack: matched share - (load - mean) / max(1, mean), the highest.

    `early`: a request counts from when it is sent; else once its response has started.
    """

    early = True

    def choose(self, asked: Asked) -> int:
        view = self.view
        share = self.sent.depths(asked.blocks, view.count) / max(1, len(asked.blocks))
        load = view.in_flight if self.early else view.started
        mean = load.mean()
        score = share - (load - mean) / max(1.0, mean)
        chosen = int(score.argmax())
        self.sent.add(chosen, asked.blocks)
        return chosen


class LoadAwareLate(LoadAware):
    early = False


class Dynamo(Peer):
    """NVIDIA Dynamo's KV router: blocks to prefill there, this request's without its hits included, plus
    blocks of all that was sent there and has not ended; the least.
    """

    def choose(self, asked: Asked) -> int:
        view, size = self.view, len(asked.blocks)
        depths = self.sent.depths(asked.blocks, view.count)
        cost = view.prefill_blocks + size - depths + view.decode_blocks + size
        near = np.flatnonzero(cost <= cost.min() + 1e-9)
        chosen = int(near[self.dice.randrange(len(near))])
        self.sent.add(chosen, asked.blocks)
        return chosen


PEERS: dict[str, type[Peer]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "two-choices": TwoChoices,
    "consistent-hash": ConsistentHash,
    "cache_aware": CacheAware,
    "ray-prefix": RayPrefix,
    "llm-d": LlmD,
    "loadaware": LoadAware,
    "loadaware-late": LoadAwareLate,
    "dynamo": Dynamo,
}
