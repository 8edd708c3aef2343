"""A step that runs on the device, and its result on the host.

Results arrive in an entry of a ring of pinned memory, which a later step uses again: `settle` copies
them out. This file knows neither the model nor how the step was launched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ramify.gpu.executors.base import bad_logits
from ramify.gpu.kv.cuda_blocks import Loaded
from ramify.gpu.sampling.acceptance import AcceptedTokens, packed_rows
from ramify.gpu.sampling.cuda_sampler import token_logprobs
from ramify.gpu.sampling.triton_logprobs import WORDS
from ramify.gpu.step.rows import Ints, StepRows
from ramify.gpu.step.staging import Int32s, StepClock
from ramify.protocol.plan import STUCK, StepResult, pack


@dataclass(slots=True)
class DraftedLines:
    """The drafts of a step: its S lines by the R rows that sample, and which of them are output.

    The lines of a row follow each other, and the first ones are output.
    """

    lines: Ints  # [R] 1 + drafts
    kept: Int32s  # [>= S] 1 or 0, of the ring entry
    settled: Callable[[Ints], None]  # is told how many drafts of each row were refused

    @property
    def firsts(self) -> Ints:
        """Each row's first line: [R]."""
        return np.cumsum(self.lines) - self.lines


@dataclass(slots=True)
class Obeyed:
    """The constraints of a step's S lines."""

    lines: Ints  # which have one
    forced: Int32s  # [>= S] 1 where one token only was legal, of the ring entry
    settled: Callable[[Int32s, Int32s | None], None]  # is told the tokens, and which of them are output
    stuck: dict[int, str]  # lines on which nothing is legal, ascending, and why

    def told(self, tokens: Int32s) -> Int32s:
        """Return `tokens` with STUCK where there is none because the constraint allows none."""
        if not self.stuck:
            return tokens
        tokens, lines = tokens.copy(), np.array(list(self.stuck))
        tokens[lines[tokens[lines] < 0]] = STUCK
        return tokens


@dataclass(slots=True)
class LaunchedStep:
    """A step under way: what it was launched with, and where its results arrive."""

    number: int
    step: StepRows
    requests: Ints  # of all rows, when it was launched
    clock: StepClock
    asked: Ints  # [S] how many log-probabilities, 0: none
    scored: Ints  # rows of the scores: `Scored.owners`
    # both of the ring entry: good once the step is over
    tokens: Int32s  # [>= S]
    more: Int32s | None  # lines of `logprobs_into`, of the rows that asked; then float32[K] scores
    drafted: DraftedLines | None = None
    constrained: "Obeyed | None" = None
    lost: Loaded | None = None
    _elapsed_us: int | None = None
    _late_us: int = 0
    _moved_us: int = 0

    def ready(self) -> bool:
        return self._elapsed_us is not None or self.clock.ready()

    def settle(self) -> int:
        """Wait for the step and copy its results out of the ring entry. Returns its microseconds."""
        if self._elapsed_us is None:
            self.clock.wait()
            self.tokens = self.tokens[: len(self.asked)].copy()
            self.more = None if self.more is None else self.more.copy()
            self._elapsed_us, self._late_us = self.clock.elapsed_us(), self.clock.part_us()
            self._moved_us = self.clock.moved_us()
            drafted = self.drafted
            if drafted is not None:
                drafted.kept = drafted.kept[: len(self.asked)].copy()
                drafted.settled(drafted.lines - np.add.reduceat(drafted.kept, drafted.firsts))
            if self.constrained is not None:
                self.constrained.forced = self.constrained.forced[: len(self.asked)].copy()
                self.constrained.settled(self.tokens, None if drafted is None else drafted.kept)
        return self._elapsed_us

    def _reasons(self) -> list[str]:
        """List why rows are stuck, in the order of their tokens."""
        if self.constrained is None:
            return []
        found = self.constrained.stuck.items()
        kept = None if self.drafted is None else self.drafted.kept
        return [why for line, why in found if self.tokens[line] < 0 and (kept is None or kept[line] > 0)]

    def result(self) -> StepResult:
        elapsed_us = self.settle()
        more = np.empty(0, dtype=np.int32) if self.more is None else self.more
        words, scores = np.split(more, [len(more) - len(self.scored)])
        words, tokens, asked = words.reshape(-1, WORDS), self.tokens, self.asked
        each = np.ones(len(tokens), dtype=np.int64)
        forced = np.zeros(len(tokens), dtype=np.uint8)
        if self.constrained is not None:
            own = self.constrained.lines
            forced[own] = self.constrained.forced[own]
            tokens = self.constrained.told(tokens)
        kept = np.ones(len(tokens), dtype=np.bool_)
        if self.drafted is not None:
            kept = self.drafted.kept > 0
            each = np.add.reduceat(kept, self.drafted.firsts, dtype=np.int64)
            if len(words):
                words = words[kept[asked > 0]]
            tokens, asked, forced = tokens[kept], asked[kept], forced[kept]
        lost, beside_us = (list[int](), 0) if self.lost is None else self.lost()
        result = StepResult(
            step=self.number,
            tokens=tokens.tobytes(),
            computed=self.step.computed,
            elapsed_us=elapsed_us,
            late_us=self._late_us,
            lost=pack(lost) if lost else b"",
            load_us=self._moved_us + beside_us,
            logprobs=token_logprobs(words, asked) if len(words) else [],
            scores=scores.tobytes(),
            forced=forced.tobytes() if forced.any() else b"",
            reasons=self._reasons(),
            **packed_rows(self.step, AcceptedTokens(kept, each)),
        )
        bad = bad_logits(self.step, self.requests, result)
        if bad is not None:
            raise bad
        return result
