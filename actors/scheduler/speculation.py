"""How many tokens to draft for each row, so that a step gives most tokens a second. Pure.

A draft adds a line to a step. It pays by the chance that it is accepted, and costs the time by which the
step gets longer. Both are measured; nothing is assumed of the model, the drafter or the machine:

- *Acceptance* of each row: the part of its reached drafts that was accepted lately. Drafts behind a
  refused one are not reached and say nothing. A row of which little is known counts as average.
- *Step times*: of steps without drafts, by rows; of steps with drafts, relative to those, by rows, lines
  and depth (the most drafts of a row: a draft model runs that often). Sizes that were never measured are
  taken to cost no more than measured ones, but are approached in small increments.

With p the acceptance of a row, its draft number j is accepted with chance p^j. So the best choice for a
batch is a threshold and a depth: draft j of a row is worth its line if p^j is at least the threshold.
Some pairs are compared by (rows + expected accepted drafts) / expected time, and with no drafts at all
(as the goodput of Liu et al. 2024, "Optimizing speculative decoding for serving large language models").

Times are lower quartiles: on a machine with other work some steps last several times as long, and say
nothing of drafts.

A draft model has to compute a row's prompt once, before the row's first draft. That time is reported
apart and is no part of a step's. A row is begun if its drafts are expected to save more than that, over
as many tokens as rows have given lately. It is paid for in parts, over `SPREAD` steps.

Never slower than without drafts: a *bank* holds the time that drafts have saved or lost, with a small
income of each step's time (`INCOME`). While it is empty nothing is drafted. So whatever is wrong with
the estimates, drafts cost `INCOME` of the time, and a few steps. Rows that are not worth a draft are
probed with one, each time later, as far as the bank allows.

This file knows rows, lines and seconds, not runs, plans or tokens.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

INCOME = 0.006  # of all time: what trying out may cost
# Steps that the bank holds at most, and at the start. A prompt of 256 tokens costs the bundled draft
# model the time of five steps, so trying it on rows whose drafts are refused takes twice that, saved up.
BANK, BEGIN = 32.0, 4.0
FLOOR = -4.0  # what it owes at most: so much is earned by `INCOME` in some hundred steps
CLIP = 1.5  # rows that a line costs at most: a measurement of more is the machine's
SPREAD = 32  # steps in which the begin of a row is paid for: a short answer's
WORTH = 1.02  # times as many tokens a second that drafts have to promise
FIRST = 0.25  # lines more for each row that are tried first; then twice as many as were measured
EVERY = 8  # steps that a choice holds while the batch is the same
REFRESH = 96  # steps until steps without drafts are measured anew, while there are drafts
PRIOR = 4.0  # drafts of the average that a row begins with
KEPT, KEPT_ALL = 0.97, 0.995  # of what was known of a row, of the average, at a draft
FORGET = 256  # steps without a draft, until half of what was known of a row is forgotten
SHORTEST_WAIT, LONGEST_WAIT = 8, 256  # most steps between two probes of a row: by what they cost
STAYS = 64.0  # tokens that a row is taken to give, before any has ended
_LEVELS = 20  # of acceptance
_THRESHOLDS = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05, 0.02)
_MEASURED = 32  # kinds of steps with drafts that are known for a number of rows
_NEWEST = 9  # measurements of a kind whose lower quartile counts
_FRESH = 1 / 6  # weight of a new measurement in other means


@dataclass(slots=True, eq=False)
class DraftRecord:
    """The acceptance of one row's drafts; older drafts count less.

    In tokens, set by the caller: `length` of the row when the rows last changed; `known` to the drafter;
    `rest` that it may still output.
    """

    accepted: float = 0.0
    reached: float = 0.0
    seen: int = 0  # the step of its last draft
    probe_at: int = 0  # the step of its next probe
    wait: int = 1  # steps to the one after that
    length: int = 0
    known: int = 0
    rest: int = 1 << 30


@dataclass(slots=True, eq=False)
class _Quartile:
    """The lower one of the newest measurements. `lines`: for each row; in all with `depth` 0."""

    depth: int = 0
    lines: float = 0.0
    value: float = 0.0
    count: int = 0
    at: int = 0  # step of the last one, or of the last that is on its way
    _values: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))

    def add(self, lines: float, value: float) -> None:
        self.count += 1
        self.lines += max(_FRESH, 1 / self.count) * (lines - self.lines)
        self._values.append(value)
        self.value = sorted(self._values)[(len(self._values) - 1) // 4]


_Times = dict[tuple[int, int], _Quartile]  # by depth, and `_bucket` of lines


class Speculation:
    """`most`: drafts that a row may have in a step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 0
        self._chosen_at = -EVERY
        self._changed_at = 0
        self._drafts: list[int] | None = None
        self._accepted, self._reached = 0.5 * PRIOR, PRIOR  # of all rows
        self._given, self._asked = 1.0, 1.0  # drafts that the drafter gave, of those that were asked for
        self._alone: dict[int, _Quartile] = {}  # seconds of steps without drafts, by `_bucket` of rows
        self._with: dict[int, _Times] = {}  # times as long with drafts, by `_bucket` of rows
        self.bank = BEGIN  # in steps without drafts
        self._debt = 0.0  # of rows that were begun, in such steps: still to be paid
        self._begin = 0.0  # seconds for each token that a row is behind, when it is begun
        self._stays = STAYS  # tokens that rows gave lately
        self.measuring = False  # the next step has to be one without drafts, to show how long it takes
        depths = [depth for depth in range(1, most + 1) if depth < 5 or depth % 2 == 0 or depth == most]
        self._tables = [
            (depth, *_table(threshold, depth)) for depth in depths for threshold in _THRESHOLDS
        ]

    @property
    def acceptance(self) -> float:
        """The part of lately reached drafts that was accepted."""
        return self._accepted / self._reached

    def choose(
        self, records: Sequence[DraftRecord | None], room: int, *, changed: bool
    ) -> list[int] | None:
        """Drafts for each row of the next step, at most `room` in all; None: for no row.

        `records`: None for a row that cannot have any. `changed`: they are not the rows of the last
        call. Called once for each step with decodes.
        """
        self._step += 1
        if changed:
            self._changed_at = self._step
        rows = len(records)
        self.measuring = self._measures(rows)
        if self.bank <= 0 or room <= 0 or self.measuring:
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

    def landed(self, record: DraftRecord, asked: int, drafted: int, accepted: int) -> None:
        """Note a row's drafts: `asked` of the drafter, `drafted` by it, `accepted` by the model."""
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

    def took(
        self,
        rows: int,
        drafts: int,
        depth: int,
        tokens: int,
        seconds: float | None,
        late: float = 0.0,
        missing: int = 0,
    ) -> None:
        """Learn from a step of `rows` decodes with `drafts` drafts, which gave `tokens` tokens.

        `depth`: the most drafts that were asked for of one row; 0: none at all. `seconds`: its time;
        None: the step did other things too, so its time says nothing. `late`: seconds spent apart, on
        the `missing` tokens of rows that were begun.
        """
        if not rows:
            return
        alone = self._alone.setdefault(_bucket(rows), _Quartile())
        if not depth:
            if seconds:
                alone.add(rows, seconds)
            self._earn(0.0)
            return
        if not alone.count:
            return
        usual = self._usual(rows)
        lines = rows + drafts
        times = self._with.setdefault(_bucket(rows), {})
        if seconds:
            ratio = self._measure(times, depth, lines / rows, seconds / usual)
        else:
            ratio = _time(times, depth, lines / rows) if times else lines / rows
        if missing > EVERY:
            self._begin += _FRESH * (late / missing - self._begin)
        self._debt += late / usual
        self._earn(tokens / rows - ratio)

    def ended(self, tokens: int) -> None:
        """Note that a row ended after `tokens` tokens."""
        self._stays += _FRESH * (tokens - self._stays)

    def _usual(self, rows: int) -> float:
        """Seconds of a step without drafts."""
        alone = self._alone[_bucket(rows)]
        return alone.value * max(1.0, rows / alone.lines)

    @staticmethod
    def _measure(times: _Times, depth: int, lines: float, ratio: float) -> float:
        """Note the time of a step with drafts. Returns what such steps usually take.

        At first a line counts no more than a row without drafts: the rest may be the machine's.
        """
        key = depth, _bucket(round(16 * lines))
        measured = times.pop(key) if key in times else _Quartile(depth)
        times[key] = measured  # the newest is the last
        measured.add(lines, ratio)
        measured.value = min(measured.value, lines if measured.count < 3 else CLIP * lines)
        if len(times) > _MEASURED:
            del times[next(iter(times))]
        return measured.value

    def _earn(self, gain: float) -> None:
        """Put `gain` steps into the bank; less than 0: the step lost them."""
        paid = self._debt / SPREAD
        self._debt -= paid
        self.bank = max(FLOOR, min(BANK, self.bank + INCOME + gain - paid))

    # --- the choice ---------------------------------------------------------------------------

    def _measures(self, rows: int) -> bool:
        """Whether the next step must run without drafts, to measure its time."""
        mean = self._alone.setdefault(_bucket(rows), _Quartile())
        if mean.count and self._step - mean.at < min(REFRESH, 8 << min(mean.count, 8)):
            return False
        mean.at = self._step
        return True

    def _choose(self, records: Sequence[DraftRecord | None], room: int) -> list[int] | None:
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
        saved = self._usual(rows) / rows * (1 - rows / best) if self._begin else 0.0  # for each token
        result = []
        for level, record in zip(levels, records, strict=True):
            count = min(chosen[level], room)
            if count and record is not None and not self._repays(record, saved):
                count = 0
            room -= count
            result.append(count)
        return result

    def _cost(self, record: DraftRecord) -> float:
        """Seconds to begin the row."""
        missing = record.length + self._step - self._changed_at - record.known
        return self._begin * missing if missing > EVERY else 0.0

    def _repays(self, record: DraftRecord, saved: float) -> bool:
        """Whether drafts are likely to save more than it costs to begin the row.

        `saved`: seconds for each token.
        """
        cost = self._cost(record)
        return not cost or min(record.rest, self._stays) * saved > cost

    def _level(self, record: DraftRecord | None) -> int:
        if record is None:
            return 0
        idle = self._step - record.seen
        known = record.reached if idle < EVERY else record.reached * 0.5 ** (idle / FORGET)
        if not known:
            return round(_LEVELS * self.acceptance)
        own = record.accepted / record.reached
        return round(_LEVELS * (own * known + PRIOR * self.acceptance) / (known + PRIOR))

    def _probe(
        self, records: Sequence[DraftRecord | None], drafts: list[int] | None, room: int
    ) -> list[int] | None:
        """`drafts` with one draft more for some rows that would have none and were not tried for a
        while.
        """
        due = [
            (record.probe_at, i, record)
            for i, record in enumerate(records)
            if record is not None and record.probe_at <= self._step and (drafts is None or not drafts[i])
        ]
        if not due:
            return drafts if drafts is None else drafts.copy()
        rows, usual = len(records), self._usual(len(records))
        times = self._with.get(_bucket(rows), {})
        before = 1 + (sum(drafts) / rows if drafts else 0.0)
        depth = max(drafts) if drafts else 1
        base = _time(times, depth, before) if drafts else 1.0
        wanted = [0] * rows if drafts is None else drafts.copy()
        left = min(len(due), room - sum(wanted))
        due.sort()
        spend, cost = (self.bank - self._debt) / 2, 0.0
        while left > 0:
            cost = _time(times, depth, before + left / rows) - base
            cost += sum(self._cost(record) for _, _, record in due[:left]) / usual
            if cost <= spend:
                break
            left //= 2
        if left <= 0:
            return drafts if drafts is None else wanted
        longest = min(LONGEST_WAIT, SHORTEST_WAIT + int(cost / INCOME))
        for _, i, record in due[:left]:
            wanted[i] = 1
            record.wait = min(2 * record.wait, longest)
            record.probe_at = self._step + record.wait
        return wanted

    def _most_lines(self, rows: int, times: _Times) -> int:
        """The most lines for a step with `rows` rows.

        They are not far from measured sizes, and the bank can bear their drafts if each costs as much as
        a row and none is accepted.
        """
        known = max((one.lines for one in times.values()), default=1.0) - 1
        more = min(max(FIRST, 2 * known), known + self.bank / 2)
        return rows + max(1, round(rows * more))


def _time(times: _Times, depth: int, lines: float) -> float:
    """Time of a step with `lines` lines for each row, relative to one without drafts.

    Steps with less depth and fewer lines are shorter, those with more of both longer, so their measured
    times are bounds. Without an upper bound, the lower one is returned.
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
    """The number of a size class: step times within one class are alike."""
    return bisect_left(_EDGES, lines)
