"""What a router costs: microseconds for a placement and for what replicas tell, bytes of its index.

    python benchmarks/routing_cost.py [--replicas 4 128 1000] [--tokens 32768] [--json FILE]

Each replica's cache is full of conversations: `--pool` tokens in blocks of 64, a tenth of them behind a
prefix that all share. Placements are of new prompts, of prompts that one replica has, and of prompts
that begin with the shared prefix, each as long as `--tokens`, with reports of load between them.
Medians and the 99th percentile; the time of hashing alone is shown beside them.

    python benchmarks/routing_cost.py --events

What listening costs a cache: turns of chats (128 tokens in, 64 out) and new prompts of 4,096 tokens,
with and without a listener, in turns; and what that is of an H200's steps for them. Once in a pool that
is full, so that nearly every turn computes its whole chat again, and once in one with room for all. CPU
time of the thread, medians.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ramify.actors.cache.cache import RadixCache
from ramify.actors.kit.blocks import BlockHasher, seed
from ramify.actors.routing.router import ReplicaRouter
from ramify.protocol import messages as m
from ramify.protocol.cluster import MOST_HASHES, KvEvents, ListenKv, ReplicaLoad

TOGETHER = 5  # turns whose changes are told at once: those of 50 ms at 100 turns a second


def tokens(dice: np.random.Generator, count: int) -> "np.ndarray":
    return dice.integers(0, 150_000, count, dtype=np.int32)


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    micros = [1e6 * each for each in seconds]
    return {
        f"{name}_us": round(statistics.median(micros), 1),
        f"{name}_p99": round(float(np.percentile(micros, 99)), 1),
    }


def timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def placements(replicas: int, size: int, pool: int, rounds: int) -> dict[str, float]:
    dice = np.random.default_rng(0)
    hasher = BlockHasher()
    router = ReplicaRouter()
    shared = tokens(dice, pool // 10)
    first = hasher.chain(seed(""), shared)
    owned: list[np.ndarray] = []
    told: list[float] = []
    for replica in range(replicas):
        router.joined(replica)
        own = tokens(dice, pool - len(shared))
        hashes = np.concatenate((first, hasher.chain(seed(""), own)))
        owned.append(own[: 4 * size])
        for at in range(0, len(hashes), MOST_HASHES):
            part = hashes[at : at + MOST_HASHES]
            event = KvEvents(0, part.tobytes(), listener=1, reset=not at)
            told.append(timed(lambda r=replica, e=event: router.events(r, e)) / len(part))
    gc.collect()
    load = ReplicaLoad(queued=100, prefill_rate=40_000.0, free=10, evictable=pool // 2, slots=pool)
    seconds: dict[str, list[float]] = {"new": [], "hit": [], "shared": [], "update": [], "event": []}
    hashing = []
    now = 0.0
    for i in range(rounds):
        now += 0.01
        replica = i % replicas
        seconds["update"].append(timed(lambda r=replica, t=now: router.update(r, load, t)))
        hit = np.concatenate((owned[replica][: size - 512], tokens(dice, 512)))
        part = np.concatenate((shared[: size // 2], tokens(dice, size - size // 2)))
        for name, prompt in (("new", tokens(dice, size)), ("hit", hit), ("shared", part)):
            begin = time.perf_counter()
            placement = router.place("", prompt.tobytes(), now)
            seconds[name].append(time.perf_counter() - begin)
            assert placement is not None
            router.sent(placement.replica, placement.computes, now, placement.ticket, holds=size)
        hashing.append(timed(lambda p=part: hasher.chain(seed(""), p)))
        fresh = KvEvents(i // replicas + 1, dice.integers(0, 1 << 63, 16, dtype=np.uint64).tobytes())
        seconds["event"].append(timed(lambda r=replica, e=fresh: router.events(r, e)))
    found: dict[str, float] = {"replicas": replicas, "tokens": size}
    for name, each in seconds.items():
        found |= spread(name, each)
    found |= spread("hashing", hashing)
    found["snapshot_ns_block"] = round(1e9 * statistics.fmean(told))
    found["entries"] = router.index.entries
    found["stride"] = router.index.stride
    found["index_mib"] = round(router.index.memory / 2**20, 1)
    return found


class Turns:
    """A cache of `pool` KV slots, and chats that go on in it."""

    def __init__(self, listens: bool, pool: int) -> None:
        self.cache = RadixCache(pool)
        self.dice = np.random.default_rng(1)
        self.count = 1 << 40
        if listens:
            self.cache.listen_kv(ListenKv(1))
        self.lengths: dict[int, int] = {}
        for branch in range(1, 65):
            self.begin(branch)

    def begin(self, branch: int) -> None:
        if branch in self.lengths:
            self.cache.drop_branches(m.DropBranches([branch]))
        self.cache.open_branch(m.OpenBranch(branch))
        self.lengths[branch] = 0
        self.turn(branch, 4096, 64)

    def turn(self, branch: int, size: int, output: int, last: bool = True) -> float:
        """Seconds that the cache's methods took. `last`: with what it has to tell of some turns."""
        self.count += 1
        prompt = m.ExtendBranch(branch, tokens(self.dice, size).tobytes())
        length = self.lengths[branch] = self.lengths[branch] + size
        out = tokens(self.dice, output).tobytes()
        cache = self.cache
        begin = time.thread_time()
        cache.extend_branch(prompt)
        cache.settle(m.Settle([], [], [m.Acquire(self.count, branch, 16)]), 0.0)
        for _ in range(output // 16):
            cache.settle(m.Settle([], [m.Grow(self.count, 16)], []), 0.0)
        cache.settle(m.Settle([m.Commit(self.count, length)], [], []), 0.0)
        final = m.Commit(self.count, length + output - 1, out, final=True)
        cache.settle(m.Settle([final], [], []), 0.0)
        if last:
            cache.news()
        took = time.thread_time() - begin
        self.lengths[branch] += output
        return took


def events(rounds: int, pool: int) -> dict[str, float]:
    with_it, without = Turns(True, pool), Turns(False, pool)
    found: dict[str, list[float]] = {"chat": [], "chat_told": [], "long": [], "long_told": []}
    for i in range(rounds):
        pairs = [("", without), ("_told", with_it)]
        for name, turns in pairs if i % 2 else pairs[::-1]:
            kind, size = ("chat", 128) if i % 8 else ("long", 4096)
            took = 0.0
            for k in range(TOGETHER):
                branch = 1 + (TOGETHER * i + k) % 64
                if turns.lengths[branch] > 16_000:
                    turns.begin(branch)
                took += turns.turn(branch, size, 64, k == TOGETHER - 1)
            found[kind + name].append(took / TOGETHER)
    row: dict[str, float] = {"pool": pool}
    for name, seconds in found.items():
        row[f"{name}_us"] = round(1e6 * statistics.median(seconds), 1)
    for name in ("chat", "long"):
        row[f"{name}_more_%"] = round(100 * (row[f"{name}_told_us"] / row[f"{name}_us"] - 1), 1)
    # a decode of 64 rows takes 6.4 ms, so a turn's share of 64 steps is 6.4 ms; 4,096 tokens take 93.5
    row["chat_of_device_%"] = round((row["chat_told_us"] - row["chat_us"]) / 64 / 100, 3)
    row["long_of_device_%"] = round((row["long_told_us"] - row["long_us"]) / 99_900 * 100, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 128, 1000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--pool", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--events", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    if options.events:
        for pool in (200_000, 2_000_000):
            rows.append(events(4 * options.rounds, pool))
            print(rows[-1], flush=True)
    else:
        for replicas in options.replicas:
            for size in options.tokens:
                rows.append(placements(replicas, size, options.pool, options.rounds))
                print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
