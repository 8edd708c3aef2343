"""The Triton kernels as one back end: split decode for decodes, tiles for extends.

Plans nothing for decodes: the kernels read page table and positions on the device.
"""

import numpy as np
from torch import Tensor

from ramify.gpu.attention.paged import Inputs
from ramify.gpu.attention.triton_decode import decode_attention, splits_for
from ramify.gpu.attention.triton_extend import (
    TILE_FIELDS,
    extend_attention,
    extend_tiles,
    most_tiles,
)
from ramify.gpu.rows import StepRows
from ramify.gpu.staging import Array


class TritonPaged:
    """`pages` int32[rows, columns] is the page table on the device."""

    name = "triton"
    static_extends = True

    def __init__(self, pages: Tensor, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size

    def room(self, tokens: int, runs: int) -> list[Array]:
        return [np.zeros((most_tiles(tokens, runs), TILE_FIELDS), dtype=np.int32)]

    def plan(self, step: StepRows, captured: bool = False) -> list[Array]:
        return [extend_tiles(step)]

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        pass

    def attend(
        self, q: Tensor, pool: "tuple[Tensor, Tensor]", inputs: Inputs, window: int | None
    ) -> Tensor:
        first = inputs.extended
        decoded = None
        if first < len(q):
            decoded = self.decode(q[first:], pool, inputs, window)
        if not first:
            assert decoded is not None
            return decoded
        output = q.new_empty((len(q), q.shape[1] * q.shape[2]))
        extend_attention(q, output, pool, inputs.plan[0], self._pages, self._page_size, window)
        if decoded is not None:
            output[first:] = decoded
        return output

    def decode(
        self, q: Tensor, pool: "tuple[Tensor, Tensor]", inputs: Inputs, window: int | None
    ) -> Tensor:
        """The step's decodes alone: q [decodes, heads, D] -> [decodes, heads * D]."""
        first = inputs.extended
        return decode_attention(
            q, pool, inputs.rows[first:], inputs.positions[first:], self._pages, self._page_size,
            window, splits_for(len(q), pool[0].shape[1]),
        )  # fmt: skip
