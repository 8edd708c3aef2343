"""The paged KV cache: one pair of tensors, layer by layer, token slot by token slot.

Page p holds the slots [p * page_size, (p + 1) * page_size). Which page belongs to whom is the
cache actor's business; this file knows only slots. One slot after the last page belongs to no
page: padding points there. On torch it is only read and stays zero, because what a freed page
holds may be NaN, and zero times NaN would reach a neighbour's output. The fused executor's padding
writes there too, and nothing but padding reads it.
"""

import torch
from torch import Tensor


class KVPool:
    """`k` and `v`: [layers, pages * page_size + 1, kv_heads, head_dim].

    Not initialised: memory of pages that are never used is never committed by the system.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.padding_slot = pages * page_size
        shape = (layers, self.padding_slot + 1, kv_heads, head_dim)
        self.k: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.v: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.k[:, self.padding_slot] = 0
        self.v[:, self.padding_slot] = 0
        # one view a layer, made once: indexing a tensor costs more than an attention layer's sums
        self.layers: list[tuple[Tensor, Tensor]] = list(
            zip(self.k.unbind(0), self.v.unbind(0), strict=True)
        )

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, kv_heads, head_dim] to slots int64[T]."""
        keys, values = self.layers[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize
