"""The gated feed-forward block (SwiGLU, Shazeer 2020): down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear import Linear


@dataclass(slots=True)
class GatedMLP:
    """`gate_up`: [2 * intermediate, hidden], the gate's rows first; `down`: [hidden, intermediate]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))
