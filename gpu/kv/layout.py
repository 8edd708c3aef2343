"""The paged KV cache: how keys and values lie in memory, who allocates them and how they are stored.

Page p holds the slots [p * page_size, (p + 1) * page_size). Which page belongs to whom is the cache
actor's business; this file knows only slots. One slot after the last page belongs to no page: padding
points there. On torch it is only read and stays zero, because what a freed page holds may be NaN, and
zero times NaN would reach a neighbour's output. The CUDA executor's padding writes there too, and
nothing but padding reads it.

A layout is one way to keep a token's keys and values: as pairs, or as a latent vector for all heads.
Another one (8 bits with scales) is a class like `PairLayout`, and kernels that read and write it;
executors and models ask for nothing but what `KVLayout` says. Layers with a window may have slots of
their own, fewer ones, in pages of one token: see `protocol.plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ramify.gpu.kv.states import StatePool


@dataclass(slots=True)
class LayerKV:
    """One layer's keys and values. k, v [slots, kv_heads, head_dim].

    Of a latent layer both are one tensor [slots, 1, width]: its values are the keys' first numbers.
    `windowed`: the slots are those of window pages.
    """

    k: Tensor
    v: Tensor
    page_size: int
    tail: int = 0  # of a latent layer: how many numbers of the keys, the last ones, are no value's
    windowed: bool = False

    def store(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, kv_heads, head_dim] to slots int64[T].

        On CUDA `ops.triton_layer.rope_store` does it in the kernel that rotates the keys.
        """
        self.k.index_copy_(0, slots, k)
        if not self.tail:
            self.v.index_copy_(0, slots, v)


@dataclass(slots=True)
class KVPool:
    """The memory of all layers. The last slot is the padding's.

    `memory`: tensors of [layers, slots, ...] that together hold everything which belongs to slots of
    `pages`; layers of unequal sizes are in tensors of their own. Window pages are not among them.
    """

    pages: int
    page_size: int
    layers: list[LayerKV]
    memory: list[Tensor]
    states: StatePool | None = None  # beside them, of layers that have no keys and values

    @property
    def padding_slot(self) -> int:
        return self.pages * self.page_size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages `sources` int64[n] to `targets` int64[n]. All are read before one is written."""
        for tensor in self.memory:
            copy_pages(tensor, self.page_size, sources, targets, dim=1)


def copy_pages(slots: Tensor, page_size: int, sources: Tensor, targets: Tensor, dim: int = 0) -> None:
    """Copy pages of a tensor whose `dim` counts slots: those of whole pages, perhaps one behind them."""
    pages = slots.shape[dim] // page_size
    shape = *slots.shape[:dim], pages, page_size, *slots.shape[dim + 1 :]
    paged = slots.narrow(dim, 0, pages * page_size).view(shape)
    paged.index_copy_(dim, targets, paged.index_select(dim, sources))


class KVLayout(Protocol):
    """How a model's keys and values are kept."""

    @property
    def bytes_per_token(self) -> int:
        """Of one token, over all layers that do not use window pages."""
        ...

    @property
    def bytes_per_window_page(self) -> int:
        """Over all layers that do."""
        ...

    def allocate(
        self, pages: int, page_size: int, device: torch.device, window_pages: int = 0
    ) -> KVPool:
        """Memory for so many pages. Raises torch.OutOfMemoryError."""
        ...


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Keys and values as two tensors of one type, token slot by token slot.

    `sizes`: KV heads and head size of each layer that keeps any. Layers of equal sizes lie in one
    tensor, and no layer is padded to the size of another. `windowed`: which of them use window pages;
    empty: none.
    """

    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    windowed: tuple[bool, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return self._bytes(False)

    @property
    def bytes_per_window_page(self) -> int:
        return self._bytes(True)

    @property
    def _layers(self) -> list[tuple[tuple[int, int], bool]]:
        return list(zip(self.sizes, self.windowed or (False,) * len(self.sizes), strict=True))

    def _bytes(self, windowed: bool) -> int:
        sizes = [size for size, within in self._layers if within == windowed]
        return sum(2 * heads * dim for heads, dim in sizes) * self.dtype.itemsize

    def allocate(
        self, pages: int, page_size: int, device: torch.device, window_pages: int = 0
    ) -> KVPool:
        """Not initialised: memory of pages that are never used is never committed by the system."""
        memory: list[Tensor] = []
        views: dict[tuple[tuple[int, int], bool], Iterator[tuple[Tensor, Tensor]]] = {}
        for size, windowed in dict.fromkeys(self._layers):
            slots = window_pages if windowed else pages * page_size
            shape = (self._layers.count((size, windowed)), slots + 1, *size)
            k, v = (torch.empty(shape, dtype=self.dtype, device=device) for _ in range(2))
            k[:, -1] = 0
            v[:, -1] = 0
            if not windowed:
                memory += k, v
            # one view a layer, made once: indexing a tensor costs more than an attention layer's sums
            views[size, windowed] = zip(k.unbind(0), v.unbind(0), strict=True)
        layers = [
            LayerKV(*next(views[size, windowed]), 1 if windowed else page_size, windowed=windowed)
            for size, windowed in self._layers
        ]
        return KVPool(pages, page_size, layers, memory)


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """One vector a token and layer, which all heads read as key and as value (DeepSeek-V2, 2024).

    `rank`: of the latent; `turned`: the part of the key behind it, which turns with the position.
    """

    layers: int
    rank: int
    turned: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * (self.rank + self.turned) * self.dtype.itemsize

    @property
    def bytes_per_window_page(self) -> int:
        return 0

    def allocate(
        self, pages: int, page_size: int, device: torch.device, window_pages: int = 0
    ) -> KVPool:
        """Not initialised, as that of `PairLayout`."""
        shape = (self.layers, pages * page_size + 1, 1, self.rank + self.turned)
        memory = torch.empty(shape, dtype=self.dtype, device=device)
        memory[:, -1] = 0
        layers = [LayerKV(k, k, page_size, self.turned) for k in memory.unbind(0)]
        return KVPool(pages, page_size, layers, [memory])
