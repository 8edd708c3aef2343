"""Drafts from the row's own tokens, on the device: those after the best earlier match of its end.

The match is the earlier place whose last tokens, up to four, agree with most of the row's last ones; the
latest among equals (prompt lookup, Saxena 2023; suffix matching as in Oliaro et al. 2024). The tokens
that follow it are the guess; where they run into the end of the row they start over, so a text that
repeats itself is continued. Without a match the last token is guessed again: the lines run anyway.

Tokens are read through the page table, as keys are. So a row sees all tokens of its branch, whichever
row computed them, and forks, rollbacks and shared prefixes need nothing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.step_rows import StepRows
from ramify.protocol.config import MOST_DRAFTS

_REACH = 16384  # tokens back that are searched: one program does it, in the time of some kernels
_BLOCK = 1024


class DeviceNgramDrafter(DeviceDrafter):
    """Drafter by repetition on the device. It reads the tokens of pages, so it guesses for every row."""

    name = "ngram"
    reads_tokens = True

    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        self.warm(inputs, verifier)

    def warm(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        first, lines = inputs.extended, inputs.bucket.decodes
        if verifier.tokens is None:
            raise ValueError("the tokens of the KV slots are not kept")
        _propose[(lines,)](
            inputs.input_ids[first:], inputs.rows[first:], inputs.positions[first:], verifier.inputs,
            verifier.tokens, verifier.pages, lines, verifier.pages.shape[1], verifier.inputs.shape[1],
            PAGE=verifier.page_size, REACH=_REACH, BLOCK=_BLOCK, MOST=MOST_DRAFTS, num_warps=8,
        )  # fmt: skip


@triton.jit
def _token(tokens, pages, row, columns, position, there, PAGE: tl.constexpr):
    page = tl.load(pages + row * columns + position // PAGE, mask=there, other=0).to(tl.int64)
    return tl.load(tokens + page * PAGE + position % PAGE, mask=there, other=-1)


@triton.jit(do_not_specialize=["lines"], do_not_specialize_on_alignment=["ids", "rows", "positions"])
def _propose(
    ids, rows, positions, inputs, tokens, pages, lines, columns, width, PAGE: tl.constexpr,
    REACH: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write a decode's drafts, in the program of its first line; the drafts' lines follow it."""
    line = tl.program_id(0)
    row = tl.load(rows + line).to(tl.int64)
    number = 1 + tl.arange(0, MOST)
    place = line + number
    drafts = tl.load(ids + place, mask=place < lines, other=0) == -1 - row - number * width
    count = tl.sum(drafts.to(tl.int32), 0)
    if (tl.load(ids + line) != -1 - row) | (count == 0):
        return
    last = tl.load(positions + line)  # of the row's last token, which is kept there
    one = tl.zeros([1], tl.int32)
    end0 = _token(tokens, pages, row, columns, last + one, one == 0, PAGE)
    end1 = _token(tokens, pages, row, columns, last - 1 + one, one < last, PAGE)
    end2 = _token(tokens, pages, row, columns, last - 2 + one, one + 1 < last, PAGE)
    end3 = _token(tokens, pages, row, columns, last - 3 + one, one + 2 < last, PAGE)
    best = tl.full([BLOCK], -1, tl.int64)
    for begin in range(tl.maximum(last - REACH, 0), last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < last
        alike = inside & (_token(tokens, pages, row, columns, at, inside, PAGE) == end0)
        length = alike.to(tl.int64)
        # few places pass the first comparison, and only those are looked at further
        alike = alike & (at >= 1)
        alike = alike & (_token(tokens, pages, row, columns, at - 1, alike, PAGE) == end1)
        length += alike.to(tl.int64)
        alike = alike & (at >= 2)
        alike = alike & (_token(tokens, pages, row, columns, at - 2, alike, PAGE) == end2)
        length += alike.to(tl.int64)
        alike = alike & (at >= 3)
        alike = alike & (_token(tokens, pages, row, columns, at - 3, alike, PAGE) == end3)
        length += alike.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) | at.to(tl.int64), -1))
    found = tl.max(best, 0)
    period = 1
    if found >= 0:
        period = last - (found & 0xFFFFFFFF).to(tl.int32)
    source = last - period + 1 + (number - 1) % period
    guess = _token(tokens, pages, row, columns, source, drafts, PAGE)
    tl.store(inputs + number * width + row, tl.maximum(guess, 0), mask=drafts)
