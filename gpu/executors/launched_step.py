"""A step that runs on the device, and what becomes of it on the host.

Its results lie in an entry of a ring of pinned memory, which a later step uses again: `settle` copies
them out. Knows neither the model nor how the step was launched.
"""

from dataclasses import dataclass

import numpy as np

from ramify.gpu.executors.base import BadLogits
from ramify.gpu.sampling.cuda_sampler import token_logprobs
from ramify.gpu.sampling.triton_logprobs import WORDS
from ramify.gpu.step.rows import Ints
from ramify.gpu.step.staging import Int32s, StepClock
from ramify.protocol.plan import StepResult


@dataclass(slots=True)
class LaunchedStep:
    """What a step was launched with, and where its results arrive."""

    number: int
    computed: int
    rows: Ints  # [S] that sample
    requests: dict[int, int]  # by row, of those that sample or score
    clock: StepClock
    asked: Ints  # [S] how many log-probabilities, 0: none
    scored: Ints  # [K] rows of the targets
    # both of the ring entry: good once the step is over
    tokens: Int32s  # [>= S]
    more: Int32s | None  # lines of `logprobs_into`, of the rows that asked; then float32[K] scores
    _elapsed_us: int | None = None

    def ready(self) -> bool:
        return self._elapsed_us is not None or self.clock.ready()

    def settle(self) -> int:
        """Wait for the step and copy its results out of the ring entry. Returns its microseconds."""
        if self._elapsed_us is None:
            self.clock.wait()
            self.tokens = self.tokens[: len(self.rows)].copy()
            self.more = None if self.more is None else self.more.copy()
            self._elapsed_us = self.clock.elapsed_us()
        return self._elapsed_us

    def result(self) -> StepResult:
        elapsed_us = self.settle()
        more = np.empty(0, dtype=np.int32) if self.more is None else self.more
        words, scores = np.split(more, [len(more) - len(self.scored)])
        result = StepResult(
            step=self.number,
            rows=self.rows.astype(np.int32).tobytes(),
            tokens=self.tokens.tobytes(),
            computed=self.computed,
            elapsed_us=elapsed_us,
            logprobs=token_logprobs(words.reshape(-1, WORDS), self.asked) if len(words) else [],
            scores=scores.tobytes(),
        )
        unscored = np.unique(self.scored[np.isnan(scores.view(np.float32))])
        bad = np.concatenate([self.rows[self.tokens < 0], unscored])
        if len(bad):
            raise BadLogits(bad.tolist(), [self.requests[row] for row in bad.tolist()], result)
        return result
