"""A layer of experts on torch: each token is sent to a few feed-forwards of many (Shazeer et al. 2017).

The reference for kernels. It reads only the experts that some token was sent to. Ties go to the expert
with the lower index.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm

Activation = Literal["silu", "gelu_tanh"]
"""A gate's activation: x * sigmoid(x) (SwiGLU), or GELU by its tanh formula (GeGLU; Shazeer 2020)."""

ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""An expert's activation: a gate's, or those of gpt-oss and Nemotron, see `gated`."""

CLAMP, SHARPNESS = 7.0, 1.702  # of gpt-oss


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The choice of a token's experts, and their weights in the sum.

    `score`: softmax over all experts, or a sigmoid of each. `renormalise`: the chosen ones' scores are
    divided by their sum. `groups`: experts are chosen from those `top_groups` of the groups whose
    `group_best` highest scores have the highest sum (DeepSeek-V3: two, V2: one). `corrected`: a number
    for each expert is added for choosing only. `weighed`: an expert's weight has a factor of its own.
    """

    top: int = 1
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    corrected: bool = False
    weighed: bool = False


@dataclass(slots=True)
class SharedExpert:
    """A feed-forward that every token goes through besides its experts.

    `gated`: it is multiplied by a sigmoid, whose row is the last one of the router.
    """

    gate_up: Linear
    down: Linear
    size: int
    gated: bool
    activation: Activation | Literal["relu2"]  # the same as of its own


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The tile of a program of a GPU's kernels for many tokens."""

    rows: int  # tokens
    columns: int  # outputs
    depth: int
    warps: int
    stages: int


@dataclass(slots=True)
class LayerExperts:
    """The weights of one layer, whose experts are stacked. correction, weights: float32[experts].

    `first`, `total`: this rank's first expert and the number of all, where other ranks have the rest.
    `router_norm`: the router reads the residual after it; None: the experts' input. `tiles`: of the
    kernels, by the most pairs an expert; None: not measured.
    """

    router: Linear  # [experts, hidden], and one more row with a shared expert that has a gate
    correction: Tensor | None
    gate_up: (
        Linear  # of each expert [2 * size, hidden], the gate's rows first; without a gate [size, ..]
    )
    down: Linear  # of each [hidden, size]
    shared: SharedExpert | None
    settings: RouterSettings
    activation: ExpertActivation
    weights: Tensor | None = None
    router_norm: RMSNorm | None = None
    tiles: tuple[tuple[int, ExpertTile], ...] | None = None
    first: int = 0
    total: int = 0

    @property
    def experts(self) -> int:
        """The number of experts to choose from."""
        return self.total or self.gate_up.stacked

    @property
    def held(self) -> int:
        """The number of experts that this rank has."""
        return self.gate_up.stacked

    @property
    def divided(self) -> bool:
        """Whether other ranks have experts of this layer."""
        return self.held < self.experts

    @property
    def size(self) -> int:
        """The width of an expert's activation, which `down` reads."""
        return self.down.weight.shape[1]


def opened(gate: Tensor, activation: Activation) -> Tensor:
    """Apply the activation of a gate."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def gated(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Compute activation(gate) * up of [T, 2 * size], the gate first; "relu2": max(x, 0)^2 of [T, size].

    "clamped_swiglu": gate * sigmoid(1.702 gate) * (up + 1), the gate at most 7 and up within 7 of 0.
    """
    if activation == "relu2":
        return gate_up.relu().square_()
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=CLAMP)
        return gate * (gate * SHARPNESS).sigmoid() * (up.clamp(-CLAMP, CLAMP) + 1)
    return opened(gate, activation).mul_(up)


def route(
    logits: Tensor, correction: Tensor | None, settings: RouterSettings, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by logits [T, experts]. Returns weights float32[T, top], indices int64[T, top]."""
    logits = logits.float()
    scores = logits.sigmoid() if settings.score == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if settings.groups > 1:
        by_group = ranked.view(len(ranked), settings.groups, -1)
        best = by_group.topk(min(settings.group_best, by_group.shape[-1]), dim=-1).values.sum(-1)
        left_out = _best(best, settings.groups)[:, settings.top_groups :]
        ranked = by_group.scatter(
            1, left_out[:, :, None].expand(-1, -1, by_group.shape[-1]), float("-inf")
        ).flatten(1)
    chosen = _best(ranked, settings.top)
    counts = scores.gather(1, chosen)
    if settings.renormalise:
        counts = counts / counts.sum(-1, keepdim=True).clamp_(min=1e-20)
    if weights is not None:
        counts = counts * weights[chosen]
    return counts * settings.scale, chosen


def _best(scores: Tensor, count: int) -> Tensor:
    """Find the indices of the highest scores, the lower index first where they are equal."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def run(x: Tensor, layer: LayerExperts, routed: Tensor | None = None) -> Tensor:
    """Sum the outputs of each token's experts and of the shared one: x [T, hidden] -> [T, hidden].

    `routed` [T, hidden]: the router's input, if it is not `x`.
    """
    logits, experts = layer.router(x if routed is None else routed), layer.experts
    counts, chosen = route(logits[:, :experts], layer.correction, layer.settings, layer.weights)
    output = torch.zeros_like(x)
    for expert in chosen.flatten().bincount().nonzero().flatten().tolist():
        own = expert - layer.first
        if not 0 <= own < layer.held:
            continue
        tokens, places = torch.where(chosen == expert)
        rows = gated(F.linear(x[tokens], *layer.gate_up.matrix(own, x.dtype)), layer.activation)
        rows = F.linear(rows, *layer.down.matrix(own, x.dtype))
        rows = rows * counts[tokens, places, None].to(rows.dtype)
        output.index_add_(0, tokens, rows)
    shared = layer.shared
    if shared is not None:
        rows = shared.down(gated(shared.gate_up(x), shared.activation))
        output += rows * logits[:, experts:].sigmoid() if shared.gated else rows
    return output
