"""The interface of executors, which run step plans for the executor actor.

`launch` starts a step; on a GPU it returns before the step is over, and `PendingStep.result` waits.
Plans run strictly in order. The next plan may be launched before the last result is read, because
sampled tokens stay with the executor as the next step's input. This file does not know models:
`torch_executor` and `cpu_executor` (both are a `HostExecutor`), `cuda_executor` and `fake` implement the
interface, `startup.load` makes one from a checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ramify.gpu.step.rows import Ints, StepRows
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, PicturesSeen, StepPlan, StepResult


class BadLogits(Exception):
    """Some rows' logits are NaN or infinite; the other rows' tokens are good.

    `rows` and `requests` name the bad ones. `result` is the whole step's result, with -1 for the bad
    rows' tokens and NaN for their scores. The executor can go on. The caller ends these requests, and
    must not reuse what their steps wrote into the KV pool.
    """

    def __init__(self, rows: list[int], requests: list[int], result: StepResult) -> None:
        super().__init__(
            f"step {result.step}: the logits of request(s) {requests} (rows {rows}) are not finite; "
            "if it happens often, try --dtype float32"
        )
        self.rows = rows
        self.requests = requests
        self.result = result


def bad_logits(step: StepRows, requests: Ints, result: StepResult) -> BadLogits | None:
    """Make the error that names the rows without a token or a score; None: there are none.

    `requests`: the request of every row.
    """
    sampling = np.frombuffer(result.rows, dtype=np.int32)
    if result.counts:  # tokens of each
        sampling = np.repeat(sampling, np.frombuffer(result.counts, dtype=np.int32))
    bad = sampling[np.frombuffer(result.tokens, dtype=np.int32) == NO_TOKEN]
    if step.scored is not None:
        scores = np.frombuffer(result.scores, dtype=np.float32)
        bad = np.concatenate([bad, np.unique(step.scored.owners[np.isnan(scores)])])
    if not len(bad):
        return None
    return BadLogits(bad.tolist(), requests[bad].tolist(), result)


@dataclass(slots=True)
class Counters:
    """Counts of an executor since its start."""

    steps: int = 0
    tokens: int = 0  # that went through the model

    def count(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens


class PendingStep(Protocol):
    """A step that was launched."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. Raises BadLogits."""
        ...


class PictureTower(Protocol):
    """The vision tower, which runs beside the steps. Used by the executor's thread."""

    @property
    def busy(self) -> bool:
        """Whether the tower runs, or `seen` has news."""
        ...

    def seen(self) -> PicturesSeen | None:
        """Report the pictures that were encoded or failed since the last call; None: nothing is new."""
        ...


class Executor(Protocol):
    """Interface: runs plans in order. Used by one thread."""

    info: ExecutorInfo
    counters: Counters

    @property
    def tower(self) -> PictureTower | None:
        """The vision tower; None: the model sees no pictures."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. Raises PlanError if the plan contradicts the rows."""
        ...

    def close(self) -> None:
        """Release memory and device, CUDA graphs at once. Idempotent. No other call may follow."""
        ...


class Follower(ABC):
    """Base of the ranks beside rank 0: each runs the steps of rank 0 on its part of the model."""

    info: ExecutorInfo
    counters: Counters

    @abstractmethod
    def follow(self, idle: Callable[[], None]) -> None:
        """Run steps until rank 0 ends. `idle` is called once a second while there is nothing to do."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and device. Idempotent."""
