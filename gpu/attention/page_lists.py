"""A kernel that packs rows of the page table for kernels which read `indptr` and `indices`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_PROGRAMS = 8  # of one sequence


def fill_page_lists(pages: Tensor, rows: Tensor, indptr: Tensor, indices: Tensor) -> None:
    """Set indices[indptr[i] : indptr[i + 1]] to the first pages of row rows[i].

    pages int32[rows, columns]; rows int32[B], indptr int32[B + 1], all on the device. The host
    sends the lengths alone: 64 lists of 4,096 pages are a MiB.
    """
    _fill[(len(rows), _PROGRAMS)](
        pages, rows, indptr, indices, pages.shape[1], BLOCK=_BLOCK, PROGRAMS=_PROGRAMS, num_warps=4
    )


@triton.jit
def _fill(
    pages, rows, indptr, indices, columns, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence).to(tl.int64)
    first = tl.load(indptr + sequence)
    count = tl.load(indptr + sequence + 1) - first
    for start in range(tl.program_id(1) * BLOCK, count, PROGRAMS * BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < count
        page = tl.load(pages + row * columns + places, mask=inside)
        tl.store(indices + first + places, page, mask=inside)
