"""Drafts on the device: corrections of what the host assumed of them, and their acceptance.

Two steps are in flight, so the host lays a step out before it knows how many drafts of the one before
were accepted. It assumes all of them: `refused` counts, row by row, those that were not, and `correct`
takes them off positions and draw indices before the step's first kernel reads these. After the sampler
`accept` walks each row's lines as long as the sampled token is what the next line ran. Each is one
launch, outside the CUDA graphs, and nothing waits. A step without drafts, after steps without drafts,
launches neither.

How drafts are guessed is the drafters' business: `inputs` holds what they wrote.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.sampling.triton_random import uniform
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import Ints, StepRows
from ramify.gpu.step.staging import Array, Upload

_BLOCK = 128
_NEVER = tl.constexpr(-9)  # nothing samples it


class Verifier:
    """Corrector and verifier of drafts on the device.

    `inputs` int32[1 + max_drafts, rows + 1]: each row's last sampled token, then its drafts. A step's
    input -(row + 1) - n * (rows + 1) means inputs[n, row]. `pages` int32[rows + 1, columns]: the page
    table; its last row is for padding. `slots`: of the KV pool, if `tokens` int32[slots] is to hold the
    token of each, for drafters that read it. `ends`: drafts that are always refused.
    """

    def __init__(
        self,
        max_drafts: int,
        pages: Tensor,
        page_size: int,
        slots: int | None = None,
        ends: tuple[int, ...] = (),
    ) -> None:
        self.pages, self.page_size = pages, page_size
        self._rows = len(pages)
        device = pages.device
        self.tokens: Tensor | None = None
        if slots is not None:
            self.tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._ends = torch.tensor(ends, dtype=torch.int32, device=device)
        self.inputs = torch.zeros((1 + max_drafts, self._rows), dtype=torch.int32, device=device)
        self.refused = torch.zeros(self._rows, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(self._rows, dtype=torch.int64, device=device)
        self._upload = Upload(device)
        # On the host: which rows have their entries in `refused` and `seeds`, and how many of the
        # refused drafts are known, which are off the table's lengths already.
        self._tracked = np.zeros(self._rows, dtype=np.bool_)
        self._known: Ints = np.zeros(self._rows, dtype=np.int64)

    @property
    def last(self) -> Tensor:
        """The token that each row sampled last: int32[rows + 1]."""
        return self.inputs[0]

    # --- the host's part ---

    def opened(self, rows: list[int]) -> None:
        """Forget what is known of newly opened rows, which is of earlier requests."""
        self._tracked[rows] = False

    def known(self, rows: Ints, refused: Ints) -> None:
        """Note that the host took `refused` drafts off the lengths of `rows`, which are still open."""
        self._known[rows] += refused

    def track(self, entry: int, rows: Ints, seeds: Ints) -> None:
        """Make `rows` known to the device, before a step with drafts or a corrected one.

        `seeds`: of all rows.
        """
        new = np.unique(rows[~self._tracked[rows]])
        if not len(new):
            return
        self._tracked[new], self._known[new] = True, 0
        sent = self._upload.send(entry, rows=new.astype(np.int32), seeds=seeds[new])
        _track[(triton.cdiv(len(new), _BLOCK),)](
            sent["rows"], sent["seeds"], self.refused, self.seeds, len(new), BLOCK=_BLOCK
        )

    def lay(self, inputs: StepInputs[Array], step: StepRows) -> None:
        """Let the lines that a drafter fills read its drafts."""
        found, numbers = step.left_to_guess()
        lines = found - step.extends + inputs.extended
        inputs.input_ids[lines] = -1 - step.rows[found] - numbers * self._rows

    def assume(self, inputs: StepInputs[Array], step: StepRows) -> None:
        """Set positions and draws as if all drafts had been accepted: see `correct`.

        Indices of draws take the place of random numbers.
        """
        known = self._known[inputs.rows.astype(np.int64)]
        inputs.positions[:] = inputs.positions.astype(np.int64) + known
        rows = step.rows[step.sampling]
        inputs.uniforms.view(np.int64)[: len(rows)] = step.draws + self._known[rows]

    def assumed(self, rows: Ints, draws: Ints) -> Ints:
        """Return `draws` [S] of `rows` as if all drafts had been accepted."""
        return draws + self._known[rows]

    # --- the device's part ---

    def correct(self, inputs: StepInputs[Tensor]) -> None:
        """Take the refused drafts off what `assume` laid out; remember the tokens that run."""
        rows = inputs.rows_that_sample
        lines, samples = len(inputs.rows), len(rows)
        remember = self.tokens is not None
        _correct[(triton.cdiv(max(lines, samples), _BLOCK),)](
            inputs.input_ids, inputs.rows, inputs.positions, inputs.uniforms.view(torch.int64), rows,
            self.refused, self.seeds, self.inputs, self.tokens, self.pages, lines, samples,
            self.pages.shape[1], self._rows, PAGE=self.page_size, REMEMBER=remember, BLOCK=_BLOCK,
        )  # fmt: skip

    def remember(self, inputs: StepInputs[Tensor]) -> None:
        """Write the tokens that run, except drafts, to `tokens`, if there is that. Positions are right.

        Part of every step, so that drafters know what rows ran without them. A CUDA graph may hold it.
        """
        if self.tokens is None:
            return
        lines = len(inputs.rows)
        _remember[(triton.cdiv(lines, _BLOCK),)](
            inputs.input_ids, inputs.rows, inputs.positions, self.inputs, self.tokens, self.pages, lines,
            self.pages.shape[1], self._rows, PAGE=self.page_size, BLOCK=_BLOCK,
        )  # fmt: skip

    def correct_draws(self, asks: Tensor) -> None:
        """Correct the draws of `triton_truncation`'s asks int32[N, 16] as `correct` does."""
        _correct_draws[(triton.cdiv(len(asks), _BLOCK),)](
            asks, asks.view(torch.int64), self.refused, self.seeds, len(asks), BLOCK=_BLOCK
        )

    def accept(self, inputs: StepInputs[Tensor], samples: int, tokens: Tensor, kept: Tensor) -> None:
        """Compare what the first `samples` lines sampled with what the lines behind them ran.

        tokens int32[S or more]; kept int32[S or more] becomes 1 for each line whose token is output.
        """
        remember = self.tokens is not None
        _accept[(samples,)](
            inputs.input_ids, inputs.rows_that_sample, inputs.positions, inputs.sampled_lines, tokens,
            self.inputs, self.refused, kept, self.tokens, self.pages, samples, self.pages.shape[1],
            self._ends, ENDS=len(self._ends), MOST=triton.next_power_of_2(self._rows),
            PAGE=self.page_size, REMEMBER=remember,
            num_warps=1,
        )  # fmt: skip

    def record(self, asks: Tensor, tokens: Tensor, kept: Tensor, counts: Tensor) -> None:
        """Count the output of the penalised lines among `asks`, after `accept`.

        counts int32[lines, V] as of `token_counts`.
        """
        _record[(len(asks),)](asks, tokens, kept, counts, counts.shape[1], num_warps=1)


@triton.jit(do_not_specialize=["count"])
def _track(rows, own, refused, seeds, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    tl.store(refused + row, tl.zeros([BLOCK], tl.int32), mask=inside)
    tl.store(seeds + row, tl.load(own + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["lines", "samples"])
def _correct(
    ids, rows, positions, draws, sampling, refused, seeds, inputs, tokens, pages, lines, samples,
    columns, width, PAGE: tl.constexpr, REMEMBER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < lines
    row = tl.load(rows + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0)
    position -= tl.load(refused + row, mask=inside, other=0)
    tl.store(positions + at, position, mask=inside)
    if REMEMBER:
        _keep(ids, at, row, position, inside, inputs, tokens, pages, columns, width, PAGE)
    sampled = at < samples
    own = tl.load(sampling + at, mask=sampled, other=0)
    index = tl.load(draws + at, mask=sampled, other=0) - tl.load(refused + own, mask=sampled, other=0)
    drawn = uniform(tl.load(seeds + own, mask=sampled, other=0), index)
    tl.store(draws + at, drawn.to(tl.int64, bitcast=True), mask=sampled)


@triton.jit
def _keep(
    ids, at, row, position, inside, inputs, tokens, pages, columns, width, PAGE: tl.constexpr
):  # fmt: skip
    id = tl.load(ids + at, mask=inside, other=0)
    # a token, or the row's last one; drafts are remembered when they are accepted
    inside = inside & (id >= -width)
    id = tl.where(id < 0, tl.load(inputs + row, mask=inside, other=0), id)
    page = tl.load(pages + row.to(tl.int64) * columns + position // PAGE, mask=inside, other=0)
    tl.store(tokens + page.to(tl.int64) * PAGE + position % PAGE, id, mask=inside)


@triton.jit(do_not_specialize=["lines"])
def _remember(
    ids, rows, positions, inputs, tokens, pages, lines, columns, width, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < lines
    row = tl.load(rows + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0)
    _keep(ids, at, row, position, inside, inputs, tokens, pages, columns, width, PAGE)


@triton.jit(do_not_specialize=["count"])
def _correct_draws(asks, wide, refused, seeds, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(asks + at * 16 + 1, mask=inside, other=0)
    index = tl.load(wide + at * 8 + 6, mask=inside, other=0) - tl.load(
        refused + row, mask=inside, other=0
    )
    drawn = uniform(tl.load(seeds + row, mask=inside, other=0), index)
    tl.store(wide + at * 8 + 6, drawn.to(tl.int64, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=["samples"])
def _accept(
    ids, rows, positions, sampled_lines, sampled, inputs, refused, kept, tokens, pages, samples, columns,
    ends, ENDS: tl.constexpr, MOST: tl.constexpr, PAGE: tl.constexpr, REMEMBER: tl.constexpr,
):  # fmt: skip
    """Accept a row's drafts, in the program of its first line: a row's lines follow each other."""
    first = tl.program_id(0)
    row = tl.load(rows + first)
    if tl.load(rows + first - 1, mask=first > 0, other=-1) == row:
        return
    number = tl.arange(0, MOST)
    place = first + number
    own = tl.load(rows + place, mask=place < samples, other=-1) == row
    lines = tl.sum(own.to(tl.int32), 0)
    token = tl.load(sampled + place, mask=own, other=-1)
    behind = number + 1 < lines
    following = place + 1
    if sampled_lines is not None:
        following = tl.load(sampled_lines + place + 1, mask=behind, other=0)
    id = tl.load(ids + following, mask=behind, other=0)
    draft = tl.load(inputs + tl.maximum(-id - 1, 0), mask=behind & (id < 0), other=0)
    draft = tl.where(id < 0, draft, id)
    for index in tl.static_range(ENDS):
        draft = tl.where(draft == tl.load(ends + index), _NEVER, draft)
    accepted = tl.min(tl.where(behind & (token == draft), MOST, number), 0)
    tl.store(kept + place, (number <= accepted).to(tl.int32), mask=own)
    final = tl.sum(tl.where(number == accepted, token, 0), 0)
    tl.store(inputs + row, tl.maximum(final, 0))
    tl.store(refused + row, tl.load(refused + row) + lines - 1 - accepted)
    if REMEMBER:
        line = first
        if sampled_lines is not None:
            line = tl.load(sampled_lines + first)
        position = tl.load(positions + line) + 1 + number
        true = number < accepted
        page = tl.load(pages + row.to(tl.int64) * columns + position // PAGE, mask=true, other=0)
        tl.store(tokens + page.to(tl.int64) * PAGE + position % PAGE, draft, mask=true)


@triton.jit
def _record(asks, tokens, kept, counts, vocabulary):
    ask = asks + tl.program_id(0) * 16
    line, own = tl.load(ask), tl.load(ask + 2).to(tl.int64)
    token = tl.load(tokens + line)
    if (own >= 0) & (token >= 0) & (tl.load(kept + line) > 0):
        place = counts + own * vocabulary + token
        tl.atomic_or(place, 1)
        tl.atomic_add(place, 2)
