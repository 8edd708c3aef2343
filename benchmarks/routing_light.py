"""A replica for `routing_sim.py --light`: its scheduler and cache as a model, four times cheaper. Pure.

The router, its index, the loads and the device's table stay as they are, and `Pace` (how many prompt
tokens a step takes) is the scheduler's own. What is modelled: requests are admitted in the order
in which they came, as many as the next steps need and the pool has room for; admitted prompts are
computed in lots, short ones first; two steps are under way; a prompt that shares what another computes
waits for it; blocks stay until the least recently used have to go, the deepest first. What is not:
output beyond the pool (retraction), parts of blocks, several clients. `docs/log` says
how far it is from the real ones.

Sizes are scaled tokens, as in `routing_sim.py`.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Protocol

import numpy as np

from ramify.actors.kit.blocks import BlockHasher, Hashes, seed
from ramify.actors.scheduler.pace import Pace
from ramify.protocol.cluster import BLOCK, MOST_HASHES, KvEvents, ReplicaLoad
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.plan import ExecutorInfo

_IN_FLIGHT = 2
_HELD = 1 / 32  # of a request's holding time that the mean takes, as the scheduler's


class Asked(Protocol):
    number: int
    prompt: int
    output: int
    tenant: int
    first: float
    ended: float
    cached: int
    computed: int


class Host(Protocol):
    """What a replica needs of the simulation."""

    now: float

    def at(self, moment: float, act: Callable[[], None]) -> None: ...
    def tokens(self, request: Asked) -> bytes: ...
    def started(self, request: Asked) -> None: ...
    def ended(self, request: Asked) -> None: ...


class _Run:
    """A request, and what `Pace.lacks` wants of one."""

    __slots__ = (
        "account", "begun", "cached", "depth", "due", "filled", "hashes", "lacking", "lot", "request",
        "tail", "turn",
    )  # fmt: skip

    def __init__(self, request: Asked, hashes: list[int], account: SimpleNamespace) -> None:
        self.request, self.account = request, account
        self.hashes = hashes  # of its whole blocks
        self.depth = 0  # of them, with KV when it began
        self.cached = self.filled = 0  # tokens of the prompt with KV, planned ones included
        self.begun = 0.0
        self.turn = self.due = self.lot = self.lacking = 0
        self.tail = request.prompt + request.output - len(hashes) * BLOCK  # tokens that nobody shares


class _Blocks:
    """A pool of `slots` tokens: blocks by hash, with how many runs hold each; tails have no hash."""

    def __init__(self, slots: int) -> None:
        self.total, self.held, self.idle_size = slots, 0, 0
        self.refs: dict[int, int] = {}
        self.idle: OrderedDict[int, int] = OrderedDict()  # id: tokens; the least recently used first
        self.stored: dict[int, None] = {}
        self.removed: dict[int, None] = {}
        self._tails = -1

    @property
    def free(self) -> int:
        return self.total - self.held - self.idle_size

    def depth(self, hashes: list[int]) -> int:
        """How many of the first blocks are here."""
        refs, idle = self.refs, self.idle
        for i, each in enumerate(hashes):
            if each not in idle and each not in refs:
                return i
        return len(hashes)

    def hold(self, each: int) -> None:
        """A run has computed a block, or has found it here."""
        refs = self.refs.get(each, 0)
        self.refs[each] = refs + 1
        if refs:
            return
        self.held += BLOCK
        if self.idle.pop(each, 0):
            self.idle_size -= BLOCK
        elif each in self.removed:
            del self.removed[each]
        else:
            self.stored[each] = None

    def release(self, hashes: list[int], tail: int) -> None:
        """A run has ended: its blocks stay while there is room."""
        self.held -= tail
        self.idle[self._tails] = tail
        self.idle_size += tail
        self._tails -= 1
        for each in reversed(hashes):
            refs = self.refs[each] - 1
            if refs:
                self.refs[each] = refs
            else:
                del self.refs[each]
                self.idle[each] = BLOCK
                self.held -= BLOCK
                self.idle_size += BLOCK

    def shrink(self) -> None:
        """Forget what was used longest ago until all fits."""
        while self.idle and self.held + self.idle_size > self.total:
            each, size = self.idle.popitem(last=False)
            self.idle_size -= size
            if each >= 0:
                if each in self.stored:
                    del self.stored[each]
                else:
                    self.removed[each] = None


class LightReplica:
    def __init__(
        self, host: Host, number: int, info: ExecutorInfo, config: ScheduleConfig,
        step_seconds: Callable[[int, int, int], float], hasher: BlockHasher, lot: int,
    ) -> None:  # fmt: skip
        self.host, self.number = host, number
        self._rows, self._step_tokens = info.max_rows, info.step_tokens
        self._lookahead = config.lookahead
        self._enough = max(64, info.step_tokens // 32)
        self._pace = Pace(info, config)
        self._seconds, self._hasher, self._lot = step_seconds, hasher, lot
        self.blocks = _Blocks(info.pages)
        self.busy = self._free_at = 0.0
        self.dirty = True
        self.heard: dict[int, int] = {}
        self._waiting: deque[_Run] = deque()
        self._parked: dict[int, list[_Run]] = {}  # by the block that they wait for
        self._computing: dict[int, None] = {}  # blocks that runs are going to compute
        self._prompts: list[tuple[int, int, _Run]] = []  # due, place
        self._place = self._now = 0
        self._long = 0
        self._account = SimpleNamespace(client=SimpleNamespace(lacking=0))  # all are one client's
        self._decoding = self._context = self._read = self._running = 0
        self._queued = self._wanted = 0
        self._ends: list[tuple[int, int, _Run]] = []  # tick of the last token
        self._tick = 0
        self._in_flight = 0
        self._hold_s = 0.0
        self._seq = 0

    # --- what a simulation asks -------------------------------------------------------------

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._parked.values()))

    @property
    def kv(self) -> float:
        """The share of the pool that is held."""
        return self.blocks.held / self.blocks.total

    def listen(self, front: int) -> list[KvEvents]:
        return [KvEvents(0, listener=front + 1, reset=True)]

    def news(self) -> list[KvEvents]:
        stored, removed = list(self.blocks.stored), list(self.blocks.removed)
        self.blocks.stored, self.blocks.removed = {}, {}
        found = []
        for at in range(0, max(len(stored), len(removed)), MOST_HASHES):
            self._seq += 1
            new, old = (
                np.array(each[at : at + MOST_HASHES], dtype=np.uint64).tobytes()
                for each in (stored, removed)
            )
            found.append(KvEvents(self._seq, new, old))
        return found

    def load(self) -> ReplicaLoad:
        blocks, lot = self.blocks, self._lot
        runs = [*self._waiting, *itertools.chain.from_iterable(self._parked.values())]
        runs += [run for _, _, run in self._prompts]
        beyond = [left - lot for run in runs if (left := run.request.prompt - run.filled) > lot]
        return ReplicaLoad(
            queued=self._queued,
            waiting=self.waiting,
            wanted=self._wanted,
            decoding=self._decoding,
            context=self._context,
            free=max(0, blocks.free),
            evictable=blocks.idle_size,
            slots=blocks.total,
            prefill_rate=self._pace.rate(self._decoding),
            step_s=self._pace.step_s if self._running else 0.0,
            hold_s=self._hold_s,
            excess=sum(beyond),
            long=len(beyond),
        )

    # --- events -----------------------------------------------------------------------------

    def submit(self, request: Asked, front: int) -> None:
        self.heard[front] = self.heard.get(front, 0) + 1
        tokens = np.frombuffer(self.host.tokens(request), dtype=np.int32)
        hashes: Hashes = self._hasher.chain(seed(str(request.tenant)), tokens)
        run = _Run(request, hashes.tolist(), self._account)
        self._waiting.append(run)
        self._wanted += request.prompt
        self._queued += request.prompt
        self._pace.lacks(run, request.prompt)
        self._turn()

    def _turn(self) -> None:
        self.dirty = True
        self._admit()
        while self._in_flight < _IN_FLIGHT and self._step():
            self._admit()

    # --- admission --------------------------------------------------------------------------

    def _room(self) -> int:
        decodes = self._decoding
        if not decodes:
            return self._pace.alone(self._long > 0)
        return min(self._pace.beside(decodes), self._step_tokens - decodes)

    def _admit(self) -> None:
        if not self._waiting:
            return
        room = (_IN_FLIGHT + 1) * self._room()
        room -= sum(min(self._enough, run.request.prompt - run.filled) for _, _, run in self._prompts)
        blocks = self.blocks
        while self._waiting and room > 0 and self._running < self._rows:
            run = self._waiting[0]
            request = run.request
            depth = blocks.depth(run.hashes)
            if depth < len(run.hashes) and run.hashes[depth] in self._computing:
                self._waiting.popleft()
                self._parked.setdefault(run.hashes[depth], []).append(run)
                continue
            cached = min(depth * BLOCK, request.prompt - 1)
            fresh = sum(BLOCK for each in run.hashes if each not in blocks.refs) + run.tail
            reserve = self._lookahead * self._running
            if self._running and blocks.held + fresh + reserve > blocks.total:
                return
            self._waiting.popleft()
            self._start(run, depth, cached)
            room -= min(self._enough, request.prompt - cached)

    def _start(self, run: _Run, depth: int, cached: int) -> None:
        request, blocks = run.request, self.blocks
        run.begun, run.depth = self.host.now, depth
        run.cached = run.filled = run.request.cached = cached
        for each in run.hashes[:depth]:
            blocks.hold(each)
        for each in run.hashes[depth:]:
            self._computing[each] = None
        blocks.held += run.tail + BLOCK * (len(run.hashes) - depth)
        blocks.shrink()
        self._running += 1
        self._wanted -= request.prompt
        self._queued -= cached
        self._context += request.prompt
        self._long += request.prompt - cached > self._step_tokens
        self._enter(run)

    def _enter(self, run: _Run) -> None:
        """Its next lot, due as if all prompts had the same part of all steps."""
        run.lot = min(self._lot, run.request.prompt - run.filled)
        run.turn = max(self._now, run.due)
        run.due = run.turn + run.lot * (len(self._prompts) + 1)
        self._place += 1
        heapq.heappush(self._prompts, (run.due, self._place, run))

    # --- steps ------------------------------------------------------------------------------

    def _step(self) -> bool:
        chunks: list[tuple[_Run, int, int]] = []
        left = self._room() if self._prompts else 0
        prompt = 0
        while left > 0 and self._prompts:
            run = self._prompts[0][2]
            self._now = max(self._now, run.turn)
            size = min(left, run.lot)
            chunks.append((run, run.filled, run.filled + size))
            run.filled += size
            run.lot -= size
            left -= size
            prompt += size
            if not run.lot:
                heapq.heappop(self._prompts)
                if run.filled < run.request.prompt:
                    self._enter(run)
        decodes = self._decoding
        if not prompt and not decodes:
            return False
        self._tick += 1
        self._in_flight += 1
        self._context += decodes
        self._read += decodes
        took = self._seconds(prompt, decodes, self._read)
        self._free_at = max(self.host.now, self._free_at) + took
        self.busy += took
        firsts = [run for run, _, end in chunks if end == run.request.prompt]
        for run in firsts:
            self._long -= run.request.prompt - run.cached > self._step_tokens
            if run.request.output > 1:
                self._decoding += 1
                self._read += run.request.prompt
                heapq.heappush(
                    self._ends, (self._tick + run.request.output - 1, run.request.number, run)
                )
        over = [run for run in firsts if run.request.output <= 1]
        while self._ends and self._ends[0][0] <= self._tick:
            run = heapq.heappop(self._ends)[2]
            over.append(run)
            self._decoding -= 1
            self._read -= run.request.prompt + run.request.output - 1
        self.host.at(self._free_at, lambda: self._landed(took, prompt, decodes, chunks, firsts, over))
        return True

    def _landed(
        self, took: float, prompt: int, decodes: int, chunks: list[tuple[_Run, int, int]],
        firsts: list[_Run], over: list[_Run],
    ) -> None:  # fmt: skip
        self._in_flight -= 1
        self._pace.learn(prompt, decodes, took)
        host = self.host
        for run, start, end in chunks:
            self._queued -= end - start
            for each in run.hashes[max(run.depth, start // BLOCK) : end // BLOCK]:
                self.blocks.held -= BLOCK
                self.blocks.hold(each)
                self._computing.pop(each, None)
                self._waiting.extendleft(reversed(self._parked.pop(each, [])))
        for run in firsts:
            run.request.first = host.now
            self._pace.lacks(run, 0)
            host.started(run.request)
        for run in over:
            self._end(run)
        self._turn()

    def _end(self, run: _Run) -> None:
        request, host = run.request, self.host
        request.ended = host.now
        request.computed = request.prompt - run.cached
        self._running -= 1
        self._context -= request.prompt + request.output - 1
        self.blocks.release(run.hashes, run.tail)
        held = host.now - run.begun
        self._hold_s += (held - self._hold_s) * _HELD if self._hold_s else held
        host.ended(request)
