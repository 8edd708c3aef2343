"""The back end of the Triton kernels: split decode for few decodes or shared keys, equal shares of
all keys for many decodes, tiles for extends.

It plans nothing for decodes but which of them share keys: the kernels read page table and positions
on the device.
"""

import numpy as np
from torch import Tensor

from ramify.gpu.attention.groups import no_groups
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.attention.triton_balanced import balanced_attention, block_for, shares_for
from ramify.gpu.attention.triton_decode import decode_attention, splits_for, variant_for
from ramify.gpu.attention.triton_extend import extend_attention, extend_items, extend_room
from ramify.gpu.attention.triton_shared import SharedGroups, grouper_for, shared_attention
from ramify.gpu.attention.triton_widened import WidenedKeys
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import RowTable, StepRows
from ramify.gpu.step.staging import Array
from ramify.gpu.step.step_rows import within
from ramify.gpu.vision.placing import SEEN_BEHIND, seen_behind


class TritonPaged:
    """Triton's back end. Page tables: `pages` int32[rows, columns] on the device, `table` on the host.

    `shares_keys`: decodes read common keys once, where that pays; else each reads all of its keys
    itself. Where rows may have drafts, one program takes several lines of a row, as many as fit into a
    tile of 16 query heads, and reads their keys once: a tile is no smaller anyway.
    """

    static_extends = True
    # Sequences times KV heads from which decodes are cut into equal shares. On an H200 24 sequences of
    # different lengths take 47 us so and 63 with programs of their own, 8 of them 24 and 22
    # (docs/log/gpu.md).
    fewest_balanced = 192

    def __init__(
        self, pages: Tensor, table: RowTable, shape: AttentionShape, shares_keys: bool = True
    ) -> None:
        self._pages, shape = pages, shape.tiled
        self._heads, self._kv_heads, self._dim = shape.heads, shape.kv_heads, shape.head_dim
        # how far back any of the layers sees; None: one of them sees all
        self._window = None if None in shape.windows else max(filter(None, shape.windows))
        self._pictures = table.pictures if shape.whole else None
        self._arrived = pages.new_zeros(len(pages) * (1 + table.max_guessed) * shape.kv_heads)
        self._lines = lines_for(shape, table.max_guessed)
        self._shares = shares_for(pages.device, shape, self._lines)
        self.widened = None
        if shape.codes and shape.value_dim is None and shape.windows == [None]:
            self.widened = WidenedKeys(pages, table, shape)
        self._grouper = self._run_grouper = None
        if shares_keys and self._window is None:
            self._grouper = grouper_for(table, shape)
            if self._lines > 1:
                self._run_grouper = grouper_for(table, shape, self._lines)

    def room(self, bucket: Bucket) -> Plan:
        runs = self._no_runs(bucket)
        if bucket.extended:
            runs |= extend_room(bucket.extended, bucket.runs, self._heads, self._kv_heads)
            if self._pictures is not None:
                runs[SEEN_BEHIND] = np.zeros(bucket.lines, dtype=np.int32)
            return runs
        if bucket.drafted and not bucket.grouped:
            return runs
        grouper = self._run_grouper if bucket.drafted else self._grouper
        if not bucket.grouped or grouper is None:
            return {}
        if bucket.decodes < grouper.limits.least_members:
            return {}
        groups = no_groups(bucket.decodes, grouper.limits)
        if not bucket.drafted:
            return groups.named()
        every = np.arange(bucket.decodes)
        return runs | groups.of_runs(every, every * 0 + 1, self._lines, bucket.decodes).named()

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        if step.extends:
            behind = None if self._pictures is None else seen_behind(step, self._pictures)
            items = extend_items(step, self._heads, self._kv_heads, self._window, behind)
            if behind is not None:
                items[SEEN_BEHIND] = behind
            if self.widened is not None and not captured:
                items = self.widened.plan(step, items)
            return items | self._runs(step, bucket)
        if step.lines is not None:
            return self._groups_of_runs(step, bucket, self._runs(step, bucket))
        if self._grouper is None:
            return {}
        groups = self._grouper.arrays(step.rows, step.starts, bucket.decodes)
        return {} if groups is None else groups.named()

    def _no_runs(self, bucket: Bucket) -> Plan:
        if self._lines == 1 or not bucket.decodes:
            return {}
        return {"runs": np.zeros(bucket.decodes, dtype=np.int32)}

    def _runs(self, step: StepRows, bucket: Bucket) -> Plan:
        """Plan how many lines the program of each decode takes; 0 where another one's does."""
        plan = self._no_runs(bucket)
        for runs in plan.values():
            rows = step.rows[step.extends :]
            begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
            lengths = np.diff(np.append(begins, len(rows)))
            tiles = -(-lengths // self._lines)
            first = np.repeat(begins, tiles) + within(tiles) * self._lines
            runs[first] = np.minimum(np.repeat(begins + lengths, tiles) - first, self._lines)
        return plan

    def _groups_of_runs(self, step: StepRows, bucket: Bucket, plan: Plan) -> Plan:
        """Add to `plan`, which has the runs, which of these share keys."""
        if self._run_grouper is None:
            return plan
        runs = plan["runs"][: len(step.rows)]
        firsts = np.flatnonzero(runs)
        rows, starts = step.rows[firsts], step.starts[firsts]
        groups = self._run_grouper.arrays(rows, starts, bucket.decodes)
        if groups is None:
            return plan
        counts = runs[firsts].astype(np.int64)
        return plan | groups.of_runs(firsts, counts, self._lines, bucket.decodes).named()

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        pass

    def unlike_decodes(self, most: int) -> list[int]:
        kinds = {
            (self._decode_kernel(count, 1), self._decode_kernel(count, self._lines)): count
            for count in range(1, most + 1)
        }
        return sorted(kinds.values())

    def _decode_kernel(self, decodes: int, lines: int) -> tuple[object, ...]:
        """Choose the kernel for so many decodes, and its constants, as a key.

        A program takes up to `lines` lines of a row.
        """
        if self._balanced(decodes):
            return "balanced", block_for(decodes)
        splits = splits_for(-(-decodes // lines), self._kv_heads)
        return splits, *variant_for(decodes, self._kv_heads)

    def _balanced(self, decodes: int) -> bool:
        return decodes * self._kv_heads >= self.fewest_balanced

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        first = step.extended
        output = q.new_empty((len(q), q.shape[1] * self._dim))
        if first < len(q):
            self.decode(q[first:], kv, step, spec, output[first:])
        if first:
            items, merges, pages = step.plan["items"], step.plan["merges"], self._pages
            if self.widened is not None:
                self.widened.warm(q, kv, spec)
                if "widened" in step.plan:
                    kv = self.widened.layer(kv, step.plan["widened"])
                    pages = step.plan["widened_pages"]
            behind = step.plan[SEEN_BEHIND] if spec.whole else None
            extend_attention(q, output, kv, items, merges, pages, spec, behind)
        return output

    def decode(
        self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec, output: Tensor
    ) -> None:
        """Attend for the step's decodes alone: q [decodes, heads, D] -> output [decodes, heads * D]."""
        first, parts = step.extended, None
        # a window has moved past most of the keys that lines share
        if step.bucket.grouped and spec.window is None and self._grouper is not None:
            groups = SharedGroups(step.plan["shared_items"], step.plan["members"], step.plan["own"])
            parts = shared_attention(q, kv, groups, self._pages, spec)
        rows, positions = step.rows[first:], step.positions[first:]
        runs = step.plan.get("runs")
        lines = 1 if runs is None else self._lines
        if parts is None and self._balanced(len(q)):
            balanced_attention(
                q, output, kv, rows, positions, self._pages, spec, self._shares, self._arrived, runs,
                lines,
            )  # fmt: skip
            return
        splits = splits_for(-(-len(q) // lines), self._kv_heads)
        decode_attention(q, kv, rows, positions, self._pages, spec, splits, parts, output, runs, lines)


def lines_for(shape: AttentionShape, max_drafts: int) -> int:
    """Count the lines of a row that a program takes: those whose query heads fit into a tile."""
    if not max_drafts:
        return 1
    return min(max(2, 16 // shape.group), 1 << max_drafts.bit_length())
