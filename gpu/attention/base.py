"""What an attention back end offers to the decoder.

A back end owns the step's index tensors and reads and writes the KV pool; the decoder knows
neither pages nor slots.
"""

from typing import Protocol

from torch import Tensor

from ramify.gpu.batch import Batch


class AttentionBackend(Protocol):
    """Causal attention of each token over its own sequence, through the page table."""

    def plan(self, batch: Batch) -> None:
        """Make the step's indices. Once per step, before any layer."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [T, kv_heads, D] in the pool, then attend with q [T, heads, D].

        Returns [T, heads * D].
        """
        ...
