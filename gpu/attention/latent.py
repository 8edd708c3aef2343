"""Latent attention (DeepSeek-V2, 2024): the products of heads with latents, absorbed or expanded.

A head's key and value are products of the latent. *Absorbed*, the query and the output go through these
products instead, and attention runs over the latents themselves, as one KV head of all query heads.
*Expanded*, keys and values are made first: fewer sums for many queries, more for few. This file knows
weights and counts, neither pages nor kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec, LatentSizes


@dataclass(slots=True)
class LatentHeads:
    """The heads' weights. `up` [heads, nope + value, rank]: latent to unrotated key, and to value."""

    up: Tensor
    nope: int
    spec: AttentionSpec

    @property
    def rank(self) -> int:
        return self.up.shape[2]

    @property
    def value(self) -> int:
        return self.up.shape[1] - self.nope

    def absorb(self, q: Tensor) -> Tensor:
        """Absorb: q [T, heads, nope + turned] -> [T, heads, rank + turned], which reads latents."""
        made = torch.einsum("thn,hnr->thr", q[..., : self.nope], self.up[:, : self.nope])
        return torch.cat((made, q[..., self.nope :]), -1)

    def open(self, mixed: Tensor) -> Tensor:
        """Multiply mixed latents [T, heads, rank or more] to outputs [T, heads, value]."""
        return torch.einsum("thr,hvr->thv", mixed[..., : self.rank], self.up[:, self.nope :])

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Expand [n, rank + turned] to keys [heads, n, nope + turned] and values [heads, n, value]."""
        made = torch.einsum("nr,hmr->hnm", latents[:, : self.rank], self.up)
        turned = latents[None, :, self.rank :].expand(len(self.up), -1, -1)
        return torch.cat((made[..., : self.nope], turned), -1), made[..., self.nope :]

    def pays_to_expand(self, queries: int, keys: int, turned: int) -> bool:
        """Whether expanding is cheaper: see `LatentSizes`."""
        return LatentSizes(self.rank, self.nope, turned, self.value).pays_to_expand(queries, keys)
