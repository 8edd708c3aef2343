"""Latent attention of long extends on Triton: keys and values of each head are made first.

A library's product makes them from some latents at a time, in memory of a fixed size. A tile of queries
takes in these keys, and stores its sums for the next ones: so the parts are merged by their log-sum-exp.
Steps in a CUDA graph and the deterministic mode have one form, the absorbed one (`attention.latent`).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.attention.spec import AttentionShape
from ramify.gpu.attention.triton_paged import TritonPaged
from ramify.gpu.attention.triton_tile import LOG2E
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import RowTable, StepRows

_WORKSPACE = 64 << 20  # bytes of keys and values at a time
_EXPANDED = "expanded"  # in a plan: the step has such extends


@dataclass(slots=True)
class ExpandedRun:
    """An extend to expand: queries [first, last) of a step, from position `start` of `row` on."""

    row: int
    first: int
    last: int
    start: int
    slots: Tensor | None = None


class TritonLatent(TritonPaged):
    """`TritonPaged`, for absorbed queries, with `attend_expanded` for the queries of `runs`."""

    def __init__(
        self, pages: Tensor, table: RowTable, shape: AttentionShape, shares_keys: bool = True
    ) -> None:
        super().__init__(pages, table, shape, shares_keys)
        assert shape.latent is not None
        self._sizes = shape.latent
        width, value = shape.heads * (shape.latent.nope + shape.latent.value), shape.latent.value
        fits = _WORKSPACE // (width * shape.dtype.itemsize) // 64 * 64
        keys = min(max(16, fits), table.max_length)
        lines = table.step_tokens if table.max_length > keys else 0
        self._made = pages.new_empty((keys, width), dtype=shape.dtype)
        self._latents = pages.new_empty((keys, 1, shape.head_dim), dtype=shape.dtype)
        self._mixed = pages.new_empty((lines, shape.heads, value), dtype=torch.float32)
        self._sums = pages.new_empty((lines, shape.heads), dtype=torch.float32)
        self._page_size = table.page_size
        self._expand: list[ExpandedRun] = []
        self._tokens = 0  # of the step's extends, without padding
        self._warm = False

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        plan = super().plan(step, bucket, captured)
        self._tokens = len(step.tokens)
        self._expand = [] if captured or not step.extends else self._long(step)
        if self._expand:  # nothing is left for the absorbed form to do there
            for name, queries in (("items", 2), ("merges", 1)):
                array = plan[name]
                first: Any = array[:, queries - 1]
                for run in self._expand:
                    array[(first >= run.first) & (first < run.last), queries] = 0
            plan[_EXPANDED] = np.zeros(1, dtype=np.int32)
        return plan

    def _long(self, step: StepRows) -> list[ExpandedRun]:
        counts, starts = (part[: step.extends].tolist() for part in (step.counts, step.starts))
        ends, found = np.cumsum(counts).tolist(), []
        for row, start, count, last in zip(step.rows.tolist(), starts, counts, ends, strict=False):
            if self._sizes.pays_to_expand(count, start + count):
                found.append(ExpandedRun(row, last - count, last, start))
        return found

    def runs(self, step: StepInputs[Tensor]) -> list[ExpandedRun]:
        """Return those extends of the step planned last that are to be expanded."""
        return self._expand if _EXPANDED in step.plan else []

    def absorbed(self, step: StepInputs[Tensor], lines: int) -> list[slice]:
        """Return the step's lines that are not expanded."""
        runs = self.runs(step)
        if not runs:
            return [slice(0, lines)]
        edges = [0, *(edge for run in runs for edge in (run.first, run.last)), self._tokens]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        return [slice(a, b) for a, b in [*gaps, (step.extended, lines)] if a < b]

    def attend_expanded(
        self, queries: Tensor, q: Tensor, kv: LayerKV, heads: LatentHeads, growth: Tensor | None,
        step: StepInputs[Tensor], output: Tensor,
    ) -> None:  # fmt: skip
        """Attend for `runs`, into output [T, heads * value]. queries, q, growth: see `store_latents`."""
        if not self._warm:  # loads the kernel, at the start
            self._warm, none = True, slice(0, 0)
            grown = None if growth is None else growth[none]
            self.launch(queries[none], q[none], heads, grown, output[none], 0, 0, 0)
        up = heads.up.flatten(0, 1).t()
        most = len(self._made)
        for run in self.runs(step):
            if run.slots is None:
                run.slots = self._slots(run)
            lines, keys = slice(run.first, run.last), len(run.slots)
            grown = None if growth is None else growth[lines]
            for begin in range(0, keys, most):
                end = min(begin + most, keys)
                latents, made = self._latents[: end - begin], self._made[: end - begin]
                if kv.k_scales is None:
                    torch.index_select(kv.k, 0, run.slots[begin:end], out=latents)
                else:
                    latents.copy_(kv.read(run.slots[begin:end], latents.dtype)[0])
                torch.mm(latents[:, 0, : heads.rank], up, out=made)
                self.launch(queries[lines], q[lines], heads, grown, output[lines], run.start, begin, end)

    def _slots(self, run: ExpandedRun) -> Tensor:
        keys, pages = run.start + run.last - run.first, self._pages[run.row]
        if self._page_size == 1:
            return pages[:keys]
        position = torch.arange(keys, dtype=torch.int32, device=pages.device)
        page = pages.index_select(0, position // self._page_size)
        return page * self._page_size + position % self._page_size

    def launch(
        self, queries: Tensor, q: Tensor, heads: LatentHeads, growth: Tensor | None, output: Tensor,
        position: int, begin: int, end: int,
    ) -> None:  # fmt: skip
        """Launch the kernel for a chunk of keys, which `_made` and `_latents` hold."""
        sizes = self._sizes
        exact = q.dtype == torch.float32
        wide = max(sizes.nope, sizes.value) > 128
        tile = 16 if exact else 128
        keys = 16 if exact else 32 if wide else 64
        _expanded[(max(1, triton.cdiv(len(q), tile)), len(heads.up))](
            queries, q, self._made, self._latents, growth, output, self._mixed, self._sums,
            queries.stride(0), len(q), position, begin, end, heads.spec.scale * LOG2E,
            HEADS=len(heads.up), NOPE=sizes.nope, NOPE_BLOCK=triton.next_power_of_2(sizes.nope),
            VALUE=sizes.value, VALUE_BLOCK=triton.next_power_of_2(sizes.value), RANK=heads.rank,
            TAIL=sizes.turned, TILE=tile, KEYS=keys, PRECISION="ieee" if exact else "tf32",
            num_warps=4 if exact else 8, num_stages=2 if exact or wide else 3,
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_stride", "count", "position", "begin", "end"])
def _expanded(
    queries, q, made, latents, growth, output, mixed_parts, sums, q_stride, count, position, begin, end,
    scale, HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, RANK: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of queries at positions `position`.. of one head over the keys [begin, end).

    made [end - begin, HEADS, NOPE + VALUE]; latents [end - begin, RANK + TAIL]. Where more keys follow
    than `end`, the sums stay in mixed_parts float32[count, HEADS, VALUE] and sums float32[count, HEADS].
    """
    head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the longest reach first
    lines = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    real = lines < count
    last = end >= position + count
    stop = tl.minimum(end, position + tl.minimum((tile + 1) * TILE, count))
    if stop <= begin and not last:
        return
    nopes = tl.arange(0, NOPE_BLOCK)
    tails = tl.arange(0, TAIL)
    values = tl.arange(0, VALUE_BLOCK)
    asked = queries + lines[:, None] * q_stride + head * (NOPE + TAIL) + nopes[None, :]
    query = tl.load(asked, mask=real[:, None] & (nopes < NOPE)[None, :], other=0.0)
    if growth is not None:
        factor = tl.load(growth + lines, mask=real, other=0.0)
        query = (query.to(tl.float32) * factor[:, None]).to(query.dtype)
    ends = q + (lines[:, None] * HEADS + head) * (RANK + TAIL) + RANK + tails[None, :]
    tail = tl.load(ends, mask=real[:, None], other=0.0)
    at = lines * HEADS + head
    places = at[:, None] * VALUE + values[None, :]
    kept = real[:, None] & (values < VALUE)[None, :]
    before = real & (lines * 0 + begin > 0)
    top = tl.load(sums + at, mask=before, other=-float("inf"))
    total = (top > -float("inf")).to(tl.float32)
    mixed = tl.load(mixed_parts + places, mask=kept & before[:, None], other=0.0)
    reach = position + lines
    for key in range(begin, stop, KEYS):
        keys = key + tl.arange(0, KEYS)
        there = keys < stop
        line = (keys - begin).to(tl.int64)
        own = made + (line[:, None] * HEADS + head) * (NOPE + VALUE)
        k = tl.load(own + nopes[None, :], mask=there[:, None] & (nopes < NOPE)[None, :], other=0.0)
        behind = latents + line[:, None] * (RANK + TAIL) + RANK + tails[None, :]
        turned = tl.load(behind, mask=there[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        scores += tl.dot(tail, tl.trans(turned), input_precision=PRECISION)
        seen = there[None, :] & (keys[None, :] <= reach[:, None])
        scores = tl.where(seen, scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        v_at = own + NOPE + values[None, :]
        v = tl.load(v_at, mask=there[:, None] & (values < VALUE)[None, :], other=0.0)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    full = tl.where(total > 0, total, 1.0)
    mixed = mixed / full[:, None]
    if last:
        tl.store(output + places, mixed.to(output.dtype.element_ty), mask=kept)
    else:
        tl.store(mixed_parts + places, mixed, mask=kept)
        tl.store(sums + at, top + tl.log2(full), mask=real)
