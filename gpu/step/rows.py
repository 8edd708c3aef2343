"""The rows of running requests and how a StepPlan changes them: page tables, lengths, seeds.

Shared by every executor. Checks each plan against the rows before a token is computed, so that
a bug elsewhere stops here with a name and never writes into another request's pages. Host side,
numpy only: this file does not know tensors, models or what a page holds.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ramify.gpu.step.step_rows import NO_TOKENS, Tokens, check_blocks, spare_states, within
from ramify.gpu.step.step_rows import Ints as Ints
from ramify.gpu.step.step_rows import Scored as Scored
from ramify.gpu.step.step_rows import StepRows as StepRows
from ramify.protocol.pictures import PlacedPicture
from ramify.protocol.plan import ExecutorInfo, ExtendRow, GrowRow, OpenRow, StepPlan

PageTable = npt.NDArray[np.int32]
T = TypeVar("T")

# A finished request decodes at most one token too many while its last result is on the way.
OVERRUN = 1


class PlanError(Exception):
    """A plan contradicts the rows: a bug of the planner, never of a client.

    The executor that raised it refuses all later plans: what its rows hold is no longer what
    the planner thinks they hold.
    """


class RowTable:
    """The page tables, lengths and sampling positions of `max_rows` rows.

    `pages[r, :page_counts[r]]` is row r's page table. `lengths[r]` tokens have their KV in the
    pool, counting the tokens of steps that were launched. Of drafts, `lengths` and `drawn` count all
    as if they were accepted, until `settle` says how many were: `unsettled[r]` at most are not.
    """

    def __init__(self, info: ExecutorInfo) -> None:
        self.page_size = info.page_size
        self.pool_pages = info.pages
        self.vocab_size = info.vocab_size
        self.step_tokens = info.step_tokens
        self.state_slots = info.state_slots
        self._spare_states = spare_states(info)
        self.max_drafts = max(info.max_drafts, info.max_forced)
        self.max_guessed = info.max_drafts  # those of a drafter
        self.max_length = info.context + OVERRUN
        columns = min(256, -(-self.max_length // info.page_size))
        self.pages: PageTable = np.zeros((info.max_rows, columns), dtype=np.int32)
        self.window_pages, self._info = info.window_pages, info
        # of window pages, in the same columns; -1: no step reads it
        self.windows: PageTable = self.pages[: info.max_rows if info.window_pages else 0].copy()
        self.page_counts: Ints = np.zeros(info.max_rows, dtype=np.int64)
        self.lengths: Ints = np.zeros(info.max_rows, dtype=np.int64)
        self.drawn: Ints = np.zeros(info.max_rows, dtype=np.int64)  # output tokens sampled so far
        self.unsettled: Ints = np.zeros(info.max_rows, dtype=np.int64)  # drafts
        self.requests: Ints = np.full(info.max_rows, -1, dtype=np.int64)  # -1: the row is closed
        self._limits: Ints = np.zeros(info.max_rows, dtype=np.int64)  # how long its pages let a row get
        self.openings: Ints = np.zeros(info.max_rows, dtype=np.int64)  # how often a row was opened
        self._decodable = np.zeros(info.max_rows, dtype=np.bool_)  # its last token was sampled here
        self.pictures: dict[int, list[PlacedPicture]] = {}  # of rows that have some
        self._broken: str | None = None
        # the decodes of the last plan as packed, and their rows, counts and lines, if it had no extends:
        # they can be decoded again, until a row is closed, opened or extended
        self._steady: tuple[bytes, Ints, Ints, Ints] | None = None
        # parts that the last plan wrote: (row, first, last) of `pages`, for a copy on a device
        self.updates: list[tuple[int, int, int]] = []
        self.copies: tuple[Ints, Ints] | None = None  # pages, and where they are copied to

    def apply(self, plan: StepPlan) -> StepRows:
        """Apply the whole plan: `change`, then `advance`. Returns what runs."""
        self.change(plan)
        return self.advance(plan)

    def change(self, plan: StepPlan) -> None:
        """Apply closes, opens and grows, check the decodes.

        Raises PlanError, after which every later call raises as well.
        """
        self._checked(plan, self._change)

    def advance(self, plan: StepPlan, found: "Ints | None" = None) -> StepRows:
        """Check the extends, and advance the lengths. Raises as `change` does.

        `found`: the drafts that there are for each decode, at most as many as planned; None: all.
        """
        return self._checked(plan, lambda plan: self._advance(plan, found))

    def _checked(self, plan: StepPlan, apply: Callable[[StepPlan], T]) -> T:
        if self._broken is not None:
            raise PlanError(f"step {plan.step}: an earlier plan failed: {self._broken}")
        try:
            return apply(plan)
        except PlanError as error:
            self._broken = f"step {plan.step}: {error}"
            raise PlanError(self._broken) from None
        except ValueError as error:  # bytes that are not a whole number of int32
            self._broken = f"step {plan.step}: {error}"
            raise PlanError(self._broken) from error

    def _change(self, plan: StepPlan) -> None:
        self.updates, self.copies = [], self._copies(plan.copies) if plan.copies else None
        if plan.saves or plan.loads:
            check_blocks(plan, self._info)
        if plan.closes or plan.opens or plan.extends:
            self._steady = None
        if plan.closes:
            self._close(np.frombuffer(plan.closes, dtype=np.int32))
        for opened in plan.opens:
            self._open(opened)
        for grow in plan.grows:
            self._grow(grow)
        if self._steady is None or self._steady[0] != plan.decodes:
            self._check_decodes(np.frombuffer(plan.decodes, dtype=np.int32))
        if plan.drafts:
            self._check_guesses(np.frombuffer(plan.drafts, dtype=np.int32), len(plan.decodes) // 4)

    def settle(self, rows: Ints, drafted: Ints, refused: Ints, openings: "Ints | None" = None) -> None:
        """Take back `refused` [R] of the `drafted` [R] drafts that a step ran in `rows` [R].

        `drafted` counts what was planned: drafts that were not found are refused ones. `openings` [R]:
        those of `rows` when the step was launched; a row that was opened again since is left out.
        Raises PlanError as `apply` does.
        """
        if openings is not None:
            same = self.openings[rows] == openings
            rows, drafted, refused = rows[same], drafted[same], refused[same]
        wrong = (refused < 0) | (refused > drafted) | (drafted > self.unsettled[rows])
        if wrong.any():
            at = int(np.argmax(wrong))
            self._broken = (f"row {rows[at]} settles {drafted[at]} drafts and refuses {refused[at]}: "
                            f"it has {self.unsettled[rows[at]]}")  # fmt: skip
            raise PlanError(self._broken)
        self.unsettled[rows] -= drafted
        self.lengths[rows] -= refused
        self.drawn[rows] -= refused

    def sat_out(self, rows: Ints, lines: Ints) -> None:
        """Take back the planned `lines` [R] (1 + drafts) of `rows` [R], which sat the last step out.

        Each runs its last token next: again, or for the first time.
        """
        self.unsettled[rows] -= lines - 1
        self.lengths[rows] -= lines
        self.drawn[rows] -= lines

    def slots(self, row: int, start: int, stop: int) -> Ints:
        """Look up the KV slots of positions [start, stop) of `row`. int64[stop - start]."""
        if self.page_size == 1:
            return self.pages[row, start:stop].astype(np.int64)
        page, offset = np.divmod(np.arange(start, stop), self.page_size)
        pages: Ints = self.pages[row, page].astype(np.int64)
        return pages * self.page_size + offset

    def slots_at(self, rows: Ints, positions: Ints) -> Ints:
        """Look up the KV slot of one position of each row. int64[len(rows)]."""
        if self.page_size == 1:
            slots: Ints = self.pages[rows, positions].astype(np.int64)
            return slots
        page, offset = np.divmod(positions, self.page_size)
        pages: Ints = self.pages[rows, page].astype(np.int64)
        return pages * self.page_size + offset

    def _copies(self, packed: bytes) -> tuple[Ints, Ints]:
        pages = np.frombuffer(packed, dtype=np.int32).astype(np.int64)
        if len(pages) % 2 or pages.min() < 0 or pages.max() >= self.pool_pages:
            raise PlanError(f"copies pages {pages.tolist()}: pairs below {self.pool_pages} are due")
        sources, targets = pages[::2], pages[1::2]
        if len(np.unique(targets)) < len(targets):
            raise PlanError(f"copies twice to one of pages {targets.tolist()}")
        return sources, targets

    def _states(self, plan: StepPlan, sequences: int) -> Ints | None:
        """Check and return the state slots that the plan's B sequences read and write: [B, 2]."""
        if not self.state_slots:
            if plan.states:
                raise PlanError("names state slots: the model has none")
            return None
        if any(extend.drafts for extend in plan.extends):
            raise PlanError("drafts tokens of an extend: the model's states cannot be taken back")
        pairs = np.frombuffer(plan.states, dtype=np.int32).astype(np.int64)
        if len(pairs) != 2 * sequences:
            raise PlanError(f"{len(pairs)} state slots for {sequences} sequences: pairs are due")
        sources, targets = pairs[::2], pairs[1::2]
        if sequences and (pairs.min() < 0 or pairs.max() > self.state_slots or targets.min() < 1):
            raise PlanError(
                f"reads state slots {sources.tolist()}, writes {targets.tolist()}: there are 0, "
                f"which is only read, to {self.state_slots}"
            )
        if len(np.unique(targets)) < sequences or np.isin(sources, targets).any():
            raise PlanError(f"reads state slots {sources.tolist()} and writes {targets.tolist()}: "
                            "one is written twice, or read as well")  # fmt: skip
        return pairs.reshape(-1, 2)

    def _close(self, rows: Tokens) -> None:
        for row in rows.tolist():
            self._require_open(row, "closes")
            self.requests[row] = -1
            self._decodable[row] = False
            self.pictures.pop(row, None)

    def _open(self, opened: OpenRow) -> None:
        row = opened.row
        if not 0 <= row < len(self.requests):
            raise PlanError(f"opens row {row}: there are {len(self.requests)} rows")
        if self.requests[row] >= 0:
            raise PlanError(f"opens row {row} for request {opened.request}: it is open "
                            f"for request {self.requests[row]}")  # fmt: skip
        if opened.request < 0 or opened.sampled < 0 or opened.cached < 0:
            raise PlanError(f"opens row {row}: request, sampled and cached must not be negative")
        self.requests[row] = opened.request
        self.openings[row] += 1
        self.page_counts[row] = self._limits[row] = self.unsettled[row] = 0
        self.drawn[row] = opened.sampled
        self.lengths[row] = opened.cached
        if opened.pictures:
            self.pictures[row] = opened.pictures
        self._append_pages(row, opened.pages, opened.windows)
        if opened.cached > self.page_counts[row] * self.page_size:
            raise PlanError(f"opens row {row} with {opened.cached} cached tokens in "
                            f"{self.page_counts[row]} pages of {self.page_size}")  # fmt: skip

    def _grow(self, grow: GrowRow) -> None:
        self._require_open(grow.row, "grows")
        self._append_pages(grow.row, grow.pages, grow.windows)

    def _append_pages(self, row: int, packed: bytes, windows: bytes) -> None:
        added = np.frombuffer(packed, dtype=np.int32)
        if not len(added):
            return
        if added.min() < 0 or added.max() >= self.pool_pages:
            raise PlanError(f"row {row} gets pages {added.min()} to {added.max()}: "
                            f"the pool has {self.pool_pages}")  # fmt: skip
        old = int(self.page_counts[row])
        new = old + len(added)
        if (new - 1) * self.page_size >= self.max_length:  # a device's copy has no room for them
            raise PlanError(f"row {row} gets {new} pages of {self.page_size}: more than the "
                            f"{self.max_length} tokens that a row may have need")  # fmt: skip
        columns = self.pages.shape[1]
        if new > columns:  # doubles, so the copies stay rare
            more = ((0, 0), (0, max(new - columns, columns)))
            self.pages, self.windows = np.pad(self.pages, more), np.pad(self.windows, more)
        self.pages[row, old:new] = added
        if windows or self.window_pages:
            self._append_windows(row, old, new, np.frombuffer(windows, dtype=np.int32))
        self.page_counts[row] = new
        self._limits[row] = min(new * self.page_size, self.max_length)
        self.updates.append((row, old, new))

    def _append_windows(self, row: int, old: int, new: int, added: PageTable) -> None:
        first = new - len(added)
        fits = first == old if old else 0 <= first < new
        if not fits or added.min() < 0 or added.max() >= self.window_pages:
            raise PlanError(f"row {row} gets window pages {added[:4]}.. beside {new - old} pages")
        self.windows[row, old:first] = -1
        self.windows[row, first:new] = added

    def _advance(self, plan: StepPlan, found: "Ints | None") -> StepRows:
        extends = plan.extends
        steady = self._steady is not None and self._steady[0] == plan.decodes
        if not extends:
            step = self._decode_rows(plan.decodes)
        else:
            step = self._mixed_rows(extends, plan.decodes)
        if len(step.tokens) > self.step_tokens:
            raise PlanError(f"extends by {len(step.tokens)} tokens: at most {self.step_tokens} a step")
        rows = step.rows
        step.states = self._states(plan, len(rows))
        if len(rows) == 0 and not plan.drafts:
            return step
        ends = step.starts + step.counts
        if not steady and len(rows) > 1 and len(set(rows.tolist())) != len(rows):
            raise PlanError("a row stands twice among the extends and decodes")
        if plan.drafts or any(extend.drafts for extend in extends):
            drafts = self._drafts(plan, step, found)
            if found is None or drafts.any():
                total = int(drafts.sum())
                if step.states is not None and total > self._spare_states:
                    raise PlanError(f"runs {total} drafts: there are {self._spare_states} states")
                step = step.drafted(drafts)
                rows, ends = step.rows, step.starts + step.counts
        beyond = ends > self._limits[rows]
        if np.count_nonzero(beyond):
            row = int(rows[np.argmax(beyond)])
            if self._limits[row] == self.max_length:
                raise PlanError(f"row {row} would be longer than {self.max_length} tokens")
            raise PlanError(f"row {row} has {self.page_counts[row]} pages of {self.page_size}: "
                            f"too few for the tokens that it runs")  # fmt: skip
        if step.lines is not None:
            self._count_drafts(step, ends)
            return step
        self.lengths[rows] = ends
        sampled = rows if len(step.sampling) == len(rows) else rows[step.sampling]
        step.draws = self.drawn[sampled]
        self.drawn[sampled] += 1
        return step

    def _count_drafts(self, step: StepRows, ends: Ints) -> None:
        """Advance the rows of a step with drafts."""
        assert step.lines is not None
        sampled, last = step.sampled_rows, np.cumsum(step.lines) - 1
        self.lengths[step.rows[: step.extends]] = ends[: step.extends]
        self.lengths[sampled] = ends[step.sampling[last]]
        step.draws = np.repeat(self.drawn[sampled], step.lines) + within(step.lines)
        self.drawn[sampled] += step.lines
        self.unsettled[sampled] += step.lines - 1

    def _drafts(self, plan: StepPlan, step: StepRows, found: "Ints | None") -> Ints:
        """Check the planned drafts. Returns how many each row that samples has: [R]."""
        decodes = len(step.rows) - step.extends
        drafts = np.frombuffer(plan.drafts, dtype=np.int32).astype(np.int64)
        if not plan.drafts:
            drafts = np.zeros(decodes, dtype=np.int64)
        for extend in plan.extends:
            self._check_drafts(extend)
        given = [extend.drafts for extend in plan.extends if extend.sample]
        drafts = np.concatenate([np.array(given, dtype=np.int64), drafts])
        lines = len(drafts) + int(drafts.sum())
        if lines > len(self.requests):
            raise PlanError(
                f"{lines} lines sample, drafts included: at most {len(self.requests)} a step"
            )
        if found is not None:
            drafts[len(given) :] = found
        return drafts

    def _check_guesses(self, drafts: Tokens, decodes: int) -> None:
        if len(drafts) != decodes:
            raise PlanError(f"{len(drafts)} numbers of drafts for {decodes} decodes")
        if decodes and (drafts.min() < 0 or drafts.max() > self.max_drafts):
            raise PlanError(
                f"{drafts.min()} to {drafts.max()} drafts: a decode has 0 to {self.max_drafts}"
            )

    def _check_drafts(self, extend: ExtendRow) -> None:
        row, tokens = extend.row, len(extend.tokens) // 4
        if extend.drafts and not extend.sample:
            raise PlanError(f"row {row} has {extend.drafts} drafts in an extend that does not sample")
        if not 0 <= extend.drafts < tokens:
            raise PlanError(
                f"row {row} has {extend.drafts} drafts among the {tokens} tokens of an extend"
            )
        if extend.drafts and (extend.places or extend.targets):
            raise PlanError(f"row {row} has targets and drafts in one extend")

    def _decode_rows(self, packed: bytes) -> StepRows:
        if self._steady is None or self._steady[0] != packed:
            decodes = np.frombuffer(packed, dtype=np.int32).astype(np.int64)
            self._steady = packed, decodes, np.ones_like(decodes), np.arange(len(decodes))
        _, rows, counts, sampling = self._steady
        return StepRows(rows, self.lengths[rows], counts, 0, NO_TOKENS, sampling, draws=rows)

    def _mixed_rows(self, extends: list[ExtendRow], packed: bytes) -> StepRows:
        decodes = np.frombuffer(packed, dtype=np.int32).astype(np.int64)
        runs = [np.frombuffer(extend.tokens, dtype=np.int32) for extend in extends]
        for extend, run in zip(extends, runs, strict=True):
            self._check_extend(extend, run)
        rows = np.array([extend.row for extend in extends], dtype=np.int64)
        sampling = [i for i, extend in enumerate(extends) if extend.sample]
        self._decodable[rows] = False
        self._decodable[rows[sampling]] = True
        all_rows = np.concatenate([rows, decodes])
        counts = np.ones(len(all_rows), dtype=np.int64)
        counts[: len(runs)] = [len(run) for run in runs]
        return StepRows(
            rows=all_rows,
            starts=self.lengths[all_rows],
            counts=counts,
            extends=len(runs),
            tokens=np.concatenate(runs),
            sampling=np.concatenate(
                [np.array(sampling, dtype=np.int64), np.arange(len(runs), len(all_rows))]
            ),
            draws=all_rows,
            scored=self._scored(extends, runs),
        )

    def _scored(self, extends: list[ExtendRow], runs: list[Tokens]) -> Scored | None:
        """Collect the targets whose log-probabilities the extends ask for; None: there are none."""
        lines: list[Ints] = []
        targets: list[Tokens] = []
        rows: list[Ints] = []
        tops: list[Ints] = []
        first = 0  # line of the extend's first token
        for extend, run in zip(extends, runs, strict=True):
            if extend.places or extend.targets:
                places = np.frombuffer(extend.places, dtype=np.int32).astype(np.int64)
                wanted = np.frombuffer(extend.targets, dtype=np.int32)
                self._check_targets(extend, len(run), places, wanted)
                lines.append(places - extend.start + first)
                targets.append(wanted)
                rows.append(np.full(len(wanted), extend.row, dtype=np.int64))
                tops.append(np.full(len(wanted), extend.tops, dtype=np.int64))
            first += len(run)
        if not lines:
            return None
        unique, which = np.unique(np.concatenate(lines), return_inverse=True)
        return Scored(unique, which, np.concatenate(targets), np.concatenate(rows), np.concatenate(tops))

    def _check_targets(self, extend: ExtendRow, count: int, places: Ints, targets: Tokens) -> None:
        if len(places) != len(targets):
            raise PlanError(f"row {extend.row} has {len(places)} places for {len(targets)} targets")
        if places[0] < extend.start or places[-1] >= extend.start + count:
            raise PlanError(f"row {extend.row} scores behind positions {places[0]} to {places[-1]}, but "
                            f"runs {extend.start} to {extend.start + count - 1}")  # fmt: skip
        if (np.diff(places) < 0).any():
            raise PlanError(f"row {extend.row} has targets whose places do not ascend")
        if not 0 <= extend.tops <= self.vocab_size:
            raise PlanError(f"row {extend.row} wants {extend.tops} likely tokens")
        if targets.min() < 0 or targets.max() >= self.vocab_size:
            raise PlanError(f"row {extend.row} scores tokens {targets.min()} to {targets.max()}: "
                            f"the vocabulary has {self.vocab_size}")  # fmt: skip

    def _check_extend(self, extend: ExtendRow, run: Tokens) -> None:
        self._require_open(extend.row, "extends")
        if extend.start != self.lengths[extend.row]:
            raise PlanError(f"row {extend.row} is extended at position {extend.start}: "
                            f"its length is {self.lengths[extend.row]}")  # fmt: skip
        if self.unsettled[extend.row]:
            raise PlanError(f"row {extend.row} is extended before its drafts were settled")
        if not len(run):
            raise PlanError(f"row {extend.row} is extended by no token")
        if run.min() < 0 or run.max() >= self.vocab_size:
            raise PlanError(f"row {extend.row} is extended by tokens {run.min()} to {run.max()}: "
                            f"the vocabulary has {self.vocab_size}")  # fmt: skip

    def _check_decodes(self, decodes: Tokens) -> None:
        if not len(decodes):
            return
        if decodes.min() < 0 or decodes.max() >= len(self.requests):
            raise PlanError(f"decodes rows {decodes.tolist()}: there are {len(self.requests)} rows")
        if not self._decodable[decodes].all():
            row = int(decodes[np.argmin(self._decodable[decodes])])
            raise PlanError(f"decodes row {row}, which has no sampled token" if self.requests[row] >= 0
                            else f"decodes row {row}, which is not open")  # fmt: skip

    def _require_open(self, row: int, verb: str) -> None:
        if not 0 <= row < len(self.requests) or self.requests[row] < 0:
            raise PlanError(f"{verb} row {row}, which is not open")
