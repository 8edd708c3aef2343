"""The Triton kernels as one back end: split decode for decodes, tiles for extends.

Plans nothing for decodes but which of them share keys: the kernels read page table and positions
on the device.
"""

from torch import Tensor

from ramify.gpu.attention.groups import Arrays, Grouper, no_groups
from ramify.gpu.attention.paged import Inputs
from ramify.gpu.attention.triton_decode import decode_attention, splits_for
from ramify.gpu.attention.triton_extend import extend_attention, extend_items
from ramify.gpu.attention.triton_shared import Shared, shared_attention
from ramify.gpu.rows import Ints, StepRows
from ramify.gpu.staging import Array


class TritonPaged:
    """`pages` int32[rows, columns] is the page table on the device.

    `grouper`: finds decodes that share keys; None: every line reads all of its keys itself.
    """

    name = "triton"

    def __init__(
        self,
        pages: Tensor,
        page_size: int,
        heads: int,
        kv_heads: int,
        grouper: Grouper | None = None,
    ) -> None:
        self._pages = pages
        self._page_size = page_size
        self._heads, self._kv_heads = heads, kv_heads
        self._grouper = grouper

    def plan(self, step: StepRows) -> list[Array]:
        return list(extend_items(step, self._heads, self._kv_heads))

    def groups(self, rows: Ints, positions: Ints, size: int) -> list[Array]:
        if self._grouper is None:
            return []
        return _listed(self._grouper.arrays(rows, positions, size))

    def no_groups(self, size: int) -> list[Array]:
        if self._grouper is None or size < self._grouper.limits.least_members:
            return []
        return _listed(no_groups(size, self._grouper.limits))

    def attend(
        self, q: Tensor, pool: "tuple[Tensor, Tensor]", inputs: Inputs, window: int | None
    ) -> Tensor:
        first = inputs.extended
        decoded = None
        if first < len(q):
            decoded = self._decode(
                q[first:], pool, inputs.rows[first:], inputs.positions[first:], inputs.groups, window
            )
        if not first:
            assert decoded is not None
            return decoded
        output = q.new_empty((len(q), q.shape[1] * q.shape[2]))
        items, merges = inputs.plan
        extend_attention(q, output, pool, items, merges, self._pages, self._page_size, window)
        if decoded is not None:
            output[first:] = decoded
        return output

    def _decode(
        self,
        q: Tensor,
        pool: "tuple[Tensor, Tensor]",
        rows: Tensor,
        positions: Tensor,
        groups: list[Tensor],
        window: int | None,
    ) -> Tensor:
        parts = None
        if groups and window is None:  # a window has moved past most of what lines share
            parts = shared_attention(q, pool, Shared(*groups), self._pages, self._page_size)
        return decode_attention(
            q, pool, rows, positions, self._pages, self._page_size, window,
            splits_for(len(q), pool[0].shape[1]), parts,
        )  # fmt: skip


def _listed(arrays: Arrays | None) -> list[Array]:
    return [] if arrays is None else [arrays.items, arrays.members, arrays.own]
