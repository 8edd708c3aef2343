"""Copies of keys and values in 8-bit floats, widened once for the many new tokens that read them.

Each program of `triton_extend` would widen all keys of its own few queries, and FlashInfer reads no
codes. So a layer's keys are widened into memory of a fixed size first, which all layers share, and read
there like keys of floats: in pages of 64 tokens, those of one run side by side. Imported only where
Triton is used.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.attention.triton_extend import ITEM_FIELDS, extend_attention
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.programmatic_launch import overlap_options, wait
from ramify.gpu.step.inputs import Plan
from ramify.gpu.step.rows import Ints, RowTable
from ramify.gpu.step.step_rows import StepRows
from ramify.gpu.triton_fp8 import widened

_WORKSPACE = 256 << 20  # bytes of keys and values
WIDE_PAGE = 64
_COLUMNS = 16  # of the page table, a multiple: so one form of the kernel serves all steps
_FEWEST = 96  # new tokens of a run, for which writing its keys costs less than it saves


class WidenedKeys:
    """The memory of widened keys. `pages` int32[rows, columns]: the page table on the device."""

    def __init__(self, pages: Tensor, table: RowTable, shape: AttentionShape) -> None:
        self._pages, self._page_size = pages, table.page_size
        token = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        longest = -(-table.max_length // WIDE_PAGE)
        self.pages = min(_WORKSPACE // token // WIDE_PAGE, len(pages) * longest)
        size = self.pages * WIDE_PAGE, shape.kv_heads, shape.head_dim
        k, v = (pages.new_empty(size, dtype=shape.dtype) for _ in range(2))
        self._kept = LayerKV(k, v, WIDE_PAGE)
        self._warm = False

    def places(self, step: StepRows) -> tuple[Ints, Plan]:
        """Place each run's keys: its first page, which the others follow; widened int32[pages, 3]: row,
        first position, keys of each page. Nothing if keys are too many, or the new tokens too few.
        """
        rows, starts, counts = (part[: step.extends] for part in (step.rows, step.starts, step.counts))
        used = -(-(starts + counts) // WIDE_PAGE)
        total = int(used.sum())
        begins = np.cumsum(used) - used
        if total > self.pages or int(counts.sum()) < _FEWEST * len(rows):
            return begins, {}
        run = np.repeat(np.arange(len(rows)), used)
        position = (np.arange(total) - begins[run]) * WIDE_PAGE
        left = np.minimum((starts + counts)[run] - position, WIDE_PAGE)
        return begins, {"widened": np.stack([rows[run], position, left], axis=1).astype(np.int32)}

    def plan(self, step: StepRows, items: Plan) -> Plan:
        """Add to `items`, of `extend_items`, the places of the runs' keys, if they are widened.

        Items then name a run instead of its row. widened_pages int32[runs, columns].
        """
        begins, widened = self.places(step)
        if not widened:
            return items
        rows, used = step.rows[: step.extends], np.diff(np.append(begins, len(widened["widened"])))
        columns = -(-int(used.max()) // _COLUMNS) * _COLUMNS
        column = np.arange(columns)
        pages = np.where(column < used[:, None], begins[:, None] + column, 0).astype(np.int32)
        runs = np.zeros(int(rows.max()) + 1, dtype=np.int32)
        runs[rows] = np.arange(len(rows))
        named = items["items"].copy()
        named[:, 0] = runs[named[:, 0].astype(np.int64)]
        return items | widened | {"items": named, "widened_pages": pages}

    def warm(self, q: Tensor, kv: LayerKV, spec: AttentionSpec) -> None:
        """Load the kernels once, so that the first long prompt does not wait for them."""
        if self._warm or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._warm, none = True, self._pages.new_zeros
        kept, items = self.layer(kv, none((1, 3))), none((1, ITEM_FIELDS))
        extend_attention(q, q.flatten(1), kept, items, items[:0], none((1, _COLUMNS)), spec)

    def layer(self, kv: LayerKV, taken: Tensor) -> LayerKV:
        """Widen a layer's keys and values to floats."""
        kept = self._kept
        _, heads, dim = kv.k.shape
        _widen[(heads, len(taken))](
            kv.k, kv.v, kv.k_scales, kv.v_scales, taken, self._pages, kept.k, kept.v,
            self._pages.shape[1], HEADS=heads, DIM=dim, PAGE=self._page_size, KEYS=WIDE_PAGE,
            num_warps=4, **overlap_options(kv.k.device),
        )  # fmt: skip
        return kept


@triton.jit
def _widen(
    k_pool, v_pool, k_scales, v_scales, taken, pages, k_wide, v_wide, columns, HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Widen the keys of a page of the copy, all heads of a few keys at a time."""
    part, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(taken + index * 3).to(tl.int64)
    first = tl.load(taken + index * 3 + 1)
    count = tl.load(taken + index * 3 + 2)
    wait(OVERLAP)
    line = part * KEYS + tl.arange(0, KEYS)
    key = line // HEADS
    there = key < count
    position = first + key
    page = tl.load(pages + row * columns + position // PAGE, mask=there, other=0).to(tl.int64)
    own = (page * PAGE + position % PAGE) * HEADS + line % HEADS
    dims = tl.arange(0, DIM)[None, :]
    read = own[:, None] * DIM + dims
    written = (index * KEYS * HEADS + line)[:, None] * DIM + dims
    # all are asked for before the first is stored
    k_codes = tl.load(k_pool + read, mask=there[:, None], other=0.0)
    v_codes = tl.load(v_pool + read, mask=there[:, None], other=0.0)
    k_scale = tl.load(k_scales + own, mask=there, other=0.0)
    v_scale = tl.load(v_scales + own, mask=there, other=0.0)
    _store(k_wide + written, k_codes, k_scale, there)
    _store(v_wide + written, v_codes, v_scale, there)


@triton.jit
def _store(places, codes, scale, there):
    KIND: tl.constexpr = places.dtype.element_ty
    values = widened(codes, KIND, WHERE_THEY_ARE=True).to(tl.float32) * scale[:, None]
    values = tl.where(there[:, None], values, 0.0)  # of codes that were not loaded
    tl.store(places, values.to(KIND))
