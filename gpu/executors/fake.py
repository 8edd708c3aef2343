"""An executor without a model: known tokens, and a KV pool that shows when it was corrupted.

Instead of keys and values the fake keeps one 64-bit rolling hash in each slot: the hash at position p
covers the tokens 0..p. Hashes are read back through the row's page table, so a wrong page, a stale slot
or one that another request overwrote changes the output. The right output of a request is a pure
function of its tokens: see `FakeModel.expected`.

Faults, for tests: `faults` makes the KV of chosen tokens "not finite", and with it all KV that is
computed after it on the same pages, and the logits.

With `drafts` a row may run so many guesses in a step: the drafter knows the model, and is right as often
as `acceptance` says. The slot of a refused draft is overwritten, so that reading it breaks the chain.

With `state_slots` the model has fixed states too; with `window` and `window_pages` it has layers that
see `window` tokens, and keep them in a pool of their own. `host_blocks` is the number of slots in host
memory; moving a block takes `block_seconds`. See `fake_states`.

With `verify` each step reads the whole chain of each row that it runs (O(length)); without, only
the last slot, so that a step costs next to nothing. This file does not know torch.
"""

import time
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from msgspec import structs

from ramify.gpu.constraints.rows import ConstrainedRows
from ramify.gpu.drafting.base import Guesses
from ramify.gpu.drafting.host import HostDrafts
from ramify.gpu.executors.base import BadLogits, Counters, bad_logits
from ramify.gpu.executors.fake_model import FACTOR, FakeModel, Hashes
from ramify.gpu.executors.fake_states import FakeBlocks, FakeStates, FakeWindows
from ramify.gpu.executors.fake_tower import FakeTower
from ramify.gpu.sampling.acceptance import draft_ends, inputs_of, packed_rows
from ramify.gpu.sampling.randomness import mix
from ramify.gpu.step.rows import Ints, RowTable, Scored, StepRows
from ramify.gpu.step.step_rows import Tokens, within
from ramify.protocol.pictures import PictureSettings
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, OpenRow, StepPlan, StepResult, pack
from ramify.protocol.sampling import TokenLogprobs

_MASK = (1 << 64) - 1
_INVERSE = pow(FACTOR, -1, 1 << 64)
_STATE_BYTES, _WINDOW_BYTES = 2000, 64  # as they are counted: a state is stored in two parts
_CORRUPT = np.uint64(0xDEADBEEFCAFEF00D)


def _powers(base: int, count: int) -> Hashes:
    values = np.full(count, base, dtype=np.uint64)
    values[0] = 1
    return np.cumprod(values, dtype=np.uint64)


class FakePendingStep:
    """A step that is over at `done_at`, in seconds of `perf_counter`, as on a device."""

    def __init__(self, result: StepResult, done_at: float, bad: BadLogits | None = None) -> None:
        self._result = result
        self._done_at = done_at
        self._bad = bad

    def ready(self) -> bool:
        return self._done_at <= time.perf_counter()

    def result(self) -> StepResult:
        delay = self._done_at - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        if self._bad is not None:
            raise self._bad
        return self._result


class FakeDrafter:
    """Drafter whose guesses are right with probability `acceptance`, by a hash of what they follow.

    `generous`: the probability of one more guess, while fewer were made than were asked for.
    """

    name = "fake"

    def __init__(self, executor: "FakeExecutor", acceptance: float, generous: float) -> None:
        self._executor = executor
        self._acceptance = acceptance
        self._generous = generous

    def open(self, opened: OpenRow) -> None: ...

    def close(self, row: int) -> None: ...

    def runs(self, step: StepRows) -> None: ...

    def observe(self, rows: Ints, counts: Ints, tokens: Tokens) -> None: ...

    def continued(self, row: int, behind: Sequence[int], most: int) -> list[int]:
        return []

    def propose(self, rows: Ints, most: Ints) -> Guesses:
        guesses = [
            self._guess(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)
        ]
        counts = np.array([len(found) for found in guesses], dtype=np.int64)
        tokens = [token for found in guesses for token in found]
        return Guesses(counts, np.array(tokens, dtype=np.int32))

    def _guess(self, row: int, most: int) -> list[int]:
        if not most:
            return []
        executor, model = self._executor, self._executor.model
        table, one = executor.rows, np.array([row])
        token, found = executor.last(row), []
        begin = table.lengths[one]  # where the last token will run
        chain = executor.chain_before(one, begin)
        for i in range(most):
            chain = model.advance(chain, np.array([token], dtype=np.uint64))
            if self._dice(chain, 1) >= self._generous:
                break
            draw = table.drawn[one] + i
            token = int(model.choose(chain, executor.salts(one, draw))[0])
            if self._dice(chain, 2) >= self._acceptance:
                token = token + 1 if token + 1 < model.vocab_size else model.first
            found.append(token)
        return found

    @staticmethod
    def _dice(chain: Hashes, which: int) -> float:
        return float(mix(chain ^ np.uint64(which * FACTOR & _MASK))[0]) / 2.0**64


_PICTURES = PictureSettings(
    patch=16, unit=32, least=8 * 32**2, most=256 * 32**2, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    before=(4,), after=(5,), token=6, model="fake",
)  # fmt: skip


class FakeExecutor:
    """Executor of a FakeModel. Rows, checks and the interface are those of real executors.

    `drafts`: most that a row may have in a step; 0: there is no drafter. `acceptance`, `generous`: see
    `FakeDrafter`. `line_seconds`: time of each line of a step without extends, added to `step_seconds`.
    `sees`: pictures may be appended, each 8 to 256 tokens that are all the same. `look_seconds`: the
    tower's time for a picture.
    """

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        step_seconds: float = 0.0,
        verify: bool = True,
        context: int = 4096,
        page_size: int = 1,
        pages: int = 16384,
        max_rows: int = 256,
        step_tokens: int = 2048,
        drafts: int = 0,
        acceptance: float = 0.8,
        generous: float = 1.0,
        line_seconds: float = 0.0,
        state_slots: int = 0,
        window: int = 0,
        window_pages: int = 0,
        host_blocks: int = 0,
        block_seconds: float = 0.0,
        sees: bool = False,
        look_seconds: float = 0.0,
        picture_room: int = 1 << 20,
    ) -> None:
        self.model = model if model is not None else FakeModel()
        self.info = ExecutorInfo(
            model="fake",
            architecture="FakeModel",
            parameters=0,
            vocab_size=self.model.vocab_size,
            context=context,
            page_size=page_size,
            pages=pages,
            max_rows=max_rows,
            step_tokens=step_tokens,
            device="none",
            dtype="uint64",
            attention="hash",
            eos_token_ids=[self.model.eos],
            kv_bytes_per_token=8,
            load_seconds=0.0,
            constrains=True,
            drafter=FakeDrafter.name if drafts else "",
            max_drafts=drafts,
            state_slots=state_slots,
            state_bytes=_STATE_BYTES if state_slots else 0,
            window=window,
            window_pages=window_pages,
            pictures=_PICTURES if sees else None,
            picture_bytes=8 if sees else 0,
            picture_room=picture_room if sees else 0,
            window_bytes=_WINDOW_BYTES if window else 0,
            host_blocks=host_blocks,
            kv_stamp=blake2b(repr(self.model).encode(), digest_size=16).hexdigest(),
        )
        self.states = FakeStates(state_slots, max_rows) if state_slots else None
        self.windows = FakeWindows(window, window_pages) if window_pages else None
        self.tower = FakeTower(look_seconds) if sees else None
        self.counters = Counters()
        self.rows = RowTable(self.info)
        self.constraints = ConstrainedRows(max_rows, self.model.vocab_size)
        drafter = FakeDrafter(self, acceptance, generous) if drafts else None
        self.drafts = HostDrafts(self.rows, drafter, self.constraints, draft_ends(self.info))
        self.verify = verify
        self.corruptions = 0  # chains found broken; only counted with `verify`
        self.faults: dict[int, int] = {}  # token -> how many more times it spoils the KV
        self._spoiled = np.zeros(pages * page_size, dtype=np.bool_)  # slots that are not finite
        self._step_seconds = step_seconds
        self._line_seconds = line_seconds
        self._done_at = 0.0
        self._chain: Hashes = np.zeros(pages * page_size, dtype=np.uint64)
        self._tokens: Ints = np.zeros(pages * page_size, dtype=np.int64)
        kept = self._chain, self._tokens, self._spoiled
        self.blocks = FakeBlocks(host_blocks, page_size, kept, self.states, self.windows)
        if host_blocks:
            self.info = self.blocks.host.described(self.info)
        self._block_seconds = block_seconds
        self._last: Ints = np.zeros(max_rows, dtype=np.int64)
        self._seeds: Ints = np.zeros(max_rows, dtype=np.int64)
        self._greedy = np.ones(max_rows, dtype=np.bool_)
        self._logprobs: Ints = np.zeros(max_rows, dtype=np.int64)
        longest = step_tokens + max_rows + 1
        self._up, self._down = _powers(FACTOR, longest), _powers(_INVERSE, longest)

    def launch(self, plan: StepPlan) -> FakePendingStep:
        """Run the plan. Raises PlanError if it contradicts the rows."""
        begin = time.perf_counter()
        step = self.drafts.begin(plan)
        if self.states is not None:
            self.states.begin(plan)
        if plan.saves:
            self.blocks.save(plan.saves)
        if self.rows.copies is not None:
            self._copy(*self.rows.copies)
        lost = self.blocks.load(plan.loads) if plan.loads else []
        moved = self._block_seconds * (len(plan.saves) + len(plan.loads))
        for opened in plan.opens:
            self._seeds[opened.row] = opened.sampling.seed
            self._greedy[opened.row] = opened.sampling.greedy
            self._logprobs[opened.row] = opened.sampling.logprobs
        if self.tower is not None:
            self.tower.take(plan)
            self.tower.check(step, self.rows.pictures)
        chain = self._run(step)
        if self.windows is not None:
            self.windows.run(plan.step, step, self.rows, self._chain)
        seconds = self.seconds(step) + moved
        result = self._sample(plan.step, step, chain, seconds)
        if plan.saves or plan.loads:
            result = structs.replace(result, lost=pack(lost), load_us=int(moved * 1e6))
        if self.states is not None:
            self._end_states(plan.step, step, self.states)
        self.counters.count(step.computed)
        self._done_at = max(begin, self._done_at) + seconds
        return FakePendingStep(result, self._done_at, bad_logits(step, self.rows.requests, result))

    def _copy(self, sources: Ints, targets: Ints) -> None:
        for slots in (self._chain, self._tokens, self._spoiled):
            pages = slots.reshape(-1, self.rows.page_size)
            pages[targets] = pages[sources]

    def _end_states(self, number: int, step: StepRows, states: FakeStates) -> None:
        rows, lengths = states.rows, self.rows.lengths
        ends, before = lengths[rows], self.chain_before(rows, states.starts(step, lengths))
        behind = self.rows.slots_at(rows, np.maximum(ends - 1, 0))
        spoiled = self._spoiled[behind] & (ends > 0)
        states.end(number, before, self.chain_before(rows, ends), spoiled)

    def seconds(self, step: StepRows) -> float:
        """Compute how many seconds a step takes."""
        lines = 0 if step.extends else len(step.rows)
        return self._step_seconds + self._line_seconds * lines

    def close(self) -> None:
        """Release constraints and host memory."""
        self.constraints.close()
        self.blocks.host.close()

    def last(self, row: int) -> int:
        """Return the last token that the row sampled."""
        return int(self._last[row])

    def chain_before(self, rows: Ints, positions: Ints) -> Hashes:
        """Read the hash of each row's tokens before its position. uint64[len(rows)]."""
        behind = self._chain[self.rows.slots_at(rows, np.maximum(positions - 1, 0))]
        return np.where(positions > 0, behind, np.uint64(0))

    def salts(self, rows: Ints, draws: Ints) -> Hashes:
        """Compute the salts of output tokens `draws` of `rows`: see `FakeModel`. uint64[len(rows)]."""
        return self.model.salts(self._seeds[rows], draws, self._greedy[rows])

    def _run(self, step: StepRows) -> Hashes:
        """Write the new tokens' hashes; return the last one of each sequence. uint64[B]."""
        last: Hashes = np.empty(len(step.rows), dtype=np.uint64)
        offset = 0
        for i in range(step.extends):
            row, start, count = int(step.rows[i]), int(step.starts[i]), int(step.counts[i])
            last[i] = self._extend(row, start, step.tokens[offset : offset + count])
            offset += count
        if step.extends < len(step.rows):
            last[step.extends :] = self._decodes(step)
        if self.verify:
            ends = (step.starts + step.counts).tolist()
            for row, end in dict(zip(step.rows.tolist(), ends, strict=True)).items():
                if not self._intact(row, end):
                    self.corruptions += 1
                    last[step.rows == row] ^= _CORRUPT
        return last

    def _decodes(self, step: StepRows) -> Hashes:
        """Run each row's first line, then the second, ..: a draft reads what the one before wrote."""
        rows, starts = step.rows[step.extends :], step.starts[step.extends :]
        tokens = self._last[rows]
        given = step.given != NO_TOKEN
        tokens[: len(given)][given] = step.given[given]
        if step.lines is None:
            return self._decode(rows, starts, tokens)
        chain: Hashes = np.empty(len(rows), dtype=np.uint64)
        begins = np.append(True, rows[1:] != rows[:-1])
        which = np.arange(len(rows)) - np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
        for number in range(int(which.max()) + 1):
            lines = which == number
            chain[lines] = self._decode(rows[lines], starts[lines], tokens[lines])
        return chain

    def _extend(self, row: int, start: int, tokens: npt.NDArray[np.int32]) -> np.uint64:
        slots = self.rows.slots(row, start, start + len(tokens))
        before = self._chain[self.rows.slots(row, start - 1, start)[0]] if start else np.uint64(0)
        # h[i] = F^(i+1) * (h[-1] + sum over j <= i of g[j] / F^(j+1)), all modulo 2**64
        gains = mix(tokens.astype(np.uint64) + np.uint64(1)) * self._down[1 : len(tokens) + 1]
        sums = np.cumsum(gains, dtype=np.uint64) + before
        self._chain[slots] = sums * self._up[1 : len(tokens) + 1]
        self._tokens[slots] = tokens
        spoiled = bool(start) and bool(self._spoiled[self.rows.slots(row, start - 1, start)[0]])
        if self.states is not None:
            spoiled = spoiled or bool(self.states.spoils(np.array([row]))[0])
        self._spoil(slots, tokens, spoiled)
        return np.uint64(self._chain[slots[-1]])

    def _decode(self, rows: Ints, positions: Ints, tokens: Ints) -> Hashes:
        first = positions == 0  # the only token of a prompt, which sat a step out
        behind = self.rows.slots_at(rows, np.maximum(positions - 1, 0))
        before = np.where(first, np.uint64(0), self._chain[behind])
        chain = self.model.advance(before, tokens.astype(np.uint64))
        slots = self.rows.slots_at(rows, positions)
        self._chain[slots] = chain
        self._tokens[slots] = tokens
        self._spoiled[slots] = self._spoiled[behind] & ~first
        if self.states is not None:
            self._spoiled[slots] |= self.states.spoils(rows)
        if self.faults:
            self._spoiled[slots] |= [self._faulty(token) for token in tokens.tolist()]
        return chain

    def _spoil(self, slots: Ints, tokens: npt.NDArray[np.int32], before: bool) -> None:
        """Mark slots of new tokens that are not finite. `before`: the slot before them is not."""
        if not self.faults:
            self._spoiled[slots] = before
            return
        faulty = np.array([self._faulty(token) for token in tokens.tolist()])
        self._spoiled[slots] = np.logical_or.accumulate(faulty) | before

    def _faulty(self, token: int) -> bool:
        left = self.faults.get(token, 0)
        if left:
            self.faults[token] = left - 1
        return left > 0

    def _intact(self, row: int, length: int) -> bool:
        """Whether each slot's hash follows from the slot before it and its own token."""
        slots = self.rows.slots(row, 0, length)
        chain = self._chain[slots]
        before = np.concatenate([np.zeros(1, dtype=np.uint64), chain[:-1]])
        tokens = self._tokens[slots].astype(np.uint64)
        return bool((self.model.advance(before, tokens) == chain).all())

    def _sample(self, number: int, step: StepRows, chain: Hashes, seconds: float) -> StepResult:
        rows, positions = step.rows[step.sampling], (step.starts + step.counts - 1)[step.sampling]
        salts = self.salts(rows, step.draws)
        chosen = self.model.choose(chain[step.sampling], salts)
        if step.extends:  # for rows that sit the step out
            extended, last = step.last_extended
            self._last[extended] = last
        masks = self.constraints.masks(rows, None if step.lines is None else inputs_of(step))
        if masks is not None:
            legal = masks.flags(self.model.vocab_size)
            chosen[masks.lines] = self.model.choose_among(
                chain[step.sampling][masks.lines], salts[masks.lines], legal
            )
            chosen[masks.forced] = masks.tokens
        slots = self.rows.slots_at(rows, positions)
        tokens = np.where(self._spoiled[slots], NO_TOKEN, chosen).astype(np.int64)
        accepted = self.drafts.end(step, tokens)
        kept = accepted.kept
        self._last[rows[kept]] = np.maximum(chosen[kept], 0)  # of a row the last one stays
        if step.lines is not None:
            self._chain[slots[~kept & (within(step.lines) > 0)]] ^= _CORRUPT
        forced = self.constraints.forced(kept)
        tokens, rows = tokens[kept], rows[kept]
        wanted = self._logprobs[rows]
        logprobs: list[TokenLogprobs | None] = []
        if wanted.any():
            logprobs = [
                self._token_logprobs(token, k)
                for token, k in zip(tokens.tolist(), wanted.tolist(), strict=True)
            ]
        return StepResult(
            step=number,
            tokens=tokens.astype(np.int32).tobytes(),
            computed=step.computed,
            elapsed_us=int(seconds * 1e6),
            logprobs=logprobs,
            scores=self._score(step, step.scored) if step.scored is not None else b"",
            forced=forced,
            late_us=self.drafts.late_us,
            reasons=accepted.reasons,
            **packed_rows(step, accepted),
        )

    def _score(self, step: StepRows, scored: Scored) -> bytes:
        counts = step.counts[: step.extends]
        firsts = np.cumsum(counts) - counts
        lines = scored.lines[scored.which]
        extend = np.searchsorted(firsts, lines, "right") - 1
        positions = step.starts[extend] + lines - firsts[extend]
        slots = self.rows.slots_at(scored.rows, positions)
        chain = self._chain[slots]
        found = np.empty((len(lines), 1 + 2 * scored.most), dtype=np.float32)
        found[:, 0] = self.model.scores(chain, scored.targets.astype(np.uint64))
        if scored.most:
            found[:, 1::2], found[:, 2::2] = self.model.likely(chain, scored.most)
        found[self._spoiled[slots]] = np.nan
        kept: npt.NDArray[np.float32] = found[np.arange(found.shape[1]) < 1 + 2 * scored.tops[:, None]]
        return kept.tobytes()

    def _token_logprobs(self, token: int, k: int) -> TokenLogprobs | None:
        """Make up log-probabilities: the sampled token has 1/2, the ids after it 1/4, 1/8, ..."""
        if not k:
            return None
        ids = [(token + i) % self.model.vocab_size for i in range(k)]
        values = [-(i + 1) * 0.6931471805599453 for i in range(k)]
        return TokenLogprobs(logprob=values[0], top_ids=ids, top_logprobs=values)
