"""Triton kernels for layers of experts: routing, and parts that the paths after it share.

A few tokens take `triton_experts_few`, or `triton_experts_together` where many of them share an expert;
many tokens take `triton_experts_many`. All sizes are bounded by shapes, so a graph can hold each path.

The reference is `ops.experts`. Imported only where Triton is used; runs on a CPU with
TRITON_INTERPRET=1.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.experts import ExpertActivation, LayerExperts
from ramify.gpu.ops.triton_layer import opened
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait
from ramify.gpu.triton_fp8 import widened

MOST_FEW = 16  # tokens up to which pairs of a token and an expert are not sorted
KINDS: dict[ExpertActivation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}
RELU2 = tl.constexpr(3)  # has no gate: an expert's rows are half as many


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """The routes of tokens. chosen int32[T, top]; counts float32[T, top]: weights in the sum, followed
    by the shared expert's.

    Where other ranks have some of the experts, this rank's come first, and `held` stands for the others.
    """

    chosen: Tensor
    counts: Tensor


def route_tokens(logits: Tensor, layer: LayerExperts) -> ExpertRoutes:
    """Route tokens by logits [T, experts], behind them that of the shared expert's gate, if any."""
    settings, experts = layer.settings, layer.experts
    tokens, shared = len(logits), layer.shared
    places = settings.top + (shared is not None)
    chosen = torch.empty((tokens, settings.top), dtype=torch.int32, device=logits.device)
    counts = torch.empty((tokens, places), dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(tokens,)](
        logits, layer.correction, layer.weights, chosen, counts, logits.shape[1], settings.scale,
        EXPERTS=experts, BLOCK=block, TOP=settings.top, PLACES=places,
        GATED=shared is not None and shared.gated, SIGMOID=settings.score == "sigmoid",
        RENORMALISE=settings.renormalise, GROUPS=settings.groups, GROUP_BEST=settings.group_best,
        TOP_GROUPS=settings.top_groups, FIRST=layer.first, HELD=layer.held,
        GROUP_BLOCK=triton.next_power_of_2(settings.groups),
        OVERLAP=overlaps(logits.device), num_warps=1 if block <= 256 else 4,
        **launch_options(logits.device),
    )  # fmt: skip
    return ExpertRoutes(chosen, counts)


@triton.jit
def _best(scores, BLOCK: tl.constexpr):
    """Find the index of the highest score, the lowest index of equal ones."""
    lane = tl.arange(0, BLOCK)
    return tl.min(tl.where(scores == tl.max(scores), lane, BLOCK))


@triton.jit
def _route(
    logits, correction, weights, chosen, counts, stride, scale, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, GATED: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    TOP_GROUPS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Route one token."""
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    x = tl.load(logits + token * stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        low = tl.exp(-tl.abs(x))
        scores = tl.where(x < 0, low, 1.0) / (1.0 + low)
    else:
        likely = tl.exp(x - tl.max(x))
        scores = likely / tl.sum(likely)
    ranked = tl.where(there, scores, float("-inf"))
    if correction is not None:
        ranked += tl.load(correction + expert, mask=there, other=0.0)
    if GROUPS > 1:
        EACH: tl.constexpr = EXPERTS // GROUPS
        groups = tl.arange(0, GROUP_BLOCK)
        sums = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            own = tl.where(expert // EACH == group, ranked, float("-inf"))
            total = tl.max(own)
            for _ in tl.static_range(1, min(GROUP_BEST, EACH)):
                own = tl.where(expert == _best(own, BLOCK), float("-inf"), own)
                total += tl.max(own)
            sums = tl.where(groups == group, total, sums)
        allowed = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            group = _best(sums, GROUP_BLOCK)
            allowed = allowed | (expert // EACH == group)
            sums = tl.where(groups == group, float("-inf"), sums)
        ranked = tl.where(allowed & there, ranked, float("-inf"))
    place = tl.arange(0, BLOCK)  # of the chosen ones
    own_counts = tl.zeros([BLOCK], tl.float32)
    own_chosen = tl.zeros([BLOCK], tl.int32)
    own_weights = tl.zeros([BLOCK], tl.float32) + scale
    for number in tl.static_range(TOP):
        best = tl.minimum(_best(ranked, BLOCK), EXPERTS - 1)  # where nothing is a number
        score = tl.sum(tl.where(expert == best, scores, 0.0))
        own_counts = tl.where(place == number, score, own_counts)
        own_chosen = tl.where(place == number, best, own_chosen)
        if weights is not None:
            own_weights = tl.where(place == number, tl.load(weights + best) * scale, own_weights)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if RENORMALISE:
        own_counts = own_counts / tl.maximum(tl.sum(own_counts), 1e-20)
    kept = place < TOP
    to = place
    if HELD < EXPERTS:
        own_chosen -= FIRST
        here = kept & (own_chosen >= 0) & (own_chosen < HELD)
        own_chosen = tl.where(here, own_chosen, HELD)
        before = tl.cumsum(here.to(tl.int32), 0)
        to = tl.where(here, before - 1, place - before + tl.sum(here.to(tl.int32)))
    tl.store(chosen + token * TOP + to, own_chosen, mask=kept)
    tl.store(counts + token * PLACES + to, own_counts * own_weights, mask=kept)
    if PLACES > TOP:
        count = 1.0
        if GATED:
            gate = tl.load(logits + token * stride + EXPERTS).to(tl.float32)
            count = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(counts + token * PLACES + TOP, count)


@triton.jit
def activated(gate, up, KIND: tl.constexpr):
    """Apply an expert's activation: see `ops.experts.gated`."""
    if KIND == RELU2:
        y = tl.maximum(gate, 0.0)
        y = y * y
    elif KIND == 2:
        gate = tl.minimum(gate, 7.0)
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.clamp(up, -7.0, 7.0) + 1.0)
    else:
        y = opened(gate, KIND == 1) * up
    return y


@triton.jit
def dot_of_codes(
    w, values, acc, scales, row, at, WIDTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add w times `values` to acc; of codes in groups, each row's times the scale of input `at`."""
    w = widened(w, values.dtype)
    if GROUP:
        own = tl.load(scales + row * ((WIDTH + GROUP - 1) // GROUP) + at // GROUP)
        total = acc + tl.dot(w, values, input_precision=PRECISION) * own[:, None]
    else:
        total = tl.dot(w, values, acc, input_precision=PRECISION)
    return total
