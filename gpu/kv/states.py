"""Fixed states: what recurrent mixers and short convolutions keep of a sequence, slot by slot.

A slot holds the state of all such layers at one position. Slot 0 is the state before any token: zeros,
never written. Which branch has a slot is the cache actor's business; see `protocol.plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(slots=True)
class StatePool:
    """The states of all layers: `layers` has the parts of each, float32[1 + slots + spare, *shape].

    `memory`: the tensors [layers, 1 + slots + spare, *shape] that hold them, one for each shape. Spare
    slots hold, until a step is over, the states after lines whose next one is a draft.
    """

    slots: int  # without slot 0 and spare ones
    layers: list[list[Tensor]]
    memory: list[Tensor]

    def part(self, slot: int, part: int, size: int) -> list[tuple[int, Tensor]]:
        """Find the bytes [part * size, (part + 1) * size) of a slot, its layers one after another.

        Returns views uint8[n], each with its place in the part.
        """
        views: list[tuple[int, Tensor]] = []
        first, last, at = part * size, (part + 1) * size, 0
        for tensor in self.memory:
            each = tensor[0, slot].numel() * tensor.itemsize
            below = max(0, first - at) // each
            above = min(len(tensor), -(-max(0, last - at) // each))
            for layer in range(below, above):
                start = at + layer * each
                own = tensor[layer, slot].view(-1).view(torch.uint8)
                own = own[max(0, first - start) : last - start]
                views.append((max(0, start - first), own))
            at += len(tensor) * each
        return views

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` int64[n] to `targets` int64[n]. All are read before one is written."""
        for tensor in self.memory:
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The shapes of the parts of each layer that keeps a state. No part is padded."""

    shapes: tuple[tuple[Shape, ...], ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot over all layers; 0: the model keeps no states."""
        return sum(torch.Size(shape).numel() * 4 for parts in self.shapes for shape in parts)

    def allocate(self, slots: int, device: torch.device, spare: int = 0) -> StatePool:
        """Allocate so many slots, slot 0 and spare ones. Raises torch.OutOfMemoryError.

        Only slot 0 is initialised: memory of slots that are never used is never committed.
        """
        all_shapes = [shape for parts in self.shapes for shape in parts]
        memory: list[Tensor] = []
        views: dict[Shape, Iterator[Tensor]] = {}
        for shape in dict.fromkeys(all_shapes):
            tensor = torch.empty((all_shapes.count(shape), 1 + slots + spare, *shape), device=device)
            tensor[:, 0] = 0
            memory.append(tensor)
            views[shape] = iter(tensor.unbind(0))
        layers = [[next(views[shape]) for shape in parts] for parts in self.shapes]
        return StatePool(slots, layers, memory)
