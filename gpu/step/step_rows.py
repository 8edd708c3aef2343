"""The sequences that one plan runs, and how drafts stand among them.

Host side, numpy only. `rows` makes it from a plan; it does not know page tables.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import NO_TOKEN, STATE, WINDOW, ExecutorInfo, StepPlan

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Scored:
    """The targets of a step's extends, K of them.

    Their logits are those of L of the T tokens: the model's head runs once for each, however many
    targets it has.
    """

    lines: Ints  # [L] indices into the T tokens, ascending
    which: Ints  # [K] indices into `lines`, ascending
    targets: Tokens  # [K]
    rows: Ints  # [K]
    tops: Ints  # [K] how many of the most likely tokens are wanted beside each target

    @property
    def most(self) -> int:
        """The largest number of likely tokens that any target wants."""
        return int(self.tops.max(initial=0))

    @property
    def owners(self) -> Ints:
        """The row of each number of the result, which has 1 + 2 * tops numbers for each target."""
        return self.rows.repeat(1 + 2 * self.tops) if self.most else self.rows


@dataclass(slots=True)
class StepRows:
    """The sequences that one plan runs: first its extends, then its decodes.

    B sequences, T tokens, S sampling sequences. Sequence i runs positions
    [starts[i], starts[i] + counts[i]) of row rows[i]. A decode's input is its row's last sampled
    token, apart from the first len(given) decodes, whose input is `given` where that is a token.

    Each draft is a decode of its own, at the position behind the one before it: all keys are stored
    before any is read. A drafted decode is followed by its drafts; those of the extends, which are
    given, come before all other decodes. `lines` says which of the S sample for one row.
    """

    rows: Ints  # [B]
    starts: Ints  # [B]
    counts: Ints  # [B]
    extends: int  # the first `extends` sequences are extends, the others decodes
    tokens: Tokens  # [T - decodes] the extends' tokens, one after another
    sampling: Ints  # [S] indices into the B sequences, in the order of the result
    draws: Ints  # [S] index of the output token that is sampled now
    given: Tokens = field(default_factory=lambda: NO_TOKENS)
    scored: "Scored | None" = None
    # [R] of each row that samples: 1 + its drafts, which follow each other in `sampling`; None: 1 each
    lines: "Ints | None" = None
    # [B, 2] of each sequence: the state slot that its row reads, and the one that gets what stands
    # behind the row's last token, refused drafts left out; None: the model has none
    states: "Ints | None" = None
    # [n, 2] of those that sit the step out: the slot that they would have read, which is copied to the
    # one that they would have written
    held: "Ints | None" = None
    # the rows that were to sample, in the order of the result, if some of them sit the step out
    asked: "Ints | None" = None

    @property
    def computed(self) -> int:
        """T, the tokens that go through the model."""
        return len(self.tokens) + len(self.rows) - self.extends

    @property
    def sampled_rows(self) -> Ints:
        """The rows that sample, each once, in the order of the result: [R]."""
        sampling = self.sampling
        if self.lines is not None:
            sampling = sampling[np.cumsum(self.lines) - self.lines]
        return self.rows[sampling]

    def without(self, absent: Flags) -> "StepRows":
        """Return the step in which `absent`, bool[R] of the rows that sample, sit out.

        Their decodes and drafts do not run. Their extends do, but nothing is sampled behind them.
        """
        gone = absent if self.lines is None else np.repeat(absent, self.lines)
        keep = np.ones(len(self.rows), dtype=np.bool_)
        keep[self.sampling[gone]] = False
        keep[: self.extends] = True
        places = np.cumsum(keep) - 1
        states, held = self.states, self.held
        if states is not None:
            states, held = states[keep], states[~keep]
        return replace(
            self,
            states=states,
            held=held,
            rows=self.rows[keep],
            starts=self.starts[keep],
            counts=self.counts[keep],
            sampling=places[self.sampling[~gone]],
            draws=self.draws[~gone],
            given=self.given[keep[self.extends : self.extends + len(self.given)]],
            lines=None if self.lines is None else self.lines[~absent],
            asked=self.sampled_rows if self.asked is None else self.asked,
        )

    @property
    def last_extended(self) -> "tuple[Ints, Tokens]":
        """The rows of the extends, and the last token of each that is no draft: it runs next if
        nothing was sampled after it.
        """
        n = self.extends
        return self.rows[:n], self.tokens[np.cumsum(self.counts[:n]) - 1]

    def left_to_guess(self) -> tuple[Ints, Ints]:
        """Find the sequences that run a draft which is not given, and its number in its row, from 1."""
        numbers = np.zeros(len(self.rows), dtype=np.int64)
        if self.lines is not None:
            numbers[self.sampling] = within(self.lines)
            given = numbers[self.extends : self.extends + len(self.given)]
            given[self.given >= 0] = 0
        found = np.flatnonzero(numbers)
        return found, numbers[found]

    def drafted(self, drafts: Ints) -> "StepRows":
        """Return the step with `drafts` [R] drafts for each row that samples, each as a decode.

        The last tokens of an extend that are drafts become decodes whose input is given. The caller
        sets `draws`.
        """
        if not self.extends:
            lines = 1 + drafts
            index = np.arange(int(lines.sum()))
            place = index - np.repeat(np.cumsum(lines) - lines, lines)
            return StepRows(
                rows=np.repeat(self.rows, lines),
                starts=np.repeat(self.starts, lines) + place,
                counts=np.ones(len(index), dtype=np.int64),
                extends=0,
                tokens=self.tokens,
                sampling=index,
                draws=place,
                lines=lines,
                states=None if self.states is None else np.repeat(self.states, lines, axis=0),
            )
        n, m = self.extends, len(self.sampling) - (len(self.rows) - self.extends)
        own = np.zeros(n, dtype=np.int64)  # of each extend, of which m sample
        own[self.sampling[:m]] = drafts[:m]
        counts = self.counts[:n] - own
        is_draft = within(self.counts[:n]) >= np.repeat(counts, self.counts[:n])
        lines, given = 1 + drafts, int(own.sum())
        behind = np.repeat(self.starts[:n] + counts, own) + within(own)
        decodes = np.repeat(self.starts[n:], lines[m:]) + within(lines[m:])
        rows = [self.rows[:n], np.repeat(self.rows[:n], own), np.repeat(self.rows[n:], lines[m:])]
        total = n + len(behind) + len(decodes)
        # an extend samples, then the drafts that follow it
        sampling = np.empty(int(lines.sum()), dtype=np.int64)
        of_extends, first = sampling[: m + given], within(lines[:m]) == 0
        of_extends[first], of_extends[~first] = self.sampling[:m], np.arange(n, n + given)
        sampling[m + given :] = np.arange(n + given, total)
        states = self.states  # where extends have no drafts
        if states is not None:
            states = np.concatenate([states[:n], np.repeat(states[n:], lines[m:], axis=0)])
        if self.scored is not None:
            self.scored.lines -= np.cumsum(is_draft)[self.scored.lines]
        return StepRows(
            rows=np.concatenate(rows),
            starts=np.concatenate([self.starts[:n], behind, decodes]),
            counts=np.concatenate([counts, np.ones(total - n, dtype=np.int64)]),
            extends=n,
            tokens=self.tokens[~is_draft],
            sampling=sampling,
            draws=sampling,
            given=self.tokens[is_draft],
            scored=self.scored,
            lines=lines,
            states=states,
        )

    def guessed(self, drafts: Tokens) -> "StepRows":
        """Set the drafts of the decodes, row by row: int32[drafts of all decodes]. Returns self."""
        if self.lines is None:
            return self
        held = len(self.given)  # drafts of the extends
        lines = self.rows[self.extends + held :]
        first = np.ones(len(lines), dtype=np.bool_)  # lines of one row follow each other
        np.not_equal(lines[1:], lines[:-1], out=first[1:])
        inputs = np.full(len(lines), NO_TOKEN, dtype=np.int32)
        inputs[~first] = drafts
        self.given = np.concatenate([self.given, inputs]) if held else inputs
        return self

    def fewer(self, counts: Ints) -> "StepRows":
        """Return the step with only the first `counts` [decodes of the plan] drafts of each decode."""
        if self.lines is None:
            return self
        lines, first = self.lines.copy(), len(self.lines) - len(counts)
        lines[first:] = 1 + counts
        planned, found = self.lines[first:], lines[first:]
        if (planned == found).all():
            return self
        held = int(self.lines[:first].sum())  # lines of the extends that sample
        begin = len(self.rows) - int(planned.sum())  # sequence of the first decode
        keep = within(planned) < np.repeat(found, planned)
        kept = begin + np.flatnonzero(keep)
        return StepRows(
            rows=np.concatenate([self.rows[:begin], self.rows[kept]]),
            starts=np.concatenate([self.starts[:begin], self.starts[kept]]),
            counts=self.counts[: begin + len(kept)],
            extends=self.extends,
            tokens=self.tokens,
            sampling=np.concatenate([self.sampling[:held], np.arange(begin, begin + len(kept))]),
            draws=np.concatenate([self.draws[:held], self.draws[held:][keep]]),
            given=self.given,
            scored=self.scored,
            lines=lines,
            states=None if self.states is None else self.states[[*range(begin), *kept]],
            held=self.held,
            asked=self.asked,
        )

    def with_short_extends_as_decodes(self) -> "StepRows":
        """Return the step with each extend of one token that samples turned into a decode of that token.

        Generations whose prompts are computed but for the last token then run as one step of decodes.
        The result keeps its order. An extend that does not sample stays one, because every line of a
        step of decodes samples.
        """
        n = self.extends
        if not n or self.scored is not None:  # whose lines would be others
            return self
        samples = np.zeros(len(self.rows), dtype=np.bool_)
        samples[self.sampling] = True
        short = (self.counts[:n] == 1) & samples[:n]
        if not short.any():
            return self
        # The decodes' lines follow each other as they sample: a row's drafts stand behind it.
        behind = self.sampling[(self.sampling >= n) | short[np.minimum(self.sampling, n - 1)]]
        order = np.concatenate([np.flatnonzero(~short), behind])
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        ends = np.cumsum(self.counts[:n])
        inputs = np.concatenate([self.tokens[ends - 1], self.given])
        return StepRows(
            rows=self.rows[order],
            starts=self.starts[order],
            counts=self.counts[order],
            extends=n - int(short.sum()),
            tokens=self.tokens[~np.repeat(short, self.counts[:n])],
            sampling=place[self.sampling],
            draws=self.draws,
            given=inputs[behind[behind < len(inputs)]],
            lines=self.lines,
            states=None if self.states is None else self.states[order],
            held=self.held,
            asked=self.asked,
        )


def spare_states(info: ExecutorInfo) -> int:
    """Count the state slots beyond `ExecutorInfo.state_slots`: for lines whose next one is a draft.

    Every row has three slots at least, and no step has more lines than there may be rows.
    """
    return min(info.max_rows, info.state_slots // 3) if info.max_drafts else 0


def within(lines: Ints) -> Ints:
    """Count 0, 1, .. lines[i] - 1 for each i, one after another: [sum(lines)]."""
    return np.arange(int(lines.sum())) - np.repeat(np.cumsum(lines) - lines, lines)


def leading(flags: Flags) -> int:
    """Count the True values before the first False: flags bool[n]."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def check_blocks(plan: StepPlan, info: ExecutorInfo) -> None:
    """Check the blocks that move. Raises ValueError for a slot, a page or a state that is not there."""
    for blocks, least in (plan.saves, 0), (plan.loads, -1):
        for block in blocks:
            own = np.frombuffer(block.pages, dtype=np.int32)
            most, above = info.pages, info.window_pages
            fits = 0 < len(own) * info.page_size <= BLOCK and own.min() >= least and own.max() < most
            if block.form == STATE:
                fits = len(own) == 1 and 0 < own[0] <= info.state_slots and block.part >= 0
            elif block.form == WINDOW:
                fits = len(own) > 0 and own.min() >= 0 and own.max() < above
            if not fits or not 0 <= block.slot < info.host_blocks:
                raise ValueError(
                    f"moves a block of form {block.form} in slot {block.slot} and pages {own.tolist()}"
                )
