"""How many tokens to draft for each row, so that a step gives most tokens a second. Pure.

A draft is a line more in a step. It pays by the chance that it is accepted, and costs what the step
lasts longer. Both are measured, nothing is assumed of the model, the drafter or the machine:

- *Acceptance* of each row: of the drafts that were reached (those behind a refused one say nothing),
  how many were accepted, lately. A row of which little is known is taken to be like the average.
- *Step times*: of steps without drafts by their rows; of steps with drafts, in relation to those, by
  rows, lines and depth (the most drafts of a row: a model that drafts runs so often). What was never
  measured is taken to cost no more than what was, but is approached in steps.

With p the acceptance of a row, its draft number j is accepted with chance p^j. So the best choice for a
batch is a threshold and a depth: draft j of a row is worth its line if p^j is at least the threshold.
Some pairs are compared by (rows + expected accepted drafts) / expected time, and with no drafts at all
(as the goodput of Liu et al. 2024, "Optimizing speculative decoding for serving large language models").

Never slower than without: a *bank* holds the time that drafts have saved, or lost, against the same
tokens without them, with a small income of each step's time (`INCOME`). It holds a few steps at most.
While it is empty nothing is drafted. So whatever is wrong with the estimates, drafts cost `INCOME`
of the time, and a few steps. Rows that are not worth a draft are probed with one, each time later.

This file knows rows, lines and seconds, not runs, plans or tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import log

INCOME = 0.006  # of all time: what trying out may cost
BANK, BEGIN = 2.5, 2.0  # steps that the bank holds at most, and at the start
WORTH = 1.02  # times as many tokens a second that drafts have to promise
FIRST = 0.25  # lines more for each row that are tried first; then twice as many as were measured
EVERY = 8  # steps that a choice holds while the batch is the same
REFRESH = 96  # steps until steps without drafts are measured anew, while there are drafts
PRIOR = 4.0  # drafts of the average that a row begins with
KEPT, KEPT_ALL = 0.97, 0.995  # of what was known of a row, of the average, at a draft
FORGET = 256  # steps without a draft, until half of what was known of a row is forgotten
SHORTEST_WAIT, LONGEST_WAIT = 8, 256  # most steps between two probes of a row: by what they cost
CLIP = 3.0  # a line counts as at most so many times one without drafts: the rest is the machine's
_LEVELS = 20  # of acceptance
_THRESHOLDS = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05, 0.02)
_MEASURED = 32  # step times that are kept for a number of rows
_FRESH = 1 / 6  # weight of a new measurement


class Record:
    """How the drafts of one row did, the older ones counting less."""

    __slots__ = ("accepted", "probe_at", "reached", "seen", "wait")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.reached = 0.0
        self.seen = 0  # the step of its last draft
        self.probe_at = 0  # the step of its next probe
        self.wait = 1  # steps to the one after that


class _Mean:
    """Of some measurements, the newest counting most. `lines`: for each row; in all with `depth` 0."""

    __slots__ = ("at", "count", "depth", "lines", "value")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.lines = self.value = 0.0
        self.count = 0
        self.at = 0  # step of the last one, or of the last that is on its way

    def add(self, lines: float, value: float) -> None:
        self.count += 1
        weight = max(_FRESH, 1 / self.count)
        if self.count > 3:
            value = min(value, 2 * self.value)
        self.lines += weight * (lines - self.lines)
        self.value += weight * (value - self.value)


_Times = dict[tuple[int, int], _Mean]  # by depth, and `_bucket` of lines


class Speculation:
    """`most`: drafts that a row may have in a step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 0
        self._chosen_at = -EVERY
        self._drafts: list[int] | None = None
        self._accepted, self._reached = 0.5 * PRIOR, PRIOR  # of all rows
        self._given, self._asked = 1.0, 1.0  # drafts that the drafter gave, of those that were asked for
        self._alone: dict[int, _Mean] = {}  # seconds of steps without drafts, by `_bucket` of rows
        self._with: dict[int, _Times] = {}  # times as long with drafts, by `_bucket` of rows
        self._bank = BEGIN  # in steps without drafts
        self.measuring = False  # the next step has to be one without drafts, to show how long it takes
        depths = [depth for depth in range(1, most + 1) if depth < 5 or depth % 2 == 0 or depth == most]
        self._tables = [
            (depth, *_table(threshold, depth)) for depth in depths for threshold in _THRESHOLDS
        ]

    @property
    def acceptance(self) -> float:
        """Of the drafts that were reached lately, the part that was accepted."""
        return self._accepted / self._reached

    def choose(self, records: Sequence[Record], room: int, *, changed: bool) -> list[int] | None:
        """Drafts for each row of the next step, at most `room` in all; None: for no row.

        `changed`: they are not the rows of the last call. Called once for each step with decodes.
        """
        self._step += 1
        rows = len(records)
        self.measuring = self._measures(rows)
        if self._bank <= 0 or room <= 0 or self.measuring:
            self._chosen_at = -EVERY
            return None
        if changed or self._step - self._chosen_at >= EVERY:
            self._chosen_at = self._step
            self._drafts = self._choose(records, room)
        drafts = self._probe(records, self._drafts, room)
        if drafts is None or sum(drafts) <= room:
            return drafts
        for i, count in enumerate(drafts):  # the room is less than it was
            drafts[i] = min(count, room)
            room -= drafts[i]
        return drafts

    def landed(self, record: Record, asked: int, drafted: int, accepted: int) -> None:
        """Of `asked` drafts of a row the drafter gave `drafted`, and so many were accepted."""
        self._asked = KEPT_ALL * self._asked + asked
        self._given = KEPT_ALL * self._given + drafted
        if not drafted:
            return
        reached = accepted + (accepted < drafted)
        idle = self._step - record.seen
        kept = KEPT**reached if idle < EVERY else KEPT**reached * 0.5 ** (idle / FORGET)
        record.seen = self._step
        record.accepted = kept * record.accepted + accepted
        record.reached = kept * record.reached + reached
        kept = KEPT_ALL**reached
        self._accepted = kept * self._accepted + accepted
        self._reached = kept * self._reached + reached
        if accepted:
            record.wait = 1
        record.probe_at = self._step + record.wait

    def took(self, rows: int, drafts: int, depth: int, tokens: int, seconds: float) -> None:
        """A step of decodes alone is over: its rows, the drafts that it ran, the most that were asked
        for of one row (0: none at all), the tokens that it gave and its time.
        """
        if seconds <= 0 or not rows:
            return
        number = _bucket(rows)
        mean = self._alone.setdefault(number, _Mean())
        if not depth:
            mean.add(rows, seconds)
            self._bank = min(BANK, self._bank + INCOME)
            return
        if not mean.count:
            return
        alone = mean.value * rows / mean.lines if rows > mean.lines else mean.value
        lines = rows + drafts
        ratio = min(CLIP * lines / rows, seconds / alone)
        times = self._with.setdefault(number, {})
        key = depth, _bucket(lines)
        measured = times.pop(key) if key in times else _Mean(depth)
        times[key] = measured  # the newest is the last
        measured.add(lines / rows, ratio)
        if len(times) > _MEASURED:
            del times[next(iter(times))]
        self._bank = min(BANK, self._bank + tokens / rows - ratio * (1 - INCOME))

    # --- the choice ---------------------------------------------------------------------------

    def _measures(self, rows: int) -> bool:
        """Whether the next step has to show how long it takes without drafts."""
        mean = self._alone.setdefault(_bucket(rows), _Mean())
        if mean.count and self._step - mean.at < min(REFRESH, 8 << min(mean.count, 8)):
            return False
        mean.at = self._step
        return True

    def _choose(self, records: Sequence[Record], room: int) -> list[int] | None:
        rows = len(records)
        levels = [self._level(record) for record in records]
        counts = [0] * (_LEVELS + 1)
        for level in levels:
            counts[level] += 1
        present = [(level, count) for level, count in enumerate(counts) if count]
        given = self._given / self._asked
        times = self._with.get(_bucket(rows), {})
        trusted = self._most_lines(rows, times) - rows
        if trusted < min(room, rows * self._most):
            self._chosen_at -= EVERY - 2  # soon there is more
        room = min(room, trusted)
        best, chosen, last = WORTH * rows, None, (0, 0)
        for depth, drafts, gains in self._tables:
            lines = sum(count * drafts[level] for level, count in present)
            if not lines or last == (depth, lines):
                continue
            last = depth, lines
            part = min(1.0, room / lines)
            gain = given * part * sum(count * gains[level] for level, count in present)
            rate = (rows + gain) / _time(times, depth, 1 + given * part * lines / rows)
            if rate > best:
                best, chosen = rate, drafts
        if chosen is None:
            return None
        result = []
        for level in levels:
            count = min(chosen[level], room)
            room -= count
            result.append(count)
        return result

    def _level(self, record: Record) -> int:
        idle = self._step - record.seen
        known = record.reached if idle < EVERY else record.reached * 0.5 ** (idle / FORGET)
        if not known:
            return round(_LEVELS * self.acceptance)
        own = record.accepted / record.reached
        return round(_LEVELS * (own * known + PRIOR * self.acceptance) / (known + PRIOR))

    def _probe(self, records: Sequence[Record], drafts: list[int] | None, room: int) -> list[int] | None:
        """`drafts` with one more for some rows that would have none and were not tried for a while."""
        due = [
            i
            for i, record in enumerate(records)
            if record.probe_at <= self._step and (drafts is None or not drafts[i])
        ]
        if not due:
            return drafts if drafts is None else drafts.copy()
        rows = len(records)
        times = self._with.get(_bucket(rows), {})
        before = 1 + (sum(drafts) / rows if drafts else 0.0)
        depth = max(drafts) if drafts else 1
        base = _time(times, depth, before) if drafts else 1.0
        wanted = [0] * rows if drafts is None else drafts.copy()
        left = min(len(due), room - sum(wanted))
        while (cost := _time(times, depth, before + left / rows) - base) > self._bank / 2 and left > 0:
            left //= 2
        if left <= 0:
            return drafts if drafts is None else wanted
        longest = min(LONGEST_WAIT, SHORTEST_WAIT + int(cost / INCOME))
        for i in sorted(due, key=lambda i: records[i].probe_at)[:left]:
            wanted[i] = 1
            record = records[i]
            record.wait = min(2 * record.wait, longest)
            record.probe_at = self._step + record.wait
        return wanted

    @staticmethod
    def _most_lines(rows: int, times: _Times) -> int:
        """Lines of a step with so many rows that are not far from what was measured."""
        known = max((mean.lines for mean in times.values()), default=1.0)
        return rows + max(1, round(rows * max(FIRST, 2 * (known - 1))))


def _time(times: _Times, depth: int, lines: float) -> float:
    """How many times as long as without drafts a step lasts that has `lines` for each row.

    A step with less depth and fewer lines is shorter, one with more of both longer: what was measured of
    those are bounds. Where there is no upper one, it is the lower.
    """
    low, low_lines, high, high_lines = 1.0, 1.0, 0.0, 0.0
    for mean in times.values():
        if mean.lines <= lines and mean.depth <= depth:
            if mean.value >= low:
                low, low_lines = mean.value, mean.lines
        elif mean.lines >= lines and mean.depth >= depth and (not high or mean.value < high):
            high, high_lines = mean.value, mean.lines
    if high <= low or high_lines <= low_lines:
        return low
    return low + (lines - low_lines) / (high_lines - low_lines) * (high - low)


def _table(threshold: float, most: int) -> tuple[list[int], list[float]]:
    """For each level of acceptance: the drafts that are worth it, and how many of them to expect."""
    drafts, gains = [], []
    for level in range(_LEVELS + 1):
        p = min(0.98, level / _LEVELS)
        count = min(most, int(log(threshold) / log(p) + 1e-9)) if p > 0 else 0
        drafts.append(count)
        gains.append(sum(p**j for j in range(1, count + 1)))
    return drafts, gains


_EDGES = [*range(1, 9)]
while _EDGES[-1] < 1 << 20:
    _EDGES.append(_EDGES[-1] + max(1, _EDGES[-1] // 8))


def _bucket(lines: int) -> int:
    """Lines that last about as long have the same number."""
    return bisect_left(_EDGES, lines)
