"""The host's account of a draft model's keys, kept before it knows how many drafts were accepted.

Only the device knows how far a row got, but the host knows how much its keys lack: after a step in which
the row was drafted, all keys but those of its last two tokens are there, whatever was accepted; each
step without drafts adds what it ran. So `missing` counts from the end, and is never too small.

The account also has the slots whose keys fit the tokens of their page's owner. So a new row finds the
keys of another one with the same prefix, and of rows that begin together one computes what they share. A
slot is forgotten when its page goes to a row.

Host side, numpy only; this file knows neither the model nor what is launched.
"""

from dataclasses import dataclass, field

import numpy as np

from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows, leading, within
from ramify.protocol.plan import OpenRow

CATCH_UP = 2048  # tokens in a step at most that are computed before guessing
SHORT = 4  # tokens at most that are computed together with a row's last one

_NONE: Ints = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Guessing:
    """The draft model's work for a step: G rows, those with most drafts first."""

    which: Ints = field(default_factory=_NONE.copy)  # [G] of the plan's decodes
    rows: Ints = field(default_factory=_NONE.copy)  # [G]
    most: Ints = field(default_factory=_NONE.copy)  # [G] drafts
    missing: Ints = field(default_factory=_NONE.copy)  # [G] tokens that run ahead of the last one
    # [C] rows that catch up before, from positions `starts` on by `counts`
    behind: Ints = field(default_factory=_NONE.copy)
    starts: Ints = field(default_factory=_NONE.copy)
    counts: Ints = field(default_factory=_NONE.copy)


class DraftKeys:
    """The draft model's keys of the rows in `table`, up to position `context`.

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
        """Note rows that began, and pages that rows got (`table.updates`)."""
        table, size = self._table, self._table.page_size
        for opened in opens:
            whole = opened.cached - opened.cached % size
            copied = table.slots(opened.row, whole, opened.cached)
            self._fresh[copied] = False  # the model's keys only: see `StepPlan.copies`
            fresh = self._fresh[table.slots(opened.row, 0, opened.cached)]
            known = leading(fresh)
            self._marked[opened.row] = known
            self.missing[opened.row] = opened.cached - known
        if not table.updates:
            return
        rows, first, last = np.array(table.updates, dtype=np.int64).T
        for opened in opens:
            if opened.cached % size:  # the rest of a page that has some of the cached tokens
                end = -(-opened.cached // size) * size
                self._fresh[table.slots(opened.row, opened.cached, end)] = False
            of_row = (rows == opened.row) & (first == 0)
            first[of_row] = np.minimum(-(-opened.cached // size), last[of_row])
        counts = last - first
        pages = table.pages[np.repeat(rows, counts), np.repeat(first, counts) + within(counts)]
        self._fresh.reshape(-1, size)[pages] = False

    def ran(self, rows: Ints, tokens: Ints | int) -> None:
        """Note that each of `rows`, which are distinct, ran at most `tokens` without the draft model."""
        self.missing[rows] += tokens

    def guess(self, rows: Ints, most: Ints, lasts: Ints, unsettled: Ints) -> Guessing:
        """Choose which of the decodes `rows` [D] get drafts, up to `most` [D], and what that takes.

        `lasts` [D]: the position of each one's last token, were all drafts in flight accepted;
        `unsettled` [D]: how many drafts are in flight. Counts what the step runs.
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
        """Choose what to compute of `rows` that lack much and have no drafts in flight.

        Returns rows, starts and counts, [C] each.
        """
        found: list[tuple[int, int, int]] = []
        left = CATCH_UP
        for row, last in zip(rows.tolist(), lasts.tolist(), strict=True):
            start = max(0, last - int(self.missing[row]))
            start += leading(self._fresh[self._table.slots(row, start, last)])
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
    """Make the lines of a first pass: each row's missing tokens, then its last one, at `lasts` [G]."""
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
