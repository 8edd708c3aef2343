"""The draft model on the CPU's kernels: all tokens of a guess in one run of one recording.

Its walk over the layers is recorded once for each token of a guess, with inputs of its own: what one
walk samples lies where the next one reads its input. Positions, slots and tiles of all of
them are known before the first one runs, so Python is called once, not once a token.
"""

from itertools import pairwise

import numpy as np

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.native.threads import Crew, Instruction, Recording
from ramify.gpu.ops.cpu_ops import CpuOps, Draws, empty_step, no_step
from ramify.gpu.step.cpu_inputs import CpuInputs
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows


class CpuRunner:
    """Records `model` on `ops`, up to `most` tokens a guess; `max_rows`: of the table."""

    def __init__(
        self, model: Decoder, ops: CpuOps, crew: Crew, table: RowTable, most: int, max_rows: int
    ) -> None:
        self._ops, self._crew = ops, crew
        config = model.config
        # the last one is never run: its ids are the last tokens of the longest guesses
        steps = [ops.step, *(empty_step(max_rows) for _ in range(most))]
        self._steps = steps
        self._inputs = [CpuInputs(own, table, config.heads // config.kv_heads) for own in steps]
        for own in steps[1:]:
            own.lines[:] = np.arange(max_rows)
        logits = ops.logits(max_rows, config.vocab_size)
        greedy, unused = np.zeros(max_rows, dtype=np.float32), np.zeros(max_rows)
        walks: list[Instruction] = []
        self._chains: list[Recording] = []  # for guesses of 0, 1, .. tokens
        for own, following in pairwise(steps):
            ops.step = own
            stream = model.forward(no_step(), ops)
            if not walks:
                self._chains.append(Recording(ops.instructions))
            model.logits(stream, None, ops, logits)
            # garbage, not NO_TOKEN, where logits are not finite: the next walk looks it up
            choose = ops.choose(logits, Draws(greedy, unused, following.ids), bad=0)
            walks += [*ops.instructions, choose]
            self._chains.append(Recording(walks))
        self._last: Ints = np.zeros(max_rows, dtype=np.int64)  # never read: all is given

    def run(self, step: StepRows, most: Ints) -> Ints:
        self._inputs[0].lay(step, self._last)
        longest = int(most[0]) if len(most) else 0
        furthest = self._inputs[0].furthest
        if longest > 1:
            rows = step.rows[step.sampling]
            ends = (step.starts + step.counts)[step.sampling]
            for j in range(1, longest):
                count = int(np.count_nonzero(most > j))
                self._inputs[j].lay_decodes(rows[:count], ends[:count] + (j - 1))
            furthest = max(furthest, int(ends.max()) + longest - 2)
        self._ops.reach(furthest)
        self._crew.run(self._chains[longest])
        found = np.empty((len(most), longest), dtype=np.int64)
        for j in range(longest):
            found[:, j] = self._steps[j + 1].ids[: len(most)]
        return found
