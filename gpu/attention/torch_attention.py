"""Attention over pages with torch alone: the CPU's back end, and the reference for the others.

Decodes: see `segments`. On a CPU every part is one call of torch's flash kernel, which also
returns the log-sum-exp that merges the parts; elsewhere all keys are gathered and padded into one
call. Extends run one by one: causal within themselves, over the whole of what came before.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.attention.segments import Segments, Slots, cut
from ramify.gpu.attention.spec import WINDOW_SLOTS, AttentionShape, AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import Ints, RowTable, StepRows
from ramify.gpu.step.staging import Array
from ramify.gpu.step.step_rows import Tokens
from ramify.gpu.vision.placing import RowPictures, seen_behind

_QUERY_BLOCK = 512  # queries of a masked extend that run at once: bounds the mask
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class Extend:
    """An extend: queries [first, last) of one sequence at positions start.., over `slots`."""

    first: int
    last: int
    keys: "slice | Tensor"  # a slice of the pool, or slots to gather
    mask: Tensor | None  # [queries, keys]; None: plainly causal, no prefix

    @property
    def count(self) -> int:
        """The number of keys."""
        return self.keys.stop - self.keys.start if isinstance(self.keys, slice) else len(self.keys)


@dataclass(slots=True)
class _SharedRead:
    """A call of the kernel: sequences `readers` over a run of slots. None: over their padded rest."""

    keys: "slice | Tensor"
    readers: Tensor | None  # None: all decodes, in order
    count: int
    mask: Tensor | None = None


@dataclass(slots=True)
class _Decodes:
    """The calls for decodes in layers of one window size."""

    parts: list[_SharedRead]
    owners: Tensor | None  # sequence of each part's output, None if nothing is to be merged


class WindowTable:
    """The window pages of `table`, in the form of a page table; steps read no position without one."""

    page_size = 1

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.pool_pages = table.window_pages

    def slots(self, row: int, start: int, stop: int) -> Ints:
        return self._table.windows[row, start:stop].astype(np.int64)

    def slots_at(self, rows: Ints, positions: Ints) -> Ints:
        slots: Ints = self._table.windows[rows, positions].astype(np.int64)
        return slots


class TorchAttention:
    """Torch's back end: page tables are on the host, in `table`; keys and values on `device`."""

    static_extends = False

    def __init__(self, table: RowTable, shape: AttentionShape, device: torch.device) -> None:
        self._table = WindowTable(table) if shape.windowed else table
        self._pictures: RowPictures = table.pictures
        self._slots_name = WINDOW_SLOTS if shape.windowed else "slots"
        self._shape = shape
        self._heads, self._kv_heads, self._dim = shape.heads, shape.kv_heads, shape.head_dim
        self._group = shape.group
        self._kinds = list(dict.fromkeys((spec.window, spec.whole) for spec in shape.specs))
        self._whole = shape.whole
        self._padding_slot = self._table.pool_pages * self._table.page_size
        self._device = device
        self._in_place = device.type == "cpu"
        self._first_decode = 0
        self._extends: dict[tuple[int | None, bool], list[Extend]] = {}
        self._decodes: dict[int | None, _Decodes] = {}

    def room(self, bucket: Bucket) -> Plan:
        return {}  # nothing is captured

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        """Plan a step. Returns slots, or window_slots, int64[T]: those of the new tokens' KV.

        All other parts of the plan stay here.
        """
        n = step.extends
        ends = np.cumsum(step.counts)
        firsts = (ends - step.counts).tolist()
        self._first_decode = int(ends[n - 1]) if n else 0
        self._extends, self._decodes = {}, {}
        lengths = step.starts + step.counts
        further = seen_behind(step, self._pictures) if self._whole else None
        for window, whole in self._kinds:
            behind = further if whole else None
            self._extends[window, whole] = [
                block
                for row, first, start, end in zip(
                    step.rows[:n].tolist(), firsts, step.starts.tolist(), lengths.tolist(), strict=False
                )
                for block in self._plan_extend(row, first, start, end, window, behind)
            ]
            if len(step.rows) > n and window not in self._decodes:
                self._decodes[window] = self._plan_decodes(step.rows[n:], lengths[n:], window)
        if not n:
            return {self._slots_name: self._table.slots_at(step.rows, step.starts)}
        rows = np.repeat(step.rows, step.counts)
        positions = np.arange(ends[-1]) + np.repeat(step.starts - ends + step.counts, step.counts)
        return {self._slots_name: self._table.slots_at(rows, positions)}

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        pass

    def unlike_decodes(self, most: int) -> list[int]:
        return []

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        extends = self._extends[spec.window, spec.whole]
        if not extends:
            return self._decode(self._decodes[spec.window], kv, q, spec)
        outputs = [self._extend(extend, kv, q, spec) for extend in extends]
        if spec.window in self._decodes:
            outputs.append(self._decode(self._decodes[spec.window], kv, q[self._first_decode :], spec))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    # --- extends ---

    def _plan_extend(
        self, row: int, first: int, start: int, end: int, window: int | None, behind: Tokens | None
    ) -> list[Extend]:
        """Plan the tokens from line `first` on, at positions [start, end) of `row`.

        `behind` [T]: how many tokens after itself each sees; None: none.
        """
        last = first + end - start
        behind = None if behind is None or not behind[first:last].any() else behind[first:last]
        if start == 0 and (window is None or end <= window) and behind is None:
            return [Extend(first, last, self._keys(self._table.slots(row, 0, end)), None)]
        blocks = []
        for begin in range(start, end, _QUERY_BLOCK):
            stop = min(begin + _QUERY_BLOCK, end)
            low = 0 if window is None else max(0, begin - window + 1)
            queries = torch.arange(begin, stop, device=self._device)[:, None]
            reach, top = queries, stop
            if behind is not None:
                own = behind[begin - start : stop - start]
                reach = queries + torch.from_numpy(own).to(self._device)[:, None]
                top = int((np.arange(begin, stop) + own).max()) + 1
            keys = torch.arange(low, top, device=self._device)
            mask = keys <= reach
            if window is not None:
                mask &= keys > queries - window
            at = first + begin - start
            slots = self._keys(self._table.slots(row, low, top))
            blocks.append(Extend(at, at + stop - begin, slots, mask))
        return blocks

    def _extend(self, extend: Extend, kv: LayerKV, q: Tensor, spec: AttentionSpec) -> Tensor:
        k, v = kv.read(extend.keys, q.dtype)
        queries = q[extend.first : extend.last].transpose(0, 1)[None]  # [1, heads, n, D]
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, kv_heads, keys, D]
        if not spec.plain:
            mask = extend.mask
            if mask is None:
                n = extend.last - extend.first
                mask = torch.ones((n, n), dtype=torch.bool, device=q.device).tril_()
            output, sums = attention_with_sums(queries, keys, values, mask, spec)
            output = with_sinks(output.transpose(1, 2), sums.transpose(1, 2), spec)
            return output.reshape(-1, self._heads * self._dim)
        output = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=extend.mask,
            is_causal=extend.mask is None,
            scale=spec.scale,
            enable_gqa=self._group > 1,
        )
        return output[0].transpose(0, 1).reshape(-1, self._heads * self._dim)

    # --- decodes ---

    def _plan_decodes(self, rows: Ints, lengths: Ints, window: int | None) -> _Decodes:
        slots = []
        for row, end in zip(rows.tolist(), lengths.tolist(), strict=True):
            slots.append(self._table.slots(row, 0 if window is None else max(0, end - window), end))
        longest = max(map(len, slots))
        padding = self._padding_slot
        segments = cut(slots, padding) if self._in_place else cut(slots, padding, longest + 1)
        parts = [
            _SharedRead(
                slice(run.start, run.stop), self._readers(run.readers, len(slots)), len(run.readers)
            )
            for run in segments.runs
        ]
        owners = [reader for run in segments.runs for reader in run.readers]
        if len(segments.readers):
            parts.append(self._rest(segments, len(slots)))
            owners += segments.readers.tolist()
        if len(parts) == 1:
            return _Decodes(parts, None)
        return _Decodes(parts, torch.tensor(owners, device=self._device))

    def _readers(self, readers: list[int], decodes: int) -> Tensor | None:
        return None if len(readers) == decodes else torch.tensor(readers, device=self._device)

    def _rest(self, segments: Segments, decodes: int) -> _SharedRead:
        lens, width = segments.rest_lens, segments.rest.shape[1]
        mask = None
        if (lens != width).any():
            allowed = torch.from_numpy(np.arange(width) < lens[:, None]).to(self._device)
            mask = torch.zeros(allowed.shape, dtype=self._shape.dtype, device=self._device)
            mask = mask.masked_fill_(~allowed, -torch.inf)[:, None, None, :]
        keys = torch.from_numpy(segments.rest.reshape(-1)).to(self._device)
        return _SharedRead(keys, self._readers(segments.readers.tolist(), decodes), len(lens), mask)

    def _decode(self, decodes: _Decodes, kv: LayerKV, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend for decodes: q [N, heads, D] -> [N, heads * D]."""
        if decodes.owners is None:
            output = with_sinks(*self._part(decodes.parts[0], kv, q, spec), spec)
        else:
            results = [self._part(part, kv, q, spec) for part in decodes.parts]
            outputs = torch.cat([output for output, _ in results])  # [P, heads, D]
            sums = torch.cat([lse for _, lse in results])  # [P, heads]
            output = merge_parts(outputs, sums, decodes.owners, len(q), spec)
        return output.reshape(-1, self._heads * self._dim)

    def _part(
        self, part: _SharedRead, kv: LayerKV, q: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend to a part. Returns outputs [readers, heads, D] and log-sum-exps [readers, heads]."""
        if part.readers is not None:
            q = q[part.readers]
        n = part.count
        queries = q.reshape(n, self._kv_heads, self._group, self._dim)
        k, v = kv.read(part.keys, q.dtype)
        if isinstance(part.keys, slice):
            # the readers' queries side by side, as if they were one sequence's
            queries = queries.transpose(0, 1).reshape(1, self._kv_heads, n * self._group, self._dim)
            k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        else:
            k = k.view(n, -1, self._kv_heads, self._dim).transpose(1, 2)
            v = v.view(n, -1, self._kv_heads, self._dim).transpose(1, 2)
        if not spec.plain:
            output, sums = attention_with_sums(queries, k, v, part.mask, spec)
        elif self._in_place:
            output, sums = flash(queries, k, v, attn_mask=part.mask, scale=spec.scale)
        else:  # always one part, which nothing is merged with
            output = F.scaled_dot_product_attention(queries, k, v, attn_mask=part.mask, scale=spec.scale)
            return output.reshape(n, self._heads, self._dim), output
        if isinstance(part.keys, slice) and n > 1:
            output = output.view(self._kv_heads, n, self._group, self._dim).transpose(0, 1)
            sums = sums.view(self._kv_heads, n, self._group).transpose(0, 1)
        return output.reshape(n, self._heads, self._dim), sums.reshape(n, self._heads)

    # --- the pool ---

    def _keys(self, slots: Slots) -> "slice | Tensor":
        """Return a slice if the slots lie side by side (read in place), else indices to gather."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and (np.diff(slots) == 1).all():
            return slice(first, last + 1)
        return torch.from_numpy(slots).to(self._device)


def attention_with_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition, for specs that torch's kernels do not know.

    q [B, heads, n, D]; k, v [B, kv_heads, keys, D]; mask: which keys are seen, or terms of scores,
    broadcast to [B, heads, n, keys]. Returns outputs [B, heads, n, D] and log-sum-exps [B, heads, n].
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)).float() * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp().to(v.dtype) @ v, sums


def with_sinks(output: Tensor, sums: Tensor, spec: AttentionSpec) -> Tensor:
    """Take the sinks' part off output [.., heads, D]; sums [.., heads]: log-sum-exps."""
    if spec.sinks is None:
        return output
    return output * torch.sigmoid(sums - spec.sinks)[..., None].to(output.dtype)


def merge_parts(outputs: Tensor, sums: Tensor, owners: Tensor, n: int, spec: AttentionSpec) -> Tensor:
    """Combine attention over disjoint sets of keys (Dao et al. 2022, online softmax).

    outputs [P, heads, D], sums [P, heads] (log-sum-exp), owners int64[P] -> [n, heads, D].
    """
    index = owners[:, None].expand_as(sums)
    top = sums.new_full((n, sums.shape[1]), -torch.inf).scatter_reduce_(0, index, sums, "amax")
    weights = (sums - top[owners]).exp()
    total = torch.zeros_like(top).index_add_(0, owners, weights)
    shares = (weights / total[owners])[..., None].to(outputs.dtype)
    merged = outputs.new_zeros((n, *outputs.shape[1:]))
    merged.index_add_(0, owners, outputs * shares)
    return merged if spec.sinks is None else with_sinks(merged, top + total.log(), spec)
