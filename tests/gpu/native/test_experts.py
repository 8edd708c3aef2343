"""Layers of experts in 8 bits, against the same numbers in float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.native.experts import RENORMALISE, SHARED, SHARED_GATE, SIGMOID
from ramify.gpu.native.kernels import Kernels, empty_quantised, empty_routed
from ramify.gpu.native.linear import WEIGHED
from ramify.gpu.native.packer import Packer
from ramify.gpu.ops.experts import RouterSettings, route
from ramify.gpu.ops.linear.base import plain
from ramify.gpu.ops.linear.packed import CpuForms, cpu_weight
from tests.gpu.native.test_rows import words

EXPERTS, HIDDEN, SIZE = 21, 64, 48


def rounded(rows: Tensor) -> Tensor:
    """As 8 bits hold each row, in float64."""
    scale = rows.float().abs().amax(-1, keepdim=True) / 127
    return ((rows / scale).round() * scale).double()


@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(top=3, renormalise=False, scale=1.5),
        RouterSettings(top=1, score="sigmoid", corrected=True),
        RouterSettings(top=4),
    ],
)
def test_routes(kernels: Kernels, run: Callable[..., None], settings: RouterSettings) -> None:
    """Ties go to the lower index; scores that are no numbers choose experts that there are."""
    torch.manual_seed(1)
    x, router = torch.randn(7, HIDDEN).round(), torch.randn(EXPERTS + 1, HIDDEN).round()
    x[3], x[5, 2] = 0, torch.nan
    correction = torch.randn(EXPERTS).round(decimals=1) if settings.corrected else None
    to = empty_routed(9, settings.top, EXPERTS)
    flags = SIGMOID * (settings.score == "sigmoid") + RENORMALISE * settings.renormalise
    flags += SHARED + SHARED_GATE
    to.of_tokens(7)
    run(*kernels.route(words(7), x, None, router, correction, to, flags, settings.scale))
    assert (to.chosen[5] >= 0).all()
    assert (to.chosen[5] < EXPERTS).all()
    known = [0, 1, 2, 3, 4, 6]
    logits = x[known] @ router.T
    counts, chosen = route(logits[:, :-1], correction, settings)
    assert torch.equal(to.chosen[known], chosen)
    torch.testing.assert_close(to.weights[known], counts)
    torch.testing.assert_close(to.beside[known], logits[:, -1].sigmoid())
    pairs = to.chosen[:7].flatten()
    assert to.pairs[: len(pairs)].tolist() == pairs.sort(stable=True).indices.tolist()
    assert to.most_tiles[0] >= to.tiles[0] == len(pairs.unique())


@pytest.mark.parametrize(("tokens", "shared"), [(1, False), (9, True), (130, False)])
def test_products(kernels: Kernels, run: Callable[..., None], tokens: int, shared: bool) -> None:
    """Of one expert with several tiles, too; nothing is read of experts that nobody chose."""
    torch.manual_seed(2)
    isa, form, top = kernels.isa, CpuForms(Packer(kernels.isa)).form, 2
    x = torch.randn(tokens, HIDDEN)
    gate_up = torch.randn(EXPERTS, 2 * SIZE, HIDDEN)
    down, bias = torch.randn(EXPERTS, HIDDEN, SIZE), torch.randn(EXPERTS, HIDDEN)
    stacked = [
        replace(plain(gate_up.flatten(0, 1), use="gated"), stacked=EXPERTS),
        replace(plain(down.flatten(0, 1), bias.flatten()), stacked=EXPERTS),
    ]
    for linear in stacked:
        linear.weight = form(linear)
    up, back = (cpu_weight(linear).packed for linear in stacked)
    to = empty_routed(tokens, top, EXPERTS)
    to.of_tokens(tokens)
    logits = torch.randn(tokens, EXPERTS)
    logits[:, 5] = 9.0  # of every token
    rows = torch.eye(EXPERTS)
    hidden = torch.zeros(tokens, EXPERTS + 11)
    hidden[:, :EXPERTS] = logits
    router = F.pad(rows, (0, 11))
    beside = torch.randn(tokens, HIDDEN) if shared else None
    flags = RENORMALISE + SHARED * shared
    quantised, middle = empty_quantised(tokens, HIDDEN, isa), empty_quantised(top * tokens, SIZE, isa)
    opened, added = torch.zeros(top * tokens, 64), torch.zeros(top * tokens, HIDDEN)
    out = torch.full((tokens, HIDDEN), torch.nan)
    used = route(logits, None, RouterSettings(top=top))[1].unique().tolist()
    for expert in set(range(EXPERTS)) - set(used):  # would spoil what reads them
        for weight in (up, back):
            weight.scales.view(EXPERTS, -1)[expert] = torch.nan
    run(
        *kernels.route(words(tokens), hidden, None, router, None, to, flags, 1.0),
        kernels.quantise(words(tokens), x, HIDDEN, quantised),
        kernels.of_experts(quantised, up, to, EXPERTS, opened, "silu"),
        kernels.quantise(to.pair_count, opened, SIZE, middle),
        kernels.of_experts(middle, back, to, EXPERTS, added, WEIGHED),
        kernels.sum_experts(words(tokens), added, to, beside, out),
    )
    counts, chosen = route(logits, None, RouterSettings(top=top))
    wanted = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token in range(tokens):
        for count, expert in zip(counts[token], chosen[token].tolist(), strict=True):
            gate, wide = (rounded(x[token : token + 1]) @ rounded(gate_up[expert]).T)[0].chunk(2)
            row = rounded((F.silu(gate) * wide).float()[None])
            wanted[token] += count * ((row @ rounded(down[expert]).T)[0] + bias[expert])
    if beside is not None:
        wanted += beside
    # a value between two numbers of 8 bits may be rounded the other way
    assert (out - wanted).norm() < 2e-3 * wanted.norm()
