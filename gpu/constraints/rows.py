"""The rows with constraints, the state of each one's output, and the tokens that it allows next.

A row's state moves with the tokens that it samples, so it is not in a plan: a plan names the constraint,
and brings outputs that were sampled before. In a step with drafts the state after each draft is found on
the way, and kept only as far as drafts are accepted.

Text that a constraint forces is proposed as drafts (jump-forward): the same masks accept them, many in
one step.

No step waits for one row. Constraints are loaded in threads, and so is long work of an output
(`outputs`). A row that is not ready when a step begins sits it out, and so does one whose mask is
missing when the step has its logits.

For executors that sample on the host. This file does not know logits.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.gpu.constraints.loads import Loaded, Loads, Prepare
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.matcher import Matcher
from ramify.gpu.constraints.outputs import LOST, Legal, Output
from ramify.gpu.step.step_rows import Flags, Ints, Tokens
from ramify.protocol.errors import ConstraintError
from ramify.protocol.plan import OpenRow, StepPlan

Words = npt.NDArray[np.int32]

PATIENCE = 0.5e-3  # seconds that a step waits for masks, beside rows that do not
ALONE = 5e-3  # the same if every row waits


class Masks(NamedTuple):
    """The masks of lines that may not sample all tokens: `lines` [N] have `words` int32 [N, words],
    `forced` [M] may sample `tokens` [M] alone.
    """

    lines: Ints
    words: Words
    forced: Ints
    tokens: Ints

    def flags(self, size: int) -> Flags:
        """Unpack whether each token is legal on `lines`: bool [N, size]."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little", count=size)
        return bits.view(np.bool_)

    def of(self, lines: Ints) -> "Masks":
        """Select the masks of some `lines`, ascending, which are then numbered from 0 on."""
        bound, forced = np.isin(self.lines, lines), np.isin(self.forced, lines)
        return Masks(
            np.searchsorted(lines, self.lines[bound]),
            self.words[bound],
            np.searchsorted(lines, self.forced[forced]),
            self.tokens[forced],
        )


GuessFor = Callable[[int, Sequence[int], int], Sequence[int]]
"""`outputs.Guess` for the row at an index."""


class Drafted(NamedTuple):
    """The drafts of a row, and which of them a drafter guessed; empty: none."""

    tokens: list[int]
    guessed: list[bool]


@dataclass(slots=True)
class RowCounters:
    """Counts since the start. `sat_out`: rows that sat a step out, once for each step."""

    sat_out: int = 0


class ConstrainedRows:
    """The constraints of rows. `active[row]`: the row is open and has one. `jumps`: propose forced text.

    `prepare`: see `Loads`. A constraint that cannot be followed (a grammar past its limits) allows
    nothing: the row gets STUCK.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        *,
        jumps: bool = True,
        prepare: Prepare | None = None,
    ) -> None:
        self.active: Flags = np.zeros(max_rows, dtype=np.bool_)
        self.jumps = jumps
        self.store = MaskStore()
        self.loads = Loads(vocab_size, self.store, prepare)
        self.counters = RowCounters()
        self.late: set[int] = set()  # rows of the last `masks` that have to sit the step out
        self.stuck: dict[int, str] = {}  # its lines on which nothing is legal, ascending, and why
        self._nothing = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._known: dict[int, Future[Loaded]] = {}
        self._of: dict[int, Output] = {}  # by row
        self._threads: ThreadPoolExecutor | None = None
        self._single: Flags = np.zeros(0, dtype=np.bool_)  # the lines of `masks` with one legal token

    def begin(self, plan: StepPlan) -> None:
        """Take over what the plan changes. Raises ValueError if it contradicts what is known."""
        self.late, self.stuck = set(), {}
        if self._of and plan.closes:
            for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
                output = self._of.pop(row, None)
                if output is not None:
                    self.active[row] = False
                    output.close()
        if plan.forgets:
            for ident in np.frombuffer(plan.forgets, dtype=np.int32).tolist():
                self._known.pop(ident).add_done_callback(_close)
        for load in plan.constraints:
            if load.ident:
                self._known[load.ident] = self.loads.constraint(load.ident, load.body)
            else:
                self.loads.vocabulary(load.body)
        for opened in plan.opens:
            if opened.constraint:
                self._open(opened)

    def put(self, ident: int, constraint: Loaded) -> None:
        """Add a constraint that no plan brought. For tests."""
        self._known[ident] = loaded = Future[Loaded]()
        loaded.set_result(constraint)

    def loading(self, ident: int) -> Future[Loaded]:
        """Return the future of constraint `ident`, which a plan brought."""
        return self._known[ident]

    def close(self) -> None:
        """Start no more work."""
        self.loads.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def matcher(self, row: int) -> Matcher | None:
        """Return the matcher of a row, which must be ready; None: it cannot be followed."""
        return self._of[row].matcher

    def ready(self, row: int) -> bool:
        """Whether the row's output can be asked and moved now."""
        return self._of[row].ready

    def wait(self, row: int, until: float) -> bool:
        """Wait until the row's output is ready, or a time of `monotonic`. Returns whether it is."""
        return self._of[row].wait(until)

    def absent(self, rows: Ints, alone: bool = False) -> Flags | None:
        """Find which decodes of `rows` cannot be in the step that begins now, bool [R]; None: all can.

        `alone`: the step has nothing else to do, so it waits a little for the first of them.
        """
        if not self._of:
            return None
        gone = np.zeros(len(rows), dtype=np.bool_)
        late = [at for at in np.flatnonzero(self.active[rows]).tolist() if self._of[int(rows[at])].late]
        if late and alone and len(late) == len(rows):
            until = monotonic() + ALONE
            outputs = [self._of[int(rows[at])] for at in late]
            while not any(output.ready for output in outputs) and monotonic() < until:
                outputs[0].wait(min(until, monotonic() + PATIENCE))
            late = [at for at in late if not outputs[at].ready]
        if not late:
            return None
        gone[late] = True
        self.counters.sat_out += len(late)
        return gone

    @property
    def any(self) -> bool:
        """Whether a row has a constraint."""
        return bool(self._of)

    def leaves_a_choice(self, rows: Ints) -> Flags:
        """Tell whether the next token of each of `rows` can be guessed, bool [R]: it is not forced, and
        the legal ones are known. True for rows without a constraint.
        """
        found = np.ones(len(rows), dtype=np.bool_)
        for at in np.flatnonzero(self.active[rows]).tolist():
            output = self._of[int(rows[at])]
            found[at] = output.ready and output.leaves_a_choice()
        return found

    def propose(
        self, rows: Ints, most: Ints, guesses: Ints | None = None, guess: GuessFor | None = None
    ) -> dict[int, Drafted]:
        """Propose up to `most` [R] next tokens, by index into `rows`: forced ones, and up to `guesses`
        [R] of `guess` where they are legal.
        """
        found: dict[int, Drafted] = {}
        if not self._of:
            return found
        until = 0.0
        guesses = np.zeros_like(most) if guesses is None else guesses
        asked = (most > 0) if self.jumps else (guesses > 0)
        for at in np.flatnonzero(self.active[rows] & asked).tolist():
            output = self._of[int(rows[at])]
            if not output.ready:
                until = until or monotonic() + PATIENCE
                if not output.wait(until):
                    continue
            size, own = int(most[at]), int(guesses[at])
            if own and guess is not None:
                ahead = output.guess(size, own, partial(guess, at), self.jumps)
            else:
                ahead = output.look()
            if ahead.tokens:
                found[at] = Drafted(list(ahead.tokens[:size]), list(ahead.guessed[:size]))
        return found

    def masks(self, rows: Ints, drafts: Ints | None = None) -> Masks | None:
        """Make the masks of the sampling lines of `rows` [S]; None: no line needs one.

        `drafts` [S]: the draft that a line runs, below 0 on the first line of its row; None: one line
        each. The lines of a row are neighbours. There is no mask for lines after a draft that is not
        legal, which will not count, for rows that were not ready, which `late` then has, and for lines
        that may sample all tokens.
        """
        self._single = np.zeros(len(rows), dtype=np.bool_)
        if not self._of:
            return None
        firsts = np.flatnonzero(
            self.active[rows] if drafts is None else self.active[rows] & (drafts < 0)
        )
        if not len(firsts):
            return None
        self._await(rows, firsts, drafts)
        lines: list[int] = []
        words: list[Words] = []
        forced: list[int] = []
        tokens: list[int] = []
        for first in firsts.tolist():
            for line, legal in enumerate(self._along(rows, first, drafts), first):
                if legal.only >= 0:
                    forced.append(line)
                    tokens.append(legal.only)
                elif legal.mask is None:
                    lines.append(line)
                    words.append(self._nothing)
                    self.stuck[line] = self._of[int(rows[first])].why or LOST
                elif not legal.free:
                    lines.append(line)
                    words.append(legal.mask)
        self._single[forced] = True
        return Masks(
            np.array(lines, dtype=np.int64),
            np.stack(words) if words else self._nothing[None][:0],
            np.array(forced, dtype=np.int64),
            np.array(tokens, dtype=np.int64),
        )

    def _await(self, rows: Ints, firsts: Ints, drafts: Ints | None) -> None:
        """Wait a little for outputs that are not ready, and note those that are late."""
        waited_for = [first for first in firsts.tolist() if not self._of[int(rows[first])].ready]
        if not waited_for:
            return
        every = len(waited_for) == (len(rows) if drafts is None else int((drafts < 0).sum()))
        until = monotonic() + (ALONE if every else PATIENCE)
        for row in rows[waited_for].tolist():
            output = self._of[row]
            if not output.wait(until):
                output.missed()
                self.late.add(row)
        self.counters.sat_out += len(self.late)

    def _along(self, rows: Ints, first: int, drafts: Ints | None) -> list[Legal]:
        output = self._of[int(rows[first])]
        if not output.ready:
            return []
        end = first + 1
        if drafts is not None:
            while end < len(rows) and drafts[end] >= 0:
                end += 1
        return output.along([] if drafts is None else drafts[first + 1 : end].tolist())

    def sampled(self, rows: Ints, counts: Ints, tokens: Ints | Tokens) -> None:
        """Advance `rows` [R] by what they sampled: `counts` [R] tokens each; NO_TOKEN is skipped."""
        if not self._of:
            return
        ends = np.cumsum(counts)
        for at in np.flatnonzero(self.active[rows] & (counts > 0)).tolist():
            own = tokens[ends[at] - counts[at] : ends[at]].tolist()
            self._of[int(rows[at])].advance([token for token in own if token >= 0])

    def forced(self, kept: Flags) -> bytes:
        """Pack a byte for each line of the last `masks` that is `kept`, 1 where one token alone was
        legal; empty: nowhere.
        """
        return self._single[kept].tobytes() if self._single.any() else b""

    def _open(self, opened: OpenRow) -> None:
        row = opened.row
        loaded = self._known.get(opened.constraint)
        if loaded is None:
            raise ValueError(f"row {row} names constraint {opened.constraint}, which was not loaded")
        outputs: list[int] = []
        if opened.obeyed:
            outputs = np.frombuffer(opened.history, dtype=np.int32)[-opened.obeyed :].tolist()
        self.active[row] = True
        self._of[row] = Output(loaded, outputs, self._pool)

    def _pool(self) -> Executor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "masks")
        return self._threads


def _close(loaded: "Future[Loaded]") -> None:
    constraint = None if loaded.cancelled() else loaded.result()
    if constraint is not None and not isinstance(constraint, ConstraintError):
        constraint.close()
