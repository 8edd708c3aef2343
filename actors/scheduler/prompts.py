"""Prompts of running requests that are not computed yet, and how much of them the next step takes.

Two queues. First those with output: somebody waits for their first token, so a step takes as many
of their tokens as pay, fewer beside decodes, which wait for the step's end. Behind them what is
computed ahead of a generation (a request without output): nobody waits for it, but whatever comes
meanwhile waits for the step, so it never makes a step longer than `ahead_tokens`. A generation
that finds its prompt in the second queue brings it into the first (`hurry`).

This file knows lengths, not pages, plans or time.
"""

from collections import OrderedDict

from ramify.actors.scheduler.request import Run
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.plan import ExecutorInfo

Chunk = tuple[Run, int, int]  # positions [start, end) of its prompt


class Prompts:
    """See the module's top."""

    def __init__(self, info: ExecutorInfo, config: ScheduleConfig) -> None:
        self._step = info.step_tokens
        self._mixed = min(config.mixed_tokens, info.step_tokens)
        self._ahead = min(config.ahead_tokens, info.step_tokens)
        self._steps = config.in_flight + 1
        # By `Run.ahead`. A queue that somebody can leave from the middle, from its front in O(1).
        self._queues: tuple[OrderedDict[Run, None], ...] = OrderedDict(), OrderedDict()
        self._tokens = [0, 0]  # of each queue, not planned yet

    def add(self, run: Run) -> None:
        self._queues[run.ahead][run] = None
        self._tokens[run.ahead] += run.prompt - run.filled

    def forget(self, run: Run) -> None:
        """`run` has ended."""
        self._queues[run.ahead].pop(run, None)
        self._tokens[run.ahead] -= run.prompt - run.filled

    def hurry(self, run: Run) -> None:
        """Somebody waits for `run` now."""
        if run.ahead and run.filled < run.prompt:
            self.forget(run)
            run.ahead = False
            self.add(run)

    def lacking(self, decodes: int) -> tuple[int, int]:
        """Tokens of the two queues that the steps in flight and one more could take, besides those
        that are here.
        """
        most = self._steps * self._room(decodes), self._steps * self._ahead
        return most[False] - self._tokens[False], most[True] - self._tokens[True]

    def take(self, decodes: int) -> list[Chunk]:
        """What the next step runs beside so many decodes."""
        room = self._room(decodes)
        chunks: list[Chunk] = []
        taken = self._fill(chunks, room, ahead=False)
        self._fill(chunks, min(room, self._ahead) - taken, ahead=True)
        return chunks

    def _room(self, decodes: int) -> int:
        return min(self._mixed, self._step - decodes) if decodes else self._step

    def _fill(self, chunks: list[Chunk], room: int, *, ahead: bool) -> int:
        """Returns how many tokens were taken."""
        queue, left = self._queues[ahead], room
        while left > 0 and queue:
            run = next(iter(queue))
            start = run.filled
            end = run.filled = min(run.prompt, start + left)
            chunks.append((run, start, end))
            left -= end - start
            self._tokens[ahead] -= end - start
            if end == run.prompt:
                del queue[run]
        return room - left
