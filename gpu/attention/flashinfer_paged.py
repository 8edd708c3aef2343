"""The back end of FlashInfer's kernels: FA3 or FA2 for extends, its paged decode for decodes.

FlashInfer (Ye et al. 2025) plans on the host: `plan` cuts a step into work items and copies them to
the device in the order of the stream, and the layers share them. It reads host arrays and the page
table on the device only, so nothing here waits for a step. Imported only where it was chosen; see
`registry`. Tests on a CPU give it a stand-in for FlashInfer.
"""

# mypy: disable-error-code="no-untyped-call"

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.page_lists import fill_page_lists
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.attention.triton_paged import TritonPaged
from ramify.gpu.attention.triton_widened import WIDE_PAGE
from ramify.gpu.devices import multiprocessors
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import Ints, RowTable, StepRows
from ramify.gpu.step.staging import Array

_PLAN_BYTES = 1 << 20  # of a decode plan: some words for each of its programs
_TILE = 128  # queries that a program of FA3 takes at once, of one head


def _scratch_bytes(extend: str, decode: str, shape: AttentionShape, multiprocessors: int) -> int:
    """Compute the memory for partial results where keys are split.

    FA3 splits no keys and needs none: it gets 16 bytes. FA2 splits until each multiprocessor has
    two programs, each with a float32 tile of 128 lines.
    """
    if (extend, decode) == ("fa3", "triton"):
        return 16
    tile = 4 * 128 * (shape.head_dim + 1)
    return 2 * multiprocessors * shape.heads // shape.kv_heads * tile + (16 << 20)


class FlashInferPaged:
    """FlashInfer's back end. `pages` int32[rows, columns]: the page table on the device.

    `extend`: "fa3" or "fa2". `decode`: "flashinfer", or "triton" for the kernels of `TritonPaged`,
    which need no plan; then those also serve small steps with extends. Keys in 8-bit floats are widened
    first (`WidenedKeys`); where they are not, Triton's kernels serve.
    """

    # Tiles for each multiprocessor from which FA3 is worth its plan, 0.3 to 0.9 ms of the host's time:
    # on an H200 Triton's kernel is the faster at 1.9 of them (67 us to 79), FA3 at 3.9 (102 to 170).
    fewest_tiles = 3

    def __init__(
        self,
        pages: Tensor,
        table: RowTable,
        shape: AttentionShape,
        extend: str,
        decode: str,
    ) -> None:
        self.static_extends = decode == "triton"  # graphs of steps with extends are Triton's
        self._triton = TritonPaged(pages, table, shape, shares_keys=decode == "triton")
        self._heads = shape.heads
        self._multiprocessors = multiprocessors(pages.device)
        scratch = torch.zeros(
            _scratch_bytes(extend, decode, shape, self._multiprocessors),
            dtype=torch.uint8,
            device=pages.device,
        )
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._widened = self._triton.widened
        if self._widened is None:
            self._extends = _Extends(pages, table.page_size, shape, extend, scratch)
        else:
            every = torch.arange(self._widened.pages, dtype=torch.int32, device=pages.device)
            self._extends = _Extends(every[None], WIDE_PAGE, shape, extend, scratch)
        self._decodes = None
        if decode == "flashinfer":
            self._decodes = _DecodeWrappers(pages, table.page_size, shape, scratch)
        one = np.ones(1, dtype=np.int64)
        last = one * (len(pages) - 1 if self._widened is None else 0)
        self._extends.plan(last, one - 1, one)  # loads the kernels

    def room(self, bucket: Bucket) -> Plan:
        if bucket.extended and not self.static_extends:
            return {}
        return self._triton.room(bucket)

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        """Make Triton's plan if it is to serve the step; else nothing: FlashInfer keeps its own.

        With FlashInfer's own decode, the decodes beside extends are runs of one token.
        """
        if not step.extends:
            return self._triton.plan(step, bucket, captured)
        runs = len(step.rows)
        if self._decodes is None:
            runs = step.extends
            tiles = int((-(-step.counts[:runs] // _TILE)).sum()) * self._heads
            if captured or tiles < self.fewest_tiles * self._multiprocessors:
                return self._triton.plan(step, bucket, captured)
        if self._widened is None:
            self._extends.plan(step.rows[:runs], step.starts[:runs], step.counts[:runs])
            return {}
        begins, widened = self._widened.places(step)
        if not widened:
            return self._triton.plan(step, bucket, captured)
        self._extends.plan(begins * 0, step.starts[:runs], step.counts[:runs], begins)
        return widened

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        if self._decodes is not None:
            self._decodes.plan(rows.astype(np.int64), positions.astype(np.int64))

    def unlike_decodes(self, most: int) -> list[int]:
        return [] if self._decodes is not None else self._triton.unlike_decodes(most)

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        first = step.extended
        if "items" in step.plan or (not first and self._decodes is None):
            return self._triton.attend(q, kv, step, spec)
        output = torch.empty_like(q)
        merged = output.view(len(q), -1)
        if not first and self._decodes is not None:
            self._decodes.run(q, self._paged(kv), output, spec.window)
            return merged
        read = kv
        if self._widened is not None:
            read = self._widened.layer(kv, step.plan["widened"])
        self._extends.run(q, self._paged(read), output, spec.window)
        if first < len(q) and self._decodes is None:
            self._triton.decode(q[first:], kv, step, spec, merged[first:])
        return merged

    def _paged(self, kv: LayerKV) -> "tuple[Tensor, Tensor]":
        """View k and v as [pages, page_size, kv_heads, D]; made once for a layer.

        The padding slot is the first of a page beyond the views; kernels reach it by its number.
        """
        views = self._views.get(kv.k.data_ptr())
        if views is None:
            slots = len(kv.k) // kv.page_size * kv.page_size
            shape = (-1, kv.page_size, *kv.k.shape[1:])
            views = kv.k[:slots].view(shape), kv.v[:slots].view(shape)
            self._views[kv.k.data_ptr()] = views
        return views


class _Planner:
    """Guard of the pinned buffer, which a plan must not overwrite while the last one is being copied.

    A plan is copied to the device in the order of the stream, after the steps before it. The copy is
    over long before a third step is planned, so `begin` returns at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def begin(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def end(self) -> None:
        if self._copied is not None:
            self._copied.record()


def _hosted(array: Ints, device: torch.device) -> Tensor:
    """Copy to int32 on the host, pinned if the device copies it without waiting."""
    host = torch.from_numpy(array.astype(np.int32))
    return host.pin_memory() if device.type == "cuda" else host


def _indptr(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


class _Extends:
    """FlashInfer's wrappers for extends, one for each window."""

    def __init__(
        self,
        pages: Tensor,
        page_size: int,
        shape: AttentionShape,
        kernels: str,
        scratch: Tensor,
    ) -> None:
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._wrappers: dict[int | None, Any] = {
            window: wrapper(scratch, "NHD", backend=kernels) for window in shape.windows
        }
        self._pages = pages
        self._page_size = page_size
        self._sizes = shape.heads, shape.kv_heads, shape.head_dim, page_size
        self._dtype = shape.dtype
        self._compact = kernels == "fa2"
        self._planner = _Planner(pages.device)
        self._tokens = 0

    def plan(self, rows: Ints, starts: Ints, counts: Ints, begins: Ints | int = 0) -> None:
        """Plan sequences: i runs positions [starts[i], starts[i] + counts[i]) of row rows[i].

        `begins`: the column of its first page.
        """
        self._planner.begin()
        self._tokens = int(counts.sum())
        lengths = starts + counts
        used = -(-lengths // self._page_size)
        indptr, indices = self._page_lists(rows, used, begins)
        last = lengths - (used - 1) * self._page_size
        arrays = [_indptr(counts), indptr, last, lengths]
        host = _hosted(np.concatenate(arrays), self._pages.device)
        queries, lists, lasts, totals = torch.split(host, [len(array) for array in arrays])
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                queries, lists, indices, lasts, *self._sizes, causal=True,
                window_left=_left(window), q_data_type=self._dtype, seq_lens=totals,
                max_token_per_sequence=int(counts.max()),
            )  # fmt: skip
        self._planner.end()

    def run(self, q: Tensor, paged: "tuple[Tensor, Tensor]", output: Tensor, window: int | None) -> None:
        """Attend for the planned tokens, the first of q, into the first of `output`: [T, heads, D]."""
        self._wrappers[window].run(q[: self._tokens], paged, out=output[: self._tokens])

    def _page_lists(self, rows: Ints, used: Ints, begins: Ints | int) -> "tuple[Ints, Tensor]":
        """Find where each sequence's list of pages begins, and the tensor that holds the lists.

        FA3 takes the lengths apart from the lists, so the lists may stay in the page table. FA2
        takes the beginning of a list for the end of the list before, so they are packed for it.
        """
        if not self._compact:
            return np.append(rows * self._pages.shape[1] + begins, 0), self._pages.view(-1)
        indptr = _indptr(used)
        indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=self._pages.device)
        host = _hosted(np.concatenate([indptr, rows]), indices.device)
        lines = host.to(indices.device, non_blocking=True)
        fill_page_lists(self._pages, lines[len(indptr) :], lines[: len(indptr)], indices)
        return indptr, indices


class _DecodeWrappers:
    """FlashInfer's wrappers for steps of decodes alone, one for each size of a CUDA graph.

    A graph holds the addresses that its wrapper was made with; a plan rewrites what lies there.
    """

    def __init__(self, pages: Tensor, page_size: int, shape: AttentionShape, scratch: Tensor) -> None:
        decode = import_module("flashinfer.decode")
        self._make = decode.BatchDecodeWithPagedKVCacheWrapper
        self._replan = decode.fast_decode_plan
        self._pages = pages
        self._page_size = page_size
        self._sizes = shape.heads, shape.kv_heads, shape.head_dim, page_size
        self._dtype = shape.dtype
        self._scratch = scratch
        self._tensor_cores = shape.heads // shape.kv_heads >= 4
        self._plans = {
            window: torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=pages.device)
            for window in shape.windows
        }
        self._indices = torch.zeros(pages.numel(), dtype=torch.int32, device=pages.device)
        self._lines = torch.zeros(3 * (len(pages) + 4), dtype=torch.int32, device=pages.device)
        self._wrappers: dict[tuple[int, int | None], Any] = {}
        self._size = 0
        self._planner = _Planner(pages.device)

    def plan(self, rows: Ints, positions: Ints) -> None:
        """Plan a decode for each of `rows`. Their number is a captured size, or the next to be."""
        self._planner.begin()
        count = self._size = len(rows)
        width = count // 4 * 4 + 4
        host = np.zeros((3, width), dtype=np.int64)
        host[0, 1 : count + 1] = np.cumsum(positions // self._page_size + 1)
        host[1, :count] = positions % self._page_size + 1
        host[2, :count] = rows
        pinned = _hosted(host, self._lines.device)
        lines = self._lines[: host.size].view(3, width)
        lines.copy_(pinned, non_blocking=True)
        fill_page_lists(self._pages, lines[2, :count], lines[0, : count + 1], self._indices)
        lists = (pinned[0, : count + 1], pinned[1, :count]), (lines[0, : count + 1], lines[1, :count])
        for window in self._plans:
            self._plan_one(window, *lists)
        self._planner.end()

    def _plan_one(
        self, window: int | None, host: "tuple[Tensor, Tensor]", device: "tuple[Tensor, Tensor]"
    ) -> None:
        """Plan one window. `host`, `device`: where each list begins, and how full its last page is."""
        key = self._size, window
        options = {"window_left": _left(window), "q_data_type": self._dtype}
        nothing = self._indices[:0]  # the lists are in place
        if key in self._wrappers:
            self._replan(
                self._wrappers[key], host[0], nothing, host[1], *self._sizes, **options,
                kv_data_type=self._dtype, global_override_indptr_cpu=host[0],
            )  # fmt: skip
            return
        wrapper = self._make(
            self._scratch, "NHD", use_cuda_graph=True, use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=device[0], paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=device[1],
        )  # fmt: skip
        wrapper.reset_workspace_buffer(self._scratch, self._plans[window])
        wrapper.plan(host[0], nothing, host[1], *self._sizes, **options)
        self._wrappers[key] = wrapper

    def run(self, q: Tensor, paged: "tuple[Tensor, Tensor]", output: Tensor, window: int | None) -> None:
        self._wrappers[self._size, window].run(q, paged, out=output)


def _left(window: int | None) -> int:
    """Convert a window to FlashInfer's number of positions before a token's own; -1: all."""
    return -1 if window is None else window - 1
