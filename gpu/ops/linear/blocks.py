"""Weights as blocks of a GGUF file, which are not read before they are packed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Weight
from ramify.gpu.ops.linear.grouped import grouped


@dataclass(slots=True)
class BlockWeight(Weight):
    """A weight of blocks. `parts`: kinds of blocks and their rows uint8 [rows, bytes], in order.

    `order` int64[outputs]: which of these rows each output is; None: the same.
    """

    parts: list[tuple[str, Tensor]]
    inputs: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(raw) for _, raw in self.parts), self.inputs

    def floats(self) -> Tensor:
        whole = torch.cat([grouped(kind, raw).floats() for kind, raw in self.parts])
        return whole if self.order is None else whole[self.order]

    def joined(self, others: Sequence[Weight]) -> "BlockWeight":
        whole = [self, *(each for each in others if isinstance(each, BlockWeight))]
        parts = [part for each in whole for part in each.parts]
        if all(each.order is None for each in whole):
            return BlockWeight(parts, self.inputs)
        orders, first = [], 0
        for each in whole:
            rows = each.shape[0]
            orders.append(first + (torch.arange(rows) if each.order is None else each.order))
            first += rows
        return BlockWeight(parts, self.inputs, torch.cat(orders))

    def in_order(self, order: Tensor) -> "BlockWeight":
        return BlockWeight(self.parts, self.inputs, order if self.order is None else self.order[order])

    def addresses(self) -> list[tuple[str, Tensor]]:
        """List by kind the address of each output's row, int64[outputs], 0 for those of other kinds."""
        found: dict[str, Tensor] = {}
        rows, first = self.shape[0], 0
        for kind, raw in self.parts:
            table = found.setdefault(kind, torch.zeros(rows, dtype=torch.int64))
            table[first : first + len(raw)] = row_addresses(raw)
            first += len(raw)
        return [(kind, table if self.order is None else table[self.order])
                for kind, table in found.items()]  # fmt: skip


def row_addresses(rows: Tensor) -> Tensor:
    """Compute the address of each row: int64[rows]."""
    return rows.data_ptr() + torch.arange(len(rows)) * (rows.stride(0) * rows.element_size())
