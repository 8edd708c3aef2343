"""Prompts of running requests that are not computed yet, and how much of them the next step takes.

Levels first: generations go before prompts that are computed ahead, then priority decides. A request
that waits for another's prompt lends it its level (`hurry`), so it does not wait behind a lower
priority.

Within a level, weighted fair queueing (Demers et al. 1989) with the clock of start-time fair queueing
(Goyal et al. 1996). A prompt is cut into lots of at most `LOT` tokens. A lot is due when its tenant
would have got it, had every tenant had the same part of all steps; the lot that is due first goes first.
So a short prompt goes before a long one, and a short one of a tenant with many behind those of others.
Virtual time goes on with the work, so a long prompt's next lot is due at last, whatever comes: no prompt
starves. And a new prompt waits behind at most one lot of a long one.

Beside decodes, which wait for the step's end, a step takes what `Pace` allows. Prompts that are computed
ahead make no step longer than `ahead_tokens`, because new requests wait for the step. Spare work
(`SPARE`) has steps of its own, where there is nothing else to run.

Where the tokens of a picture see each other (`RequestRun.whole`), no chunk ends inside of one. Then a
step takes more than it should, as far as it has room, or the picture waits for the next one.

A step costs O(log n) for each lot that it takes from. This file knows lengths, not pages or plans.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field
from itertools import count

from ramify.actors.scheduler.pace import Pace
from ramify.actors.scheduler.request import Level, RequestRun
from ramify.protocol.cluster import LOT
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import SPARE
from ramify.protocol.plan import ExecutorInfo

Chunk = tuple[RequestRun, int, int]  # positions [start, end) of its prompt


@dataclass(slots=True, eq=False)
class _LevelQueue:
    """The prompts of one level."""

    # when its lot is due, its place
    heap: list[tuple[int, int, RequestRun]] = field(default_factory=list)
    live: int = 0
    weight: int = 0  # tokens, of each prompt at most `PromptQueue.enough`


class PromptQueue:
    """The prompts of all levels; see the module's docstring."""

    def __init__(self, info: ExecutorInfo, config: ScheduleConfig, pace: Pace) -> None:
        self._step = info.step_tokens
        self._least = info.step_tokens // 4 if info.device == "cpu" else 0  # of `lacking`
        self._pace = pace
        self._ahead = min(config.ahead_tokens, info.step_tokens)
        self._steps = config.in_flight + 1
        # Tokens of a prompt that matter to whether more should be admitted: long ones, of which a
        # step takes a part only, must not keep short ones out.
        self.enough = max(64, info.step_tokens // 32)
        self._lines: dict[Level, _LevelQueue] = {}
        self.order: list[Level] = []  # levels that have prompts, from the lowest to the highest
        self._now = 0  # virtual time: when the lot in work was begun
        self._places = count(1)
        self._long = 0  # prompts that take several of the largest steps
        self.long_awaited = 0  # those of them that are not computed ahead

    def __len__(self) -> int:
        return sum(line.live for line in self._lines.values())

    def add(self, run: RequestRun) -> None:
        account = run.account
        self._count_long(run, 1)
        account.prefilling += 1
        account.tenant.prefilling += account.prefilling == 1
        self._enter(run, self._next_lot(run))

    def forget(self, run: RequestRun) -> None:
        """Remove `run`, which has ended. The unused part of its lot goes back to its session."""
        if run.place:
            self._leave(run)
            account = run.account
            account.due -= run.lot * account.tenant.prefilling
            self._done(run)

    def hurry(self, run: RequestRun, level: Level) -> None:
        """Raise `run` to `level`: a request of that level waits for it."""
        if run.place and level > run.level:
            self._leave(run)
            self._count_long(run, -1)
            run.ahead = not level[0]
            self._count_long(run, 1)
            run.priority = level[1]
            run.turn = min(run.turn, self._now)
            self._enter(run, run.turn + run.lot)

    def lacking(self, level: Level, decodes: int) -> int:
        """Tokens of `level` that the steps in flight and one more could take beyond the prompts queued
        here.

        Each queued prompt counts with at most `enough` tokens. On a CPU, where steps take few tokens, a
        quarter of the largest step counts: otherwise a few long prompts would keep out short ones.
        """
        room = max(self._room(decodes), self._least) if level[0] else self._ahead
        first = (self._lines[each].weight for each in self.order if each >= level)
        if not level[0]:
            first = (self._lines[each].weight for each in self.order if not each[0])
        return self._steps * room - sum(first)

    def take(self, decodes: int, lines: int | None = None) -> list[Chunk]:
        """Chunks for the next step, beside `decodes` decodes.

        `lines`: decodes with all that constraints may force behind them. Most of those lines come to
        nothing, so they take room in the step but no time from prompts.
        """
        if not self.order:
            return []
        left = self._room(decodes)
        if lines is not None and decodes:
            left = min(left, self._step - lines)
        ahead, most = min(left, self._ahead), self._step - max(decodes, lines or 0)
        begun: dict[RequestRun, int] = {}
        for level in self.order[::-1]:
            if level[1] == SPARE and (decodes or begun):
                break
            room = left if level[0] else min(left, ahead)
            taken = self._fill(level, begun, room, most)
            left -= taken
            ahead -= taken
        return [(run, start, run.filled) for run, start in begun.items() if start < run.filled]

    def _room(self, decodes: int) -> int:
        if not decodes:
            return self._pace.alone(self._long > 0)
        return min(self._pace.beside(decodes), self._step - decodes)

    def _fill(self, level: Level, begun: dict[RequestRun, int], room: int, most: int) -> int:
        """Take what costs `room` tokens of `level`; note where each chunk begins. Returns the cost.

        `most`: tokens of all chunks.
        """
        line, left = self._lines[level], room
        heap = line.heap
        # a row has one chunk in a step: theirs ends at a cut
        stopped: list[tuple[int, int, RequestRun]] = []
        while left > 0 and line.live > len(stopped):
            self._clean(line)
            run = heap[0][2]
            self._now = max(self._now, run.turn)
            begun.setdefault(run, run.filled)
            size = min(left, run.lot, run.cut - run.filled)
            cost = self._pace.work(run, run.filled, run.filled + size)
            if cost > left:  # it is scored; about as many tokens as cost what is left
                size = max(1, size * left // cost)
                cost = min(left, self._pace.work(run, run.filled, run.filled + size))
            if run.whole:
                taken = sum(each.filled - start for each, start in begun.items())
                size = self._unbroken(run, size, most - taken)
                if not size:
                    stopped.append(heapq.heappop(heap))
                    continue
                cost = self._pace.work(run, run.filled, run.filled + size)
            left_over = run.prompt - run.filled
            run.filled += size
            run.lot -= size
            line.weight += min(self.enough, left_over - size) - min(self.enough, left_over)
            left -= cost
            if run.filled == run.prompt:
                self._leave(run)
                self._done(run)
            elif run.filled == run.cut:
                entry = heapq.heappop(heap)
                if not run.lot:
                    run.place = next(self._places)
                    entry = self._next_lot(run), run.place, run
                stopped.append(entry)
            elif not run.lot:
                run.place = next(self._places)
                heapq.heapreplace(heap, (self._next_lot(run), run.place, run))
        for entry in stopped:
            heapq.heappush(heap, entry)
        return room - left

    @staticmethod
    def _unbroken(run: RequestRun, size: int, most: int) -> int:
        """How many tokens `run` takes instead of `size`, so that they end inside of no picture.

        0: the step has not the room for it, of `most` tokens.
        """
        end = run.filled + size
        inside = next((each for each in run.whole if each.start < end < each.stop), None)
        if inside is None:
            return size
        if run.filled < inside.start:
            return inside.start - run.filled
        size = inside.stop - run.filled
        if size > most:
            return 0
        if size > run.lot:
            run.account.due += (size - run.lot) * run.account.tenant.prefilling
            run.lot = size
        return size

    def _next_lot(self, run: RequestRun) -> int:
        """Begin the next lot of `run`; returns when it is due.

        The sessions of a tenant share its part: each one's time goes as many times faster.
        """
        account = run.account
        run.lot = min(LOT, run.prompt - run.filled)
        run.turn = max(self._now, account.due)
        account.due = run.turn + run.lot * account.tenant.prefilling
        return account.due

    def _enter(self, run: RequestRun, due: int) -> None:
        line = self._lines.setdefault(run.level, _LevelQueue())
        if not line.live:
            insort(self.order, run.level)
        line.live += 1
        line.weight += min(self.enough, run.prompt - run.filled)
        run.place = next(self._places)
        heapq.heappush(line.heap, (due, run.place, run))

    def _leave(self, run: RequestRun) -> None:
        line = self._lines[run.level]
        run.place = 0
        line.live -= 1
        line.weight -= min(self.enough, run.prompt - run.filled)
        if not line.live:
            line.heap.clear()
            self.order.remove(run.level)
        elif len(line.heap) > 32 and len(line.heap) > 2 * line.live:  # amortised O(1)
            line.heap[:] = [entry for entry in line.heap if entry[1] == entry[2].place]
            heapq.heapify(line.heap)

    def _count_long(self, run: RequestRun, more: int) -> None:
        if run.prompt - run.cached > self._step:
            self._long += more
            self.long_awaited += 0 if run.ahead else more

    def _done(self, run: RequestRun) -> None:
        account = run.account
        self._count_long(run, -1)
        account.prefilling -= 1
        account.tenant.prefilling -= not account.prefilling

    @staticmethod
    def _clean(line: _LevelQueue) -> None:
        """Forget entries of runs that left or moved. There must be a live one."""
        heap = line.heap
        while heap[0][1] != heap[0][2].place:
            heapq.heappop(heap)
