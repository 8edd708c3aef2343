"""Which keys of a draft model there are, where the host launches steps before it knows how far rows got.

How far a row got only the device knows, but not how much it lacks: after a step in which the row was
drafted, all keys but those of its last two tokens are there, whatever was accepted; each step without
drafts adds what it ran. So `missing` counts from the end, and is never too small.

Which slots hold keys of what their owner holds now is kept as well: so a new row finds what another one
left for the same prefix, and of rows that begin together one computes what they share. A slot is
forgotten when its page goes to a row.

Host side, numpy only; knows neither the model nor what is launched.
"""

from dataclasses import dataclass, field

import numpy as np

from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows, within
from ramify.protocol.plan import OpenRow

CATCH_UP = 2048  # tokens in a step at most that are computed before guessing
SHORT = 4  # tokens at most that are computed together with a row's last one

_NONE: Ints = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Guessing:
    """What the draft model runs for a step, G rows of it, those with most drafts first."""

    which: Ints = field(default_factory=_NONE.copy)  # [G] of the plan's decodes
    rows: Ints = field(default_factory=_NONE.copy)  # [G]
    most: Ints = field(default_factory=_NONE.copy)  # [G] drafts
    missing: Ints = field(default_factory=_NONE.copy)  # [G] tokens that run ahead of the last one
    # [C] rows that catch up before, from positions `starts` on by `counts`
    behind: Ints = field(default_factory=_NONE.copy)
    starts: Ints = field(default_factory=_NONE.copy)
    counts: Ints = field(default_factory=_NONE.copy)


class DraftKeys:
    """Of the rows in `table`, up to position `context`.

    A step guesses for at most `most_lines` tokens, those that rows lack included.
    """

    def __init__(self, table: RowTable, context: int, most_lines: int) -> None:
        rows = len(table.requests)
        self._table, self._context, self._most_lines = table, context, most_lines
        self._fresh = np.zeros(table.pool_pages * table.page_size, dtype=np.bool_)
        # tokens ahead of the last one, the last of them, whose keys may not be there
        self.missing: Ints = np.zeros(rows, dtype=np.int64)
        self._marked: Ints = np.zeros(rows, dtype=np.int64)  # slots of earlier positions are fresh

    def opened(self, opens: list[OpenRow]) -> None:
        """Rows began, and rows got pages: `table.updates`."""
        table, size = self._table, self._table.page_size
        for opened in opens:
            whole = opened.cached - opened.cached % size
            copied = table.slots(opened.row, whole, opened.cached)
            self._fresh[copied] = False  # the model's keys only: see `StepPlan.copies`
            fresh = self._fresh[table.slots(opened.row, 0, opened.cached)]
            known = _leading(fresh)
            self._marked[opened.row] = known
            self.missing[opened.row] = opened.cached - known
        if not table.updates:
            return
        rows, first, last = np.array(table.updates, dtype=np.int64).T
        for opened in opens:
            if opened.cached % size:  # the rest of a page that holds a part of what was cached
                end = -(-opened.cached // size) * size
                self._fresh[table.slots(opened.row, opened.cached, end)] = False
            of_row = (rows == opened.row) & (first == 0)
            first[of_row] = np.minimum(-(-opened.cached // size), last[of_row])
        counts = last - first
        pages = table.pages[np.repeat(rows, counts), np.repeat(first, counts) + within(counts)]
        self._fresh.reshape(-1, size)[pages] = False

    def ran(self, rows: Ints, tokens: Ints | int) -> None:
        """Each of `rows` ran at most so many tokens without the draft model. Each stands there once."""
        self.missing[rows] += tokens

    def guess(self, rows: Ints, most: Ints, lasts: Ints, unsettled: Ints) -> Guessing:
        """Which of the decodes `rows` [D] get drafts, up to `most` [D], and what is computed for them.

        `lasts`: the position of each one's last token, were all drafts in flight accepted; `unsettled`
        are in flight. Counts what the step runs.
        """
        most = np.clip(np.minimum(most, self._context - lasts), 0, None)
        asked = np.flatnonzero(most > 0)
        asked = asked[np.argsort(-most[asked], kind="stable")]
        found = Guessing()
        long = asked[(self.missing[rows[asked]] > SHORT) & (unsettled[asked] == 0)]
        if len(long):
            found.behind, found.starts, found.counts = self._catch_up(rows[long], lasts[long])
        missing = self.missing[rows[asked]]
        there = (missing <= SHORT) & (missing <= (lasts - unsettled)[asked])
        asked, missing = asked[there], missing[there]
        fits = np.cumsum(1 + missing) <= self._most_lines
        asked, found.missing = asked[fits], missing[fits]
        found.which, found.rows, found.most = asked, rows[asked], most[asked]
        self.missing[rows] += 1
        self.missing[found.rows] = 1
        # of these the host knows that they are output, and where
        starts, ends = self._marked[found.rows], (lasts - unsettled)[asked]
        counts = np.maximum(ends - starts, 0)
        self._mark(found.rows, starts, counts)
        self._marked[found.rows] = starts + counts
        return found

    def _catch_up(self, rows: Ints, lasts: Ints) -> tuple[Ints, Ints, Ints]:
        """Rows that lack much, nothing of them in flight: [C] rows, starts, counts."""
        found: list[tuple[int, int, int]] = []
        left = CATCH_UP
        for row, last in zip(rows.tolist(), lasts.tolist(), strict=True):
            start = max(0, last - int(self.missing[row]))
            start += _leading(self._fresh[self._table.slots(row, start, last)])
            count = max(0, min(last - 1 - start, left))
            if last - start > SHORT and count:
                left -= count
                self._mark(np.array([row]), np.array([start]), np.array([count]))
                found.append((row, start, count))
                start += count
            self.missing[row] = last - start
            self._marked[row] = max(int(self._marked[row]), start)
        if not found:
            return _NONE, _NONE, _NONE
        behind, starts, counts = np.array(found, dtype=np.int64).T
        return behind, starts, counts

    def _mark(self, rows: Ints, starts: Ints, counts: Ints) -> None:
        positions = np.repeat(starts, counts) + within(counts)
        self._fresh[self._table.slots_at(np.repeat(rows, counts), positions)] = True


def first_lines(guessing: Guessing, lasts: Ints) -> StepRows:
    """The lines that end in each row's last token, at `lasts` [G]: what it lacks, then that token."""
    lines = 1 + guessing.missing
    index = np.arange(int(lines.sum()))
    return StepRows(
        rows=np.repeat(guessing.rows, lines),
        starts=np.repeat(lasts - guessing.missing, lines) + within(lines),
        counts=np.ones(len(index), dtype=np.int64),
        extends=0,
        tokens=np.empty(0, dtype=np.int32),
        sampling=index,
        draws=index,
        lines=lines,
    )


def _leading(fresh: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> int:
    """How many are true before the first that is not."""
    return len(fresh) if fresh.all() else int(np.argmin(fresh))
