"""Constraints of the CUDA executor's rows: which are followed on the device, which on the host.

Automata are followed on the device, which knows each row's state; their rows stay in every step, two in
flight. Grammars, and automata that are too large for the device's tables, are followed on the host:
their next mask needs the token before, so such a row sits a step out until that is back. So does a row
whose constraint is being loaded. No other row waits.

The host follows all rows too, as results come back. So it knows where text is forced, beyond the tokens
in flight if these are forced as well, and proposes the rest as drafts (jump-forward). It launches no
kernel.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic

import msgspec
import numpy as np
import torch

from ramify.gpu.constraints.matcher import AutomatonConstraint, AutomatonMatcher, OutputConstraint
from ramify.gpu.constraints.rows import ALONE, PATIENCE, ConstrainedRows
from ramify.gpu.sampling.acceptance import inputs_of
from ramify.gpu.sampling.automata import ARENA_BYTES, Constrained, DeviceAutomata, lines_without
from ramify.gpu.step.rows import Ints, RowTable, StepRows
from ramify.gpu.step.staging import Int32s
from ramify.gpu.step.step_rows import Flags, Tokens, within
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, StepPlan

Settled = Callable[[Int32s, Int32s | None], None]
"""Takes the tokens that the S lines of a step sampled, and which of them are output (None: all)."""


class DeviceConstraints:
    """The constraints of the rows in `table`."""

    def __init__(self, info: ExecutorInfo, table: RowTable, device: torch.device) -> None:
        # A draft model counts what it runs beside each draft, and cannot count those of others.
        jumps = info.max_forced > 0 and info.drafter != "model"
        self.rows = ConstrainedRows(info.max_rows, info.vocab_size, jumps=jumps, prepare=self.prepare)
        self.automata = DeviceAutomata(info.max_rows + 1, info.vocab_size, device, ARENA_BYTES)
        self._table = table
        self._words = -(-info.vocab_size // 32)
        self._opening: dict[int, int] = {}  # rows that have not run yet, and their constraints
        self._on_device = np.zeros(info.max_rows, dtype=np.bool_)
        # of the steps that were launched and are not known: how many tokens a row gets at most, and
        # in how many of them it may get fewer
        self._ahead: Ints = np.zeros(info.max_rows, dtype=np.int64)
        self._unsure: Ints = np.zeros(info.max_rows, dtype=np.int64)
        self.stuck: dict[int, str] = {}  # of the last `lines`: those on which nothing is legal, and why
        self._guessing: set[int] = set()  # rows of the step under way with drafts that may be refused
        self._states: dict[int, list[int]] = {}  # of its rows with drafts: of each line

    def close(self) -> None:
        """Start no more work in other threads."""
        self.rows.close()

    def _forget(self, ident: int, _: object) -> None:
        self.automata.forget(ident)

    def prepare(self, ident: int, constraint: OutputConstraint) -> None:
        """Make the device's tables of a constraint, in the thread that made the constraint."""
        if isinstance(constraint, AutomatonConstraint):
            constraint.machine.elsewhere = self.automata.put(ident, constraint.machine)

    def on_device(self, row: int) -> bool | None:
        """Whether the device follows a row, not the host. None: the row has not run yet."""
        return None if row in self._opening else bool(self._on_device[row])

    # --- ahead of a step ---

    def begin(self, plan: StepPlan, step: StepRows) -> tuple[StepPlan, StepRows]:
        """Take rows that are not ready out of `step`, and give the drafts that constraints know.

        `step`: what the row table made of `plan`. Returns also the plan that is left, for a drafter.
        """
        self._guessing, self._states = set(), {}
        closes = np.frombuffer(plan.closes, dtype=np.int32).tolist() if plan.closes else []
        for row in closes:
            self.automata.close(row)
            self._opening.pop(row, None)
        forgets = np.frombuffer(plan.forgets, dtype=np.int32).tolist() if plan.forgets else []
        loading = {ident: self.rows.loading(ident) for ident in forgets}
        self.rows.begin(plan)
        for ident, loaded in loading.items():  # tables are put there first
            loaded.add_done_callback(partial(self._forget, ident))
        for opened in plan.opens:
            if opened.constraint:
                self._opening[opened.row] = opened.constraint
                self._ahead[opened.row] = self._unsure[opened.row] = 0
        if not self.rows.any:
            return plan, step
        rows = step.sampled_rows
        extends = int((step.sampling < step.extends).sum())  # that sample
        absent = self._absent(rows, alone=not step.extends)
        if absent is not None:
            lines = np.ones_like(rows) if step.lines is None else step.lines
            self._table.sat_out(rows[absent], lines[absent])
            step = step.without(absent)
            decodes = rows[extends:][~absent[extends:]]
            plan = msgspec.structs.replace(plan, decodes=decodes.astype(np.int32).tobytes())
            extends -= int(absent[:extends].sum())
        if plan.drafts and step.lines is not None:
            step = self._guess(step, extends)
        return plan, step

    def _absent(self, rows: Ints, alone: bool) -> Flags | None:
        """Find which of `rows` cannot sample in the step that begins now, bool [R]; None: all can.

        `alone`: the step has nothing else to do, so it may wait a little.
        """
        gone = np.zeros(len(rows), dtype=np.bool_)
        until = 0.0
        for at in np.flatnonzero(self.rows.active[rows]).tolist():
            row = int(rows[at])
            if row not in self._opening and self._on_device[row]:
                continue
            if row not in self._opening and self._ahead[row] == 0:
                until = until or monotonic() + PATIENCE
                gone[at] = not self.rows.wait(row, until)
            else:
                gone[at] = self._ahead[row] > 0 or not self.rows.ready(row)
            if not gone[at]:
                self._place(row)
        if not gone.any():
            return None
        if alone and gone.all():
            waiting = [row for row in rows.tolist() if not self.rows.ready(row)]
            if waiting and self.rows.wait(waiting[0], monotonic() + ALONE):
                return self._absent(rows, alone=False)
        self.rows.counters.sat_out += int(gone.sum())
        return gone

    def _place(self, row: int) -> None:
        """Choose device or host to follow a row that runs for the first time."""
        ident = self._opening.pop(row, None)
        if ident is None:
            return
        matcher = self.rows.matcher(row)
        self._on_device[row] = False
        if isinstance(matcher, AutomatonMatcher):
            machine, state = matcher.machine, matcher.state
            self.automata.put(ident, machine)
            forced = None if state in (machine.start, machine.end) else machine.forced_token(state)
            self._on_device[row] = self.automata.open(row, ident, state, forced)
            # One that found no place is looked ahead in a thread between its steps.
            matcher.elsewhere = bool(self._on_device[row])

    def _guess(self, step: StepRows, extends: int) -> StepRows:
        """Give the drafts of rows with constraints, and leave out those that are not known.

        The drafts of other rows are a drafter's.
        """
        rows = step.sampled_rows[extends:]
        held = np.flatnonzero(self.rows.active[rows])
        if not len(held) or step.lines is None:
            return step
        planned = step.lines[extends:] - 1
        counts = planned.copy()
        found: dict[int, list[int]] = {}
        for at in held.tolist():
            found[at] = self._forced(int(rows[at]), int(planned[at]))
            counts[at] = len(found[at])
        tokens = np.full(int(counts.sum()), NO_TOKEN, dtype=np.int32)
        ends = np.cumsum(counts)
        for at, own in found.items():
            tokens[ends[at] - len(own) : ends[at]] = own
        left = planned - counts
        some = left > 0
        self._table.settle(rows[some], left[some], left[some])
        step = step.fewer(counts).guessed(tokens)
        if step.lines is not None and (step.lines == 1).all():
            return replace(step, lines=None, given=np.empty(0, dtype=np.int32))
        return step

    def _forced(self, row: int, most: int) -> list[int]:
        """Propose up to `most` tokens: those that must follow the ones in flight, then likely ones."""
        if not most or not self.rows.jumps or self._unsure[row] or not self.rows.ready(row):
            return []
        matcher = self.rows.matcher(row)
        if not self._on_device[row] or not isinstance(matcher, AutomatonMatcher):
            found = self.rows.propose(np.array([row]), np.array([most])).get(0)
            if found is None:
                return []
            self._guessing.add(row)
            return found.tokens
        forced, likely = matcher.plan()
        ahead = int(self._ahead[row])
        if ahead > len(forced):
            return []
        tokens = [*forced, *likely][ahead : ahead + most]
        if not tokens:
            return []
        if ahead + len(tokens) > len(forced):
            self._guessing.add(row)
        machine, state, states = matcher.machine, matcher.state, list[int]()
        for token in [*forced[:ahead], *tokens]:
            states.append(state)
            state = machine.advance(state, token)
        self._states[row] = [*states[ahead:], state]
        return tokens

    # --- behind its model ---

    def lines(self, step: StepRows) -> Constrained | None:
        """Collect the constraints of the lines that sample; None: no line has one."""
        rows = step.rows[step.sampling]
        active = self.rows.active[rows]
        if not active.any():
            return None
        found = lines_without(len(rows), self._words)
        self.stuck = {}
        on_device = active & self._on_device[rows]
        found.kinds[on_device] = 0
        numbers = np.zeros(len(rows), dtype=np.int64) if step.lines is None else within(step.lines)
        for row, states in self._states.items():
            lines = np.flatnonzero(rows == row)
            found.states[lines] = np.array(states, dtype=np.int32)[numbers[lines]]
        held = np.flatnonzero(active & ~on_device)
        if len(held):
            self._mask(found, held, rows, step)
        return found

    def _mask(self, found: Constrained, held: Ints, rows: Ints, step: StepRows) -> None:
        """Set masks of the host for the lines `held`."""
        drafts = None
        if step.lines is not None:
            drafts = inputs_of(step)[held]
        masks = self.rows.masks(rows[held], drafts)
        if masks is None:
            return
        self.stuck = {int(held[line]): why for line, why in self.rows.stuck.items()}
        count = len(masks.lines)
        found.kinds[held[masks.lines]] = np.arange(1, 1 + count)
        found.kinds[held[masks.forced]] = np.arange(1 + count, 1 + count + len(masks.forced))
        only = np.zeros((len(masks.forced), self._words), dtype=np.int32)
        bits = (np.uint32(1) << (masks.tokens & 31).astype(np.uint32)).view(np.int32)
        only[np.arange(len(only)), masks.tokens >> 5] = bits
        words = np.concatenate([masks.words, only])
        found.words = words if len(words) else found.words

    def watch(self, step: StepRows) -> Settled | None:
        """Return the function that takes the launched step's outcome; None: no row has a constraint."""
        rows = step.sampled_rows
        held = np.flatnonzero(self.rows.active[rows])
        if not len(held):
            return None
        lines = np.ones(len(rows), dtype=np.int64) if step.lines is None else step.lines
        firsts, own, most = (np.cumsum(lines) - lines)[held], rows[held], lines[held]
        unsure = np.array([row in self._guessing for row in own.tolist()], dtype=np.int64)
        openings = self._table.openings[own]
        self._ahead[own] += most
        self._unsure[own] += unsure

        def settled(tokens: Int32s, kept: Int32s | None) -> None:
            same = (self._table.openings[own] == openings) & self.rows.active[own]
            if not same.any():
                return
            self._ahead[own[same]] -= most[same]
            self._unsure[own[same]] -= unsure[same]
            outputs: list[Tokens] = []
            for first, count in zip(firsts[same].tolist(), most[same].tolist(), strict=True):
                part = tokens[first : first + count]
                outputs.append(part if kept is None else part[kept[first : first + count] > 0])
            counts = np.array([len(part) for part in outputs], dtype=np.int64)
            self.rows.sampled(own[same], counts, np.concatenate(outputs))

        return settled
