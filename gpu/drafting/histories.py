"""The tokens of each open row, from the first of its branch, for drafters on the host.

Four bytes a token. A row whose beginning is not known has no history, and gets no guesses.
"""

import numpy as np

from ramify.gpu.step.step_rows import Ints, StepRows, Tokens

_ROOM = 64  # tokens beyond those known at first

_NOTHING = np.empty(0, dtype=np.int32)


class DraftHistories:
    """The histories of all rows. `lengths[row]`: known tokens; 0: none, or the row is closed."""

    def __init__(self, max_rows: int) -> None:
        self.lengths: Ints = np.zeros(max_rows, dtype=np.int64)
        self._tokens: list[Tokens] = [_NOTHING] * max_rows

    def open(self, row: int, history: bytes) -> None:
        """Begin a row. `history`: int32, every token before the next sampled one."""
        known = np.frombuffer(history, dtype=np.int32)
        self.lengths[row] = len(known)
        self._tokens[row] = np.concatenate([known, np.empty(_ROOM, dtype=np.int32)])

    def close(self, row: int) -> None:
        self.lengths[row] = 0
        self._tokens[row] = _NOTHING

    def of(self, row: int) -> Tokens:
        """Return the known tokens of a row, as a view."""
        return self._tokens[row][: self.lengths[row]]

    def runs(self, step: StepRows) -> list[int]:
        """Add forced tokens, which extends run beyond the known ones. Returns the rows of these."""
        if not step.extends:
            return []
        rows, counts = step.rows[: step.extends], step.counts[: step.extends]
        starts, known = step.starts[: step.extends], self.lengths[rows]
        found = np.flatnonzero((starts + counts > known) & (starts <= known))
        for at in found.tolist():
            begin = int(counts[:at].sum())
            self._write(int(rows[at]), int(starts[at]), step.tokens[begin : begin + int(counts[at])])
        forced: list[int] = rows[found].tolist()
        return forced

    def append(self, row: int, tokens: Tokens) -> None:
        """Add tokens that the row sampled."""
        if self.lengths[row]:
            self._write(row, int(self.lengths[row]), tokens)

    def _write(self, row: int, start: int, tokens: Tokens) -> None:
        kept, end = self._tokens[row], start + len(tokens)
        if end > len(kept):
            wider = np.empty(2 * end, dtype=np.int32)
            wider[:start] = kept[:start]
            self._tokens[row] = kept = wider
        kept[start:end] = tokens
        self.lengths[row] = end
