"""KV that requests load instead of computing it: which blocks the next plan loads, and whether it pays.

A request whose blocks are stored waits with its row and its pages until the executor has loaded and
checked them; then its prompt goes on behind them. Steps under way are not held up: a plan beside
decodes loads what takes about `SHARE` of a step.

How long a block takes is learnt from results, as the pace of prompts is. Loading pays while it takes
less time than computing as many tokens; where it seems not to, one request in `PROBE` still loads, so
that one slow moment is not the last word.

Does not know pages, rows or the cache.
"""

from collections import deque

from ramify.actors.scheduler.exchange import KvExchange
from ramify.actors.scheduler.request import Load, RequestRun, SentStep
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import MovedBlock, StepResult

MOST_ALONE, MOST_BESIDE = 256, 128  # blocks in a plan: without decodes, and beside them
SHARE = 0.25  # of a step
PROBE = 16
_FORGET = 8  # results until a rate is half forgotten, about

Moves = tuple[list[MovedBlock], list[MovedBlock]]
NO_MOVES: Moves = [], []  # never changed


class KvLoads:
    """The runs that load, in the order of their grants."""

    def __init__(self) -> None:
        self.queue: deque[tuple[RequestRun, list[MovedBlock]]] = deque()
        self.saves: list[MovedBlock] = []  # for the next plan
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

    def clear(self) -> None:
        """The executor is gone, and all that was stored with it."""
        self.queue.clear()
        self.saves, self.due = [], False
        self.exchange.lost()
        self.block_s = 0.0

    def plan(self, step: SentStep, step_s: float) -> Moves:
        """What a plan saves, and what it loads. `step_s`: that steps last."""
        saves, self.saves = self.saves, []
        step.exchanges = self.exchange.plan()
        step.loads = self.take(len(step.bound), step_s)
        self.due = bool(self.queue)
        loads = [block for _, blocks, _ in step.loads for block in blocks]
        step.moved = len(saves) + len(loads)
        return saves, loads

    def take(self, decodes: int, step_s: float) -> list[Load]:
        """What the next plan loads, beside `decodes` decodes in steps of `step_s`."""
        room = MOST_BESIDE if decodes else MOST_ALONE
        if decodes and self.block_s:
            room = max(1, min(room, int(SHARE * step_s / self.block_s)))
        taken: list[Load] = []
        while self.queue and room:
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
