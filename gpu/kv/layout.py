"""The paged KV cache: how keys and values lie in memory, who allocates them and how they are stored.

Page p holds the slots [p * page_size, (p + 1) * page_size). Which branch has a page is the cache actor's
business; this file knows only slots. One slot after the last page belongs to no page: padding
points there. On torch it is only read and stays zero, because what a freed page holds may be NaN, and
zero times NaN would reach a neighbour's output. The CUDA executor's padding writes there too, and
nothing but padding reads it.

A layout is one way to keep a token's keys and values: as pairs, or as a latent vector for all heads. To
add one, write a class like `PairLayout`, and kernels that read and write it; executors and models need
nothing but `KVLayout`. In 8-bit floats (`FP8`) each token and head has a scale: the largest number takes
the largest code. Layers with a window may have slots of their own, fewer ones, in pages of one token:
see `protocol.plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ramify.gpu.kv.states import StatePool

FP8, LARGEST = torch.float8_e4m3fn, 448.0
SCALES = torch.float32  # of four bytes, the least that a GPU copies ahead


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
    k_scales: Tensor | None = None  # [slots, kv_heads], if both are codes
    v_scales: Tensor | None = None

    def store(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, kv_heads, head_dim] to slots int64[T].

        On CUDA `ops.triton_layer.rope_store` does it in the kernel that rotates the keys.
        """
        for own, scales, rows in ((self.k, self.k_scales, k), (self.v, self.v_scales, v)):
            if scales is not None:
                rows, found = to_codes(rows)
                scales.index_copy_(0, slots, found)
                own = own.view(torch.uint8)
            own.index_copy_(0, slots, rows)
            if self.tail:
                break

    def read(self, slots: "slice | Tensor", dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Read keys and values [n, kv_heads, head_dim] of some slots as floats of `dtype`."""
        k = _floats(self.k, self.k_scales, slots, dtype)
        return k, k if self.tail else _floats(self.v, self.v_scales, slots, dtype)


def to_codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [T, heads, D] to codes, as uint8. Returns also the scales of the heads, [T, heads]."""
    wide = rows.float()
    scales = wide.abs().amax(-1).clamp_(min=1e-12) / LARGEST
    codes = (wide / scales[..., None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return codes.view(torch.uint8), scales


def _floats(own: Tensor, scales: Tensor | None, slots: "slice | Tensor", dtype: torch.dtype) -> Tensor:
    if scales is None:
        return own[slots] if isinstance(slots, slice) else own.index_select(0, slots)
    codes = own.view(torch.uint8)
    if isinstance(slots, slice):
        codes, scales = codes[slots], scales[slots]
    else:
        codes, scales = codes.index_select(0, slots), scales.index_select(0, slots)
    return (codes.view(FP8).float() * scales[..., None]).to(dtype)


@dataclass(slots=True)
class KVPool:
    """The memory of all layers. The last slot is for padding.

    `memory`: tensors [layers, slots, ...] that together hold all keys, values and scales of `pages`;
    layers of unequal sizes are in tensors of their own. `window_memory`: the same of window pages.
    """

    pages: int
    page_size: int
    layers: list[LayerKV]
    memory: list[Tensor]
    states: StatePool | None = None  # beside them, of layers that have no keys and values
    window_memory: list[Tensor] = field(default_factory=list)

    @property
    def padding_slot(self) -> int:
        return self.pages * self.page_size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages `sources` int64[n] to `targets` int64[n]. All are read before one is written."""
        for tensor in self.memory:
            copy_pages(tensor, self.page_size, sources, targets, dim=1)


def copy_pages(slots: Tensor, page_size: int, sources: Tensor, targets: Tensor, dim: int = 0) -> None:
    """Copy pages of a tensor whose axis `dim` is slots: whole pages, and perhaps a padding slot."""
    pages = slots.shape[dim] // page_size
    shape = *slots.shape[:dim], pages, page_size, *slots.shape[dim + 1 :]
    paged = slots.narrow(dim, 0, pages * page_size).view(shape)
    paged.index_copy_(dim, targets, paged.index_select(dim, sources))


class KVLayout(Protocol):
    """Interface: one way to keep a model's keys and values."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token, over all layers that do not use window pages."""
        ...

    @property
    def bytes_per_window_page(self) -> int:
        """Bytes of a window page, which is one token, over all layers that use them."""
        ...

    def allocate(
        self, pages: int, page_size: int, device: torch.device, window_pages: int = 0
    ) -> KVPool:
        """Allocate memory for so many pages. Raises torch.OutOfMemoryError."""
        ...


_Part = tuple[Tensor, Tensor | None]


def _head_bytes(dim: int, dtype: torch.dtype) -> int:
    """Count the bytes of a token's key or value of one head, or of its latent."""
    return dim * dtype.itemsize + (SCALES.itemsize if dtype == FP8 else 0)


def _zeros_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocate [layers, slots, heads, D], codes as bytes with scales. The last slot is zeros."""
    tensors = [torch.empty(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device)]
    if dtype == FP8:
        tensors.append(torch.empty(shape[:-1], dtype=SCALES, device=device))
    for tensor in tensors:
        tensor[:, -1] = 0
    return tensors


def _by_layer(part: list[Tensor], dtype: torch.dtype) -> Iterator[_Part]:
    """Split into layers: each has numbers, and scales if they are codes."""
    scales = part[1].unbind(0) if dtype == FP8 else [None] * len(part[0])
    return zip(part[0].view(dtype).unbind(0), scales, strict=True)


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Layout of keys and values as two tensors of one type, slot by slot.

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
        return sum(2 * heads * _head_bytes(dim, self.dtype) for heads, dim in sizes)

    def allocate(
        self, pages: int, page_size: int, device: torch.device, window_pages: int = 0
    ) -> KVPool:
        """See `KVLayout`. Not initialised: memory of pages that are never used is never committed."""
        memory: list[Tensor] = []
        window_memory: list[Tensor] = []
        views: dict[tuple[tuple[int, int], bool], Iterator[tuple[_Part, _Part]]] = {}
        for size, windowed in dict.fromkeys(self._layers):
            slots = window_pages if windowed else pages * page_size
            shape = (self._layers.count((size, windowed)), slots + 1, *size)
            parts = [_zeros_last(shape, self.dtype, device) for _ in range(2)]
            (window_memory if windowed else memory).extend(tensor for part in parts for tensor in part)
            # one view a layer, made once: indexing a tensor costs more than an attention layer's sums
            views[size, windowed] = zip(*(_by_layer(part, self.dtype) for part in parts), strict=True)
        layers = []
        for size, windowed in self._layers:
            (k, k_scales), (v, v_scales) = next(views[size, windowed])
            page = 1 if windowed else page_size
            layers.append(LayerKV(k, v, page, 0, windowed, k_scales, v_scales))
        return KVPool(pages, page_size, layers, memory, window_memory=window_memory)


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """Layout of one vector a token and layer, read by all heads as key and value (DeepSeek-V2, 2024).

    `rank`: width of the latent; `turned`: width of the rotated part of the key behind it.
    """

    layers: int
    rank: int
    turned: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * _head_bytes(self.rank + self.turned, self.dtype)

    @property
    def bytes_per_window_page(self) -> int:
        return 0

    def allocate(
        self, pages: int, page_size: int, device: torch.device, window_pages: int = 0
    ) -> KVPool:
        """See `PairLayout.allocate`."""
        shape = (self.layers, pages * page_size + 1, 1, self.rank + self.turned)
        memory = _zeros_last(shape, self.dtype, device)
        layers = [
            LayerKV(k, k, page_size, self.turned, False, scales, scales)
            for k, scales in _by_layer(memory, self.dtype)
        ]
        return KVPool(pages, page_size, layers, memory)
