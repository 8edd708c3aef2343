"""KV that moves between device and host memory: which blocks the next plan saves and loads, and whether
loading pays.

A request whose blocks are stored waits with its row and its pages until the executor has loaded and
checked them; then its prompt goes on behind them. Steps under way are not held up: a plan moves no more
than so many bytes, and beside decodes what takes about `SHARE` of a step.

A page is saved before it is written. So while more is to be saved than goes with one plan, requests that
are granted pages wait, and nothing is loaded. What decodes are given is saved first, at once.

How long a block takes is learnt from results, as the pace of prompts is. Loading pays while it takes
less time than computing as many tokens; where it seems not to, one request in `PROBE` still loads, so
that one slow moment is not the last word.

What others lose when pages are taken from them follows from that, too (`HostReturns`).

Does not know pages, rows or the cache.
"""

from collections import deque

import numpy as np

from ramify.actors.scheduler.exchange import KvExchange
from ramify.actors.scheduler.request import Load, RequestRun, SentStep
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import ExecutorInfo, MovedBlock, StepResult

MOST_ALONE, MOST_BESIDE = 256, 128  # blocks in a plan: without decodes, and beside them
# Bytes of them beside decodes: some 10 ms of a CPU, 3 of a GPU's link. ALONE times that without decodes.
CPU_BYTES, GPU_BYTES, ALONE = 16 << 20, 128 << 20, 4
SHARE = 0.25  # of a step
PROBE = 16
_FORGET = 8  # results until a rate is half forgotten, about
LEARNT = 16  # long prompts over which is learnt what host memory has
CHEAP = 0.5  # of computing: others are let in as if what they take cost nothing

Moves = tuple[list[MovedBlock], list[MovedBlock]]
NO_MOVES: Moves = [], []  # never changed


class KvLoads:
    """The runs that load, in the order of their grants."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.queue: deque[tuple[RequestRun, list[MovedBlock]]] = deque()
        self.saves: list[MovedBlock] = []  # for the next plans
        self._first = 0  # of these, those that the next plan has to save
        self._waiting: list[RequestRun] = []  # for all of these
        most = (GPU_BYTES if info.device.startswith("cuda") else CPU_BYTES) // max(1, info.block_bytes)
        self._beside = max(1, min(MOST_BESIDE, most))
        self._alone = max(1, min(MOST_ALONE, ALONE * most))
        self.exchange = KvExchange()
        self.due = False  # there is something for the next plan
        self.block_s = 0.0  # of one block; 0: unknown
        self._asked = 0

    def add(self, run: RequestRun, blocks: list[MovedBlock]) -> None:
        self.queue.append((run, blocks))
        self.due = True

    def save(self, blocks: list[MovedBlock]) -> None:
        self.saves += blocks
        self.due = True

    def waits(self, run: RequestRun) -> bool:
        """Whether `run`, which was granted pages, waits for `saved`: more is to be saved than goes with
        one plan.
        """
        if len(self.saves) > self._beside:
            self._waiting.append(run)
            return True
        self._first = len(self.saves)
        return False

    def saved(self) -> list[RequestRun]:
        """Take the runs that waited for saves, once all is saved: their prompts may be planned."""
        if self.saves or not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        return [run for run in waiting if run.live]

    def write(self, pages: bytes) -> None:
        """Save the blocks in these pages, int32, ahead of others: the next plan may overwrite them.

        State slots and window pages are handed out by grants alone, which wait (`waits`). Where a number
        of theirs is one of `pages` by chance, it goes first, too, which does no harm.
        """
        if not self.saves:
            return
        moved = [np.frombuffer(block.pages, dtype=np.int32) for block in self.saves]
        hit = np.isin(np.concatenate(moved), np.frombuffer(pages, dtype=np.int32))
        ends = np.cumsum([len(own) for own in moved])
        hits = np.diff(np.cumsum(hit)[ends - 1], prepend=0) > 0
        hits[: self._first] = True
        order = np.argsort(~hits, kind="stable")
        self.saves = [self.saves[at] for at in order]
        self._first = int(hits.sum())

    def clear(self) -> None:
        """The executor is gone, and all that was stored with it."""
        self.queue.clear()
        self._waiting.clear()
        self.saves, self._first, self.due = [], 0, False
        self.exchange.lost()
        self.block_s = 0.0

    def plan(self, step: SentStep, step_s: float) -> Moves:
        """Take the blocks that the next plan saves and loads. `step_s`: seconds that a step lasts."""
        room = self._room(len(step.bound), step_s)
        count = max(room, self._first)
        saves, self.saves, self._first = self.saves[:count], self.saves[count:], 0
        if not self.saves:
            step.exchanges = self.exchange.plan()
            step.loads = self.take(room - len(saves))
        self.due = bool(self.queue or self.saves)
        loads = [block for _, blocks, _ in step.loads for block in blocks]
        step.moved = len(saves) + len(loads)
        return saves, loads

    def _room(self, decodes: int, step_s: float) -> int:
        """Blocks that the next plan may move, beside `decodes` decodes in steps of `step_s`."""
        if decodes and self.block_s:
            return max(1, min(self._beside, int(SHARE * step_s / self.block_s)))
        return self._beside if decodes else self._alone

    def take(self, room: int) -> list[Load]:
        """Take at most `room` blocks for the next plan to load."""
        taken: list[Load] = []
        while self.queue and room > 0:
            run, blocks = self.queue.popleft()
            if not run.live:
                continue  # it has ended: its pages are others' now
            now, later = blocks[:room], blocks[room:]
            room -= len(now)
            taken.append((run, now, not later))
            if later:
                self.queue.appendleft((run, later))
        return taken

    def learn(self, result: StepResult, moved: int) -> None:
        """`moved`: blocks that the step has loaded and saved."""
        each = result.load_us * 1e-6 / moved
        if not each:
            return
        self.block_s += (each - self.block_s) / _FORGET if self.block_s else each

    def pays(self, rate: float) -> bool:
        """Whether the next request is to load. `rate`: prompt tokens a second; 0: unknown."""
        if self.block_s * rate < BLOCK:
            return True
        self._asked += 1
        return self._asked % PROBE == 0

    def cost(self, rate: float) -> int:
        """Prompt tokens that could be computed while one block is loaded; at most a block's."""
        return min(BLOCK, int(self.block_s * rate))


class HostReturns:
    """What it costs others to lose their KV: its computing, or a copy, as far as host memory has it.

    Learnt from long prompts, those of sessions that come back: of the tokens that they lack on the
    device, some are loaded and others computed. So where host memory is too small, or copies are slow,
    nothing is trusted to it. `price`: of a token that goes, beside computing it, from 0 to 1. `cheap`:
    nobody has to wait for room.
    """

    def __init__(self) -> None:
        self.price, self.cheap = 1.0, False
        self._part = 0.0  # of what long prompts lacked, what was loaded

    def note(self, run: RequestRun, cost: int) -> None:
        """Learn from the grant of `run`, which has a long prompt. `cost`: see `KvLoads.cost`."""
        lacked = run.loaded + run.prompt - run.cached
        weight = lacked / (LEARNT * run.prompt)  # who lacked little says little
        self._part += (run.loaded / lacked - self._part) * weight
        self.price = 1.0 - self._part * (1.0 - cost / BLOCK)
        self.cheap = self.price < CHEAP
