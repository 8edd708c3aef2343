"""The kernels between the forward passes of a draft model that guesses on the device.

The first pass runs each row's missing tokens, then its last one; every later pass runs the token that
the one before has sampled. Positions and tokens are those of the step that the drafts are for, which are
right on the device alone: a token is that of a slot, or the row's last one.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import StepInputs

_BLOCK = 128


@dataclass(slots=True)
class Lines:
    """The inputs of a pass: int32[lines] each. `places`: [2, lines], rows and positions together."""

    ids: Tensor
    rows: Tensor
    positions: Tensor
    places: Tensor

    @classmethod
    def of(cls, count: int, device: torch.device) -> "Lines":
        ids, rows, positions = lines = torch.zeros((3, count), dtype=torch.int32, device=device)
        return cls(ids, rows, positions, lines[1:])

    def named(self, count: int) -> dict[str, Tensor]:
        """Return the first `count` lines, by the names of `StepInputs`."""
        return {
            "input_ids": self.ids[:count], "rows": self.rows[:count], "positions": self.positions[:count]
        }  # fmt: skip


class Chain:
    """The passes of up to `rows` rows, the first one of up to `lines` lines, on one device.

    `first` and `next`: inputs of the first pass and of later ones. `runs` and `ends` int32: the
    attention's plan of the first pass, and which of its lines are the rows' last ones. `temperatures`,
    `uniforms`: of the pass's draws; `tokens`: what it sampled, -1 where logits were not finite.
    """

    def __init__(
        self, rows: int, lines: int, most: int, verifier: Verifier, vocabularies: tuple[int, int]
    ) -> None:
        """`most`: drafts of a row; `vocabularies`: sizes, the model's and the drafter's."""
        device = verifier.pages.device

        def integers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._verifier, self._vocabularies, self._rows = verifier, vocabularies, rows
        self._spare = len(verifier.pages) - 1
        self.first, self.next = Lines.of(lines, device), Lines.of(rows, device)
        self.runs, self.ends = integers(lines), integers(rows)
        self.own, self.tokens = integers(rows), integers(rows)  # rows of the table; samples
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.uniforms = torch.zeros(rows, dtype=torch.float64, device=device)
        self._starts, self._most, self._number = integers(rows), integers(rows), integers(rows)
        self._draws = torch.zeros((most, rows), dtype=torch.float64, device=device)

    def begin(self, sent: dict[str, Tensor], inputs: StepInputs[Tensor]) -> None:
        """Lay out the first pass. `sent`: int32, see `device_model`; `inputs`: the step's."""
        verifier, lines, rows = self._verifier, len(sent["targets"]), len(sent["ends"])
        assert verifier.tokens is not None
        first, draws = self.first, self._draws
        _begin[(triton.cdiv(max(lines, rows), _BLOCK),)](
            sent["targets"], sent["backs"], sent["runs"], sent["ends"], sent["most"], sent["samples"],
            inputs.rows, inputs.positions, inputs.temperatures, inputs.uniforms, verifier.inputs,
            verifier.tokens, verifier.pages, first.ids, first.rows, first.positions, self.runs,
            self.ends, self.own, self._starts, self._most, self._number, self.temperatures,
            self.uniforms, draws, lines, rows, draws.shape[1], verifier.pages.shape[1],
            self._vocabularies[1], self._spare, PAGE=verifier.page_size, MOST=len(draws), BLOCK=_BLOCK,
        )  # fmt: skip

    def step_back(self, rows: int, known: Tensor) -> None:
        """Move the first pass back by a position, for rows that are `known`; others become padding."""
        lines = self.first
        real = known[lines.rows[:rows].long()]
        lines.positions[:rows] = torch.where(real, lines.positions[:rows] - 1, 0)
        lines.rows[:rows] = torch.where(real, lines.rows[:rows], self._spare)
        self._starts[:rows] -= 1

    def advance(self, rows: int) -> None:
        """Make what the first `rows` rows sampled their next draft, and the next pass's input."""
        inputs, following, draws = self._verifier.inputs, self.next, self._draws
        known, vocabulary = self._vocabularies
        _advance[(triton.cdiv(rows, _BLOCK),)](
            self.tokens, self.own, self._starts, self._most, self._number, draws, inputs, following.ids,
            following.rows, following.positions, self.uniforms, rows, inputs.shape[1], draws.shape[1],
            known, vocabulary, self._spare, BLOCK=_BLOCK,
        )  # fmt: skip

    def fill(self, inputs: StepInputs[Tensor]) -> None:
        """Read the tokens of a step of extends, whose positions are right, from their slots."""
        verifier, lines = self._verifier, len(inputs.rows)
        _fill[(triton.cdiv(lines, _BLOCK),)](
            inputs.input_ids, inputs.rows, inputs.positions, verifier.tokens, verifier.pages, lines,
            verifier.pages.shape[1], self._vocabularies[1], PAGE=verifier.page_size, BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _held(tokens, pages, row, columns, position, there, PAGE: tl.constexpr):
    """Load the token at a row's position."""
    page = tl.load(pages + row.to(tl.int64) * columns + position // PAGE, mask=there, other=0)
    return tl.load(tokens + page.to(tl.int64) * PAGE + position % PAGE, mask=there, other=0)


@triton.jit(do_not_specialize=["lines", "count", "room", "vocabulary", "spare"])
def _begin(
    targets, backs, runs, ends, most, samples, rows, positions, temperatures, uniforms, inputs, tokens,
    pages, ids, first_rows, first_positions, first_runs, first_ends, own, starts, wanted, numbers, heats,
    now, draws, lines, count, room, columns, vocabulary, spare, PAGE: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Lay out a first pass. targets: the step's line of each line's row's last token, -1: padding."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < lines
    target = tl.load(targets + at, mask=inside, other=-1)
    real = target >= 0
    back = tl.load(backs + at, mask=inside, other=0)
    row = tl.load(rows + target, mask=real, other=0)
    row = tl.where(real, row, spare)
    position = tl.load(positions + target, mask=real, other=0) - tl.where(real, back, 0)
    id = _held(tokens, pages, row, columns, position, real & (back > 0), PAGE)
    last = tl.load(inputs + row, mask=real & (back == 0), other=0)
    id = tl.where(back > 0, id, last)
    tl.store(ids + at, tl.maximum(tl.minimum(id, vocabulary - 1), 0), mask=inside)
    tl.store(first_rows + at, row, mask=inside)
    tl.store(first_positions + at, position, mask=inside)
    tl.store(first_runs + at, tl.load(runs + at, mask=inside, other=0), mask=inside)

    within = at < count
    asked = tl.load(most + at, mask=within, other=0)
    drafted = asked > 0
    end = tl.load(ends + at, mask=within, other=0)
    line = tl.load(targets + end, mask=drafted, other=0)
    sample = tl.load(samples + at, mask=within, other=0)
    tl.store(first_ends + at, end, mask=within)
    of = tl.load(rows + line, mask=drafted, other=0)
    tl.store(own + at, tl.where(drafted, of, spare), mask=within)
    tl.store(starts + at, tl.load(positions + line, mask=drafted, other=0), mask=within)
    tl.store(wanted + at, asked, mask=within)
    tl.store(numbers + at, tl.zeros([BLOCK], tl.int32), mask=within)
    tl.store(heats + at, tl.load(temperatures + sample, mask=drafted, other=0.0), mask=within)
    for number in tl.static_range(MOST):
        draw = tl.load(uniforms + sample + number, mask=asked > number, other=0.0)
        tl.store(draws + number * room + at, draw, mask=within)
        if number == 0:
            tl.store(now + at, draw, mask=within)


@triton.jit(do_not_specialize=["count", "width", "room", "known", "vocabulary", "spare"])
def _advance(
    sampled, own, starts, wanted, numbers, draws, inputs, ids, rows, positions, now, count, width, room,
    known, vocabulary, spare, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    number = tl.load(numbers + at, mask=inside, other=0) + 1
    most = tl.load(wanted + at, mask=inside, other=0)
    row = tl.load(own + at, mask=inside, other=0)
    token = tl.load(sampled + at, mask=inside, other=0)
    token = tl.maximum(tl.minimum(token, known - 1), 0)
    tl.store(inputs + number * width + row, token, mask=inside & (number <= most))
    goes = number < most
    tl.store(numbers + at, number, mask=inside)
    tl.store(ids + at, tl.where(goes, tl.minimum(token, vocabulary - 1), 0), mask=inside)
    tl.store(rows + at, tl.where(goes, row, spare), mask=inside)
    position = tl.load(starts + at, mask=inside, other=0) + number
    tl.store(positions + at, tl.where(goes, position, 0), mask=inside)
    tl.store(now + at, tl.load(draws + number * room + at, mask=inside & goes, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["lines", "vocabulary"])
def _fill(
    ids, rows, positions, tokens, pages, lines, columns, vocabulary, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < lines
    row = tl.load(rows + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0)
    id = _held(tokens, pages, row, columns, position, inside, PAGE)
    tl.store(ids + at, tl.maximum(tl.minimum(id, vocabulary - 1), 0), mask=inside)
