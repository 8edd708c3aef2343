"""The settings of attention: how scores are computed, and which keys a query sees.

A layer has one `AttentionSpec`; back ends read it and nothing else of the model. It does not say how
keys and values are stored (see `kv.layout`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

WINDOW_SLOTS = "window_slots"  # in a plan, as "slots": of layers whose keys are in window pages


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """A layer's attention: a score is `scale` * q k, with a soft cap softcap * tanh(score / softcap).

    `window`: how many positions back a token sees, itself included; None: all.
    `sinks` float32[heads]: a score for each head that takes its part of the weights and adds no value,
    as if it were one more key. None: there are none.
    `whole`: a token of a picture also sees the later tokens of the same picture.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    whole: bool = False

    @property
    def plain(self) -> bool:
        """Whether scores are scaled products alone, which the kernels of other libraries know."""
        return self.softcap is None and self.sinks is None


_FEW_HEADS = 32  # that read a latent: so few are taken in tiles of 16, which one product multiplies


def latent_group(heads: int) -> int:
    """Choose how many of the heads that share latents one program takes.

    A tile keeps an output as wide as the latent for each line: registers allow 64, and drafts are two.
    """
    most = 16 if heads <= _FEW_HEADS else 32
    return max(count for count in range(1, most + 1) if heads % count == 0)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention: see `LatentSettings`."""

    rank: int
    nope: int
    turned: int
    value: int

    def pays_to_expand(self, queries: int, keys: int) -> bool:
        """Whether so many queries, the last of `keys`, cost less if keys are made first.

        Counted in multiplications of one head. With DeepSeek's sizes that is so from 171 queries on.
        """
        seen = queries * (keys - (queries - 1) / 2)  # pairs of a query and a key
        making = self.rank * (self.nope + self.value)
        absorbed = queries * making + seen * (2 * self.rank + self.turned)
        return keys * making + seen * (self.nope + self.turned + self.value) < absorbed


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model's attention, and the specs of its layers."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries; of keys and values, if these are no codes
    specs: tuple[AttentionSpec, ...]
    value_dim: int | None = None  # values are so many first numbers of the keys; None: of their own
    windowed: bool = False  # keys and values are in window pages
    latent: LatentSizes | None = None
    codes: bool = False  # keys and values are 8-bit floats with scales

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def tiled(self) -> "AttentionShape":
        """The shape for kernels: a latent's query heads in groups, which each read it as a KV head."""
        if self.value_dim is None:
            return self
        kv_heads = self.heads // latent_group(self.heads)
        return replace(self, kv_heads=kv_heads, head_dim=self.value_dim)

    @property
    def whole(self) -> bool:
        """Whether a layer sees pictures whole."""
        return any(spec.whole for spec in self.specs)

    @property
    def windows(self) -> list[int | None]:
        """The sliding windows of the layers, each once."""
        return list(dict.fromkeys(spec.window for spec in self.specs))
