"""Which rows have a constraint, where in it each one's output stands, and what that allows next.

A row's state moves with the tokens that it samples, so nothing of it is in a plan: a plan names the
constraint, and where outputs were sampled before, brings them. In a step with drafts the state behind
each draft is found on the way, and kept only as far as drafts are accepted.

Where a constraint leaves one way to go on, it proposes that as drafts (jump-forward): the same masks
accept them, many in one step.

For executors that sample on the host. It does not know logits.
"""

import logging
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ramify.gpu.constraints.loads import Loads
from ramify.gpu.constraints.matcher import Constraint, Matcher
from ramify.gpu.step.step_rows import Ints, Tokens
from ramify.protocol.errors import ConstraintError
from ramify.protocol.plan import LoadConstraint, OpenRow, StepPlan

T = TypeVar("T")
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.int32]

log = logging.getLogger(__name__)


class Masks(NamedTuple):
    """`lines` int64 [N] of those that sample; `words` int32 [N, words], the legal tokens of each."""

    lines: Ints
    words: npt.NDArray[np.int32]

    def flags(self, size: int) -> Flags:
        """bool [N, size]: whether each token is legal."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little", count=size)
        return bits.view(np.bool_)


class ConstrainedRows:
    """`active[row]`: the row is open and has a constraint. `jumps`: propose what must follow.

    A constraint that cannot be followed (a grammar past its limits) allows nothing: the row gets
    NO_TOKEN.
    """

    def __init__(self, max_rows: int, vocab_size: int, *, jumps: bool = True) -> None:
        self.active: Flags = np.zeros(max_rows, dtype=np.bool_)
        self.jumps = jumps
        self._loads = Loads(vocab_size)
        self._nothing = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._known: dict[int, Constraint | None] = {}
        self._of: dict[int, Matcher | None] = {}  # by row; None: it cannot be followed
        self._single: Flags = np.zeros(0, dtype=np.bool_)  # the lines of `masks` with one legal token

    def begin(self, plan: StepPlan) -> None:
        """Take over what the plan changes. Raises ValueError if it contradicts what is known."""
        if self._of and plan.closes:
            for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
                if self._of.pop(row, self) is not self:
                    self.active[row] = False
        if plan.forgets:
            for ident in np.frombuffer(plan.forgets, dtype=np.int32).tolist():
                del self._known[ident]
        for load in plan.constraints:
            if load.ident:
                self._load(load)
            else:
                self._loads.vocabulary(load.body)
        for opened in plan.opens:
            if opened.constraint:
                self._open(opened)

    def put(self, ident: int, constraint: Constraint) -> None:
        """Know a constraint that no plan brought. For tests."""
        self._known[ident] = constraint

    def _load(self, load: LoadConstraint) -> None:
        try:
            self._known[load.ident] = self._loads.constraint(load.body)
        except ConstraintError as error:
            log.error("a constraint cannot be followed: %s", error)
            self._known[load.ident] = None

    def _open(self, opened: OpenRow) -> None:
        row = opened.row
        if opened.constraint not in self._known:
            raise ValueError(f"row {row} names constraint {opened.constraint}, which was not loaded")
        constraint = self._known[opened.constraint]
        self.active[row] = True
        self._of[row] = None if constraint is None else constraint.matcher()
        if opened.sampled:
            self._take(row, np.frombuffer(opened.history, dtype=np.int32)[-opened.sampled :].tolist())

    def _take(self, row: int, tokens: list[int]) -> None:
        """The row's output goes on with `tokens`."""
        matcher = self._of[row]
        if matcher is None:
            return
        try:
            for token in tokens:
                if not matcher.advance(token):
                    raise ConstraintError(f"token {token} is not legal")
        except ConstraintError as error:
            log.error("a constraint cannot be followed: %s", error)
            self._of[row] = None

    def propose(self, rows: Ints, most: Ints) -> dict[int, list[int]]:
        """What must come next, by index into `rows`: up to `most` [R] tokens each, if it is known."""
        found: dict[int, list[int]] = {}
        if not self.jumps or not self._of:
            return found
        for at in np.flatnonzero(self.active[rows] & (most > 0)).tolist():
            matcher = self._of[int(rows[at])]
            if matcher is not None:
                forced, drafts = self._tried(int(rows[at]), matcher.plan) or ((), ())
                tokens = [*forced, *drafts][: int(most[at])]
                if tokens:
                    found[at] = tokens
        return found

    def masks(self, rows: Ints, drafts: Ints | None = None) -> Masks | None:
        """What the sampling lines of `rows` [S] may sample; None: no row of them has a constraint.

        `drafts` [S]: the draft that a line runs, below 0 on the first line of its row; None: one line
        each. The lines of a row are neighbours. One behind a draft that is not legal has no mask: it
        will not count.
        """
        self._single = np.zeros(len(rows), dtype=np.bool_)
        if not self._of:
            return None
        lines: list[int] = []
        words: list[Words] = []
        places = np.flatnonzero(self.active[rows]).tolist()
        for row, group in groupby(places, lambda line: int(rows[line])):
            own = list(group)
            ahead = [] if drafts is None else drafts[own[1:]].tolist()
            masks = self._along(row, ahead)
            lines += own[: len(masks)]
            words += masks
        if not lines:
            return None
        found = Masks(np.array(lines, dtype=np.int64), np.stack(words))
        self._single[found.lines] = np.bitwise_count(found.words.view(np.uint32)).sum(axis=1) == 1
        return found

    def _along(self, row: int, drafts: list[int]) -> list[Words]:
        """The masks of a row's output, and behind each of `drafts` as long as they are legal."""
        matcher = self._of[row]
        if matcher is None:
            return [self._nothing]
        found: list[Words] = []
        taken = 0
        try:
            found.append(matcher.mask())
            for token in drafts:
                if not found[-1][token >> 5] >> (token & 31) & 1 or not matcher.advance(token):
                    break
                taken += 1
                found.append(matcher.mask())
            matcher.rollback(taken)
        except ConstraintError as error:
            log.error("a constraint cannot be followed: %s", error)
            self._of[row] = None
            found = [self._nothing]
        return found

    def _tried(self, row: int, call: Callable[[], T]) -> T | None:
        """What `call` returns; None if the constraint cannot be followed, and then never again."""
        try:
            return call()
        except ConstraintError as error:
            log.error("a constraint cannot be followed: %s", error)
            self._of[row] = None
            return None

    def sampled(self, rows: Ints, counts: Ints, tokens: Ints | Tokens) -> None:
        """What `rows` [R] sampled: `counts` [R] tokens each, row by row; NO_TOKEN moves nothing."""
        if not self._of:
            return
        ends = np.cumsum(counts)
        for at in np.flatnonzero(self.active[rows]).tolist():
            own = tokens[ends[at] - counts[at] : ends[at]].tolist()
            self._take(int(rows[at]), [token for token in own if token >= 0])

    def forced(self, lines: Ints, kept: Flags) -> bytes:
        """A byte for each of a step's lines that is `kept`, 1 where nothing else was legal; empty:
        nowhere.

        `lines`: which lines of the step those of `masks`' last call were.
        """
        forced = np.zeros(len(kept), dtype=np.uint8)
        forced[lines] = self._single
        return forced[kept].tobytes() if self._single.any() else b""
