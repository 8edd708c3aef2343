"""Latent attention (DeepSeek-V2, 2024): what heads make of a token's latent, and where that is done.

A head's key and value are products of the latent. *Absorbed*, the query and the output go through these
products instead, and attention runs over the latents themselves, as one KV head of all query heads.
*Expanded*, keys and values are made first: fewer sums for many queries, more for few. Knows weights and
counts, neither pages nor kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec, LatentSizes


@dataclass(slots=True)
class LatentHeads:
    """`up` [heads, nope + value, rank]: a head's key, without what turns, and its value of a latent."""

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
        """q [T, heads, nope + turned] -> [T, heads, rank + turned], which reads latents."""
        made = torch.einsum("thn,hnr->thr", q[..., : self.nope], self.up[:, : self.nope])
        return torch.cat((made, q[..., self.nope :]), -1)

    def open(self, mixed: Tensor) -> Tensor:
        """Mixed latents [T, heads, rank or more] -> outputs [T, heads, value]."""
        return torch.einsum("thr,hvr->thv", mixed[..., : self.rank], self.up[:, self.nope :])

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [n, rank + turned] -> keys [heads, n, nope + turned], values [heads, n, value]."""
        made = torch.einsum("nr,hmr->hnm", latents[:, : self.rank], self.up)
        turned = latents[None, :, self.rank :].expand(len(self.up), -1, -1)
        return torch.cat((made[..., : self.nope], turned), -1), made[..., self.nope :]

    def pays_to_expand(self, queries: int, keys: int, turned: int) -> bool:
        """See `LatentSizes`."""
        return LatentSizes(self.rank, self.nope, turned, self.value).pays_to_expand(queries, keys)
