"""Muon for the matrices inside the layers, AdamW for everything else.

Muon: Jordan et al. 2024, momentum made orthogonal by a Newton-Schulz iteration; scaled to the step
size of AdamW as in Liu et al. 2025 (arXiv:2502.16982). Does not know the model beyond parameter names.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


@torch.compile(dynamic=False)
def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly; matrices: [N, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.transpose(1, 2) if tall else x).float()
    return result


class Muon:
    """Momentum with orthogonal updates; all matrices of one shape are handled as one batch."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float, decay: float) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.buffers = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups
        ]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate `rate`."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradients = torch.stack([_gradient(parameter) for parameter in group])
            buffer.lerp_(gradients, 1 - self.momentum)
            update = orthogonal(gradients.lerp(buffer, self.momentum))
            update *= 0.2 * max(group[0].shape) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError("step() before backward(): a parameter has no gradient")
    return parameter.grad


class Optimizer:
    """Both optimizers behind one step; `muon=False` uses AdamW for all parameters."""

    def __init__(self, model: nn.Module, decay: float, muon: bool = True) -> None:
        named = [(name, weight) for name, weight in model.named_parameters()]
        inner = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        chosen = {id(weight) for weight in inner} if muon else set()
        rest = [weight for _, weight in named if id(weight) not in chosen]
        self.muon = Muon(inner, 0.95, decay) if muon else None
        self.adam = torch.optim.AdamW(
            [
                {"params": [weight for weight in rest if weight.ndim == 2], "weight_decay": 0.0 if muon else decay},
                {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95), fused=True,
        )  # fmt: skip
        self.parameters = [weight for _, weight in named]

    def step(self, rate: float) -> None:
        """Clip, update, and forget the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        if self.muon:
            self.muon.step(rate)
        self.adam.zero_grad(set_to_none=True)
        for weight in self.parameters:
            weight.grad = None

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on."""
        return {"adam": self.adam.state_dict(), "muon": self.muon.buffers if self.muon else []}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.adam.load_state_dict(state["adam"])
        if self.muon:
            for mine, saved in zip(self.muon.buffers, state["muon"], strict=True):
                mine.copy_(saved)
