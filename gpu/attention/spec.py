"""What attention computes: how scores are made of a layer's queries and keys, and which keys count.

A layer has one `AttentionSpec`; back ends read it and nothing else of the model. It does not say how
keys and values are stored (see `kv.layout`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """A score is `scale` * q k, then `softcap` * tanh(score / softcap) if there is a soft cap.

    `window`: how many positions back a token sees, itself included; None: all.
    `sinks` float32[heads]: a score for each head that takes its part of the weights and adds no value,
    as if it were one more key. None: there are none.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether scores are scaled products alone, as the kernels of other libraries know them."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model's attention, and the specs of its layers."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries, keys and values
    specs: tuple[AttentionSpec, ...]
    value_dim: int | None = None  # values are so many first numbers of the keys; None: of their own

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def windows(self) -> list[int | None]:
        """The sliding windows that there are, each once."""
        return list(dict.fromkeys(spec.window for spec in self.specs))
