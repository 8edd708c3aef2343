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
from ramify.gpu.kv.pool import KVPool
from ramify.gpu.step.batch import Batch
from ramify.gpu.step.rows import RowTable

_QUERY_BLOCK = 512  # queries of a masked extend that run at once: bounds the mask
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class _Extend:
    """Queries [first, last) of one sequence at positions start.., over `slots`."""

    first: int
    last: int
    keys: "slice | Tensor"  # a slice of the pool, or slots to gather
    mask: Tensor | None  # [queries, keys]; None: plainly causal, no prefix


@dataclass(slots=True)
class _Part:
    """One call: sequences `readers` over a run of slots. None: over their padded rest."""

    keys: "slice | Tensor"
    readers: Tensor | None  # None: all decodes, in order
    count: int
    mask: Tensor | None = None


@dataclass(slots=True)
class _Decodes:
    """How the decodes attend in layers of one window size."""

    parts: list[_Part]
    owners: Tensor | None  # sequence of each part's output, None if nothing is to be merged


class TorchAttention:
    """`windows[layer]`: sliding window or None."""

    def __init__(
        self, pool: KVPool, table: RowTable, heads: int, windows: tuple[int | None, ...]
    ) -> None:
        self._pool = pool
        self._table = table
        kv_heads, self._dim = pool.k.shape[2:]
        self._heads, self._kv_heads, self._group = heads, kv_heads, heads // kv_heads
        self._windows = windows
        self._device = pool.k.device
        self._in_place = self._device.type == "cpu"
        self._first_decode = 0
        self._extends: dict[int | None, list[_Extend]] = {}
        self._decodes: dict[int | None, _Decodes] = {}
        self._slots = torch.empty(0)

    def plan(self, batch: Batch) -> None:
        self._slots = batch.slots
        self._first_decode = int(batch.qo_indptr[batch.extends])
        self._extends, self._decodes = {}, {}
        for window in set(self._windows):
            self._extends[window] = [
                block for i in range(batch.extends) for block in self._plan_extend(batch, i, window)
            ]
            if batch.decodes:
                self._decodes[window] = self._plan_decodes(batch, window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self._pool.layers[layer]
        self._pool.store(layer, self._slots, k, v)
        window = self._windows[layer]
        extends = self._extends[window]
        if not extends:
            return self._decode(self._decodes[window], pool, q)
        outputs = [self._extend(extend, pool, q) for extend in extends]
        if window in self._decodes:
            outputs.append(self._decode(self._decodes[window], pool, q[self._first_decode :]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    # --- extends ---

    def _plan_extend(self, batch: Batch, i: int, window: int | None) -> list[_Extend]:
        first, last = int(batch.qo_indptr[i]), int(batch.qo_indptr[i + 1])
        row, end = int(batch.rows[i]), int(batch.kv_lens[i])
        start = end - (last - first)
        if start == 0 and (window is None or end <= window):
            return [_Extend(first, last, self._keys(self._table.slots(row, 0, end)), None)]
        blocks = []
        for begin in range(start, end, _QUERY_BLOCK):
            stop = min(begin + _QUERY_BLOCK, end)
            low = 0 if window is None else max(0, begin - window + 1)
            queries = torch.arange(begin, stop, device=self._device)[:, None]
            keys = torch.arange(low, stop, device=self._device)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            at = first + begin - start
            slots = self._keys(self._table.slots(row, low, stop))
            blocks.append(_Extend(at, at + stop - begin, slots, mask))
        return blocks

    def _extend(self, extend: _Extend, pool: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
        k, v = self._read(pool, extend.keys)
        output = F.scaled_dot_product_attention(
            q[extend.first : extend.last].transpose(0, 1)[None],  # [1, heads, n, D]
            k.transpose(0, 1)[None],  # [1, kv_heads, keys, D]
            v.transpose(0, 1)[None],
            attn_mask=extend.mask,
            is_causal=extend.mask is None,
            enable_gqa=self._group > 1,
        )
        return output[0].transpose(0, 1).reshape(-1, self._heads * self._dim)

    # --- decodes ---

    def _plan_decodes(self, batch: Batch, window: int | None) -> _Decodes:
        slots = []
        for row, end in zip(
            batch.rows[batch.extends :].tolist(), batch.kv_lens[batch.extends :].tolist(), strict=True
        ):
            slots.append(self._table.slots(row, 0 if window is None else max(0, end - window), end))
        longest = max(map(len, slots))
        padding = self._pool.padding_slot
        segments = cut(slots, padding) if self._in_place else cut(slots, padding, longest + 1)
        parts = [
            _Part(slice(run.start, run.stop), self._readers(run.readers, len(slots)), len(run.readers))
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

    def _rest(self, segments: Segments, decodes: int) -> _Part:
        lens, width = segments.rest_lens, segments.rest.shape[1]
        mask = None
        if (lens != width).any():
            allowed = torch.from_numpy(np.arange(width) < lens[:, None]).to(self._device)
            mask = torch.zeros(allowed.shape, dtype=self._pool.k.dtype, device=self._device)
            mask = mask.masked_fill_(~allowed, -torch.inf)[:, None, None, :]
        keys = torch.from_numpy(segments.rest.reshape(-1)).to(self._device)
        return _Part(keys, self._readers(segments.readers.tolist(), decodes), len(lens), mask)

    def _decode(self, decodes: _Decodes, pool: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
        """q [N, heads, D] -> [N, heads * D]."""
        if decodes.owners is None:
            output, _ = self._part(decodes.parts[0], pool, q)
            return output.reshape(-1, self._heads * self._dim)
        results = [self._part(part, pool, q) for part in decodes.parts]
        outputs = torch.cat([output for output, _ in results])  # [P, heads, D]
        sums = torch.cat([lse for _, lse in results])  # [P, heads]
        merged = _merge(outputs, sums, decodes.owners, len(q))
        return merged.reshape(-1, self._heads * self._dim)

    def _part(self, part: _Part, pool: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [readers, heads, D] and log-sum-exps [readers, heads] of one part."""
        if part.readers is not None:
            q = q[part.readers]
        n = part.count
        queries = q.reshape(n, self._kv_heads, self._group, self._dim)
        k, v = self._read(pool, part.keys)
        if isinstance(part.keys, slice):
            # the readers' queries side by side, as if they were one sequence's
            queries = queries.transpose(0, 1).reshape(1, self._kv_heads, n * self._group, self._dim)
            k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        else:
            k = k.view(n, -1, self._kv_heads, self._dim).transpose(1, 2)
            v = v.view(n, -1, self._kv_heads, self._dim).transpose(1, 2)
        if not self._in_place:
            output = F.scaled_dot_product_attention(queries, k, v, attn_mask=part.mask)
            return output.reshape(n, self._heads, self._dim), output
        output, sums = _flash(queries, k, v, attn_mask=part.mask)
        if isinstance(part.keys, slice) and n > 1:
            output = output.view(self._kv_heads, n, self._group, self._dim).transpose(0, 1)
            sums = sums.view(self._kv_heads, n, self._group).transpose(0, 1)
        return output.reshape(n, self._heads, self._dim), sums.reshape(n, self._heads)

    # --- the pool ---

    def _keys(self, slots: Slots) -> "slice | Tensor":
        """A slice if the slots lie side by side (read in place), else what to gather."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and (np.diff(slots) == 1).all():
            return slice(first, last + 1)
        return torch.from_numpy(slots).to(self._device)

    def _read(self, pool: tuple[Tensor, Tensor], keys: "slice | Tensor") -> tuple[Tensor, Tensor]:
        """k and v [keys, kv_heads, D]."""
        if isinstance(keys, slice):
            return pool[0][keys], pool[1][keys]
        return pool[0].index_select(0, keys), pool[1].index_select(0, keys)


def _merge(outputs: Tensor, sums: Tensor, owners: Tensor, n: int) -> Tensor:
    """Combine attention over disjoint sets of keys (Dao et al. 2022, online softmax).

    outputs [P, heads, D], sums [P, heads] (log-sum-exp), owners int64[P] -> [n, heads, D].
    """
    index = owners[:, None].expand_as(sums)
    top = sums.new_full((n, sums.shape[1]), -torch.inf).scatter_reduce_(0, index, sums, "amax")
    weights = (sums - top[owners]).exp()
    total = torch.zeros_like(top).index_add_(0, owners, weights)
    shares = (weights / total[owners])[..., None].to(outputs.dtype)
    merged = outputs.new_zeros((n, *outputs.shape[1:]))
    return merged.index_add_(0, owners, outputs * shares)
