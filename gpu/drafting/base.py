"""The interface of drafters, which guess the next tokens of rows, cheaply, ahead of each step.

A drafter never changes what is sampled: a wrong guess costs time alone. So it may forget, stop guessing,
or guess fewer tokens than it is asked for, whenever that is cheaper. Called by the executor's thread
only, in the order of the plans:

    close, open -> propose, continued -> runs -> [the model runs the step, drafts included] -> observe

Executors know drafts by one contract: `drafts.begin(plan)` applies a plan to the row table and returns
the step that runs, with the drafts that were found and without rows whose constraints are not ready. Two
classes implement it. Where a step is over before the next one is planned, as on a CPU, it is
`host.HostDrafts`: its `Drafter` gets the tokens that were sampled and returns tokens. A GPU has two
steps in flight, whose tokens the host does not know. So in `device_drafts.DeviceDrafts` a
`device.DeviceDrafter` says ahead of a step only which rows it can guess for, and launches kernels that
read and write tokens on the device. Both lay drafts out as `StepRows` and take refused ones back by
`RowTable.settle`, by one rule (`sampling.acceptance`).

`ngram`, `model` and `mtp` implement `Drafter`. The last one also gets the model's stream after the last
norm, from the executor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ramify.gpu.step.step_rows import Ints, StepRows, Tokens
from ramify.protocol.plan import OpenRow


@dataclass(slots=True)
class Guesses:
    """Guessed tokens: `counts` [R] for each row, `tokens` [sum(counts)] row by row.

    `late`: the thread's seconds for computing what the drafter had missed of rows, once for each.
    """

    counts: Ints
    tokens: Tokens
    late: float = 0.0


def no_guesses(rows: int, late: float = 0.0) -> Guesses:
    """Make empty guesses for so many rows."""
    return Guesses(np.zeros(rows, dtype=np.int64), np.empty(0, dtype=np.int32), late)


class Drafter(Protocol):
    """Interface: guesses for the rows of one executor."""

    def open(self, opened: OpenRow) -> None:
        """Begin a request in a row; `opened.history` has its tokens, those that will run included."""
        ...

    def close(self, row: int) -> None:
        """Forget the row."""
        ...

    def propose(self, rows: Ints, most: Ints) -> Guesses:
        """Guess up to `most` [R] tokens that may follow each row's last one.

        The rows' pages hold the drafts. Each row was open and has sampled.
        """
        ...

    def continued(self, row: int, behind: Sequence[int], most: int) -> Sequence[int]:
        """Guess up to `most` tokens after the row's tokens and the drafts `behind` them.

        Empty where a guess would have to be computed.
        """
        ...

    def runs(self, step: StepRows) -> None:
        """Note the step that the model is going to run, drafts included."""
        ...

    def observe(self, rows: Ints, counts: Ints, tokens: Tokens) -> None:
        """Take over what `rows` [R] sampled: `counts` [R] tokens each, row by row.

        Of a row's tokens all but the last are accepted drafts. NO_TOKEN: its logits were not finite.
        """
        ...
