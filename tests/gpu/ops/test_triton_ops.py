"""The operations on Triton against those on torch, one after another, as a layer calls them."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")

from ramify.gpu.kv.layout import PairLayout
from ramify.gpu.ops.base import Activation, Projection, ResidualStream
from ramify.gpu.ops.invariant_linear import InvariantProducts
from ramify.gpu.ops.linear.base import plain
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import LayerSizes, OpTilings, Tiling
from ramify.gpu.ops.torch_ops import TorchOps
from ramify.gpu.ops.triton_linear import Products
from ramify.gpu.ops.triton_ops import LazyStream, TritonOps
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import StepInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, WIDE, TOKENS = 64, 96, 3
TILINGS = {
    "library": OpTilings(),
    "tiled": OpTilings(Tiling(16, 32, 32), Tiling(16, 32, 32, splits=2), Tiling(16, 32, 32)),
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def norm(offset: float = 0.5) -> RMSNorm:
    return RMSNorm(torch.rand(HIDDEN, device=DEVICE) + offset, 1e-5)


class Both:
    """The same step on torch and on Triton."""

    def __init__(self, tilings: OpTilings, products: Products) -> None:
        pool = PairLayout(((1, 16),), torch.float32).allocate(1, 16, DEVICE)
        pages = torch.zeros((2, 1), dtype=torch.int32, device=DEVICE)
        last = torch.tensor([7, 8], dtype=torch.int32, device=DEVICE)
        sizes = LayerSizes(HIDDEN, 16, 48, WIDE, torch.float32, overlaps=False)
        nobody = cast(Any, None)
        self.torch = TorchOps(pool, last.long(), nobody)
        self.triton = TritonOps(
            pool, pages, last, nobody, products, sizes, [], lambda tokens, sizes: tilings
        )


@pytest.fixture(params=[*TILINGS, "deterministic"])
def both(request: pytest.FixtureRequest) -> Both:
    torch.manual_seed(3)
    if request.param == "deterministic":
        return Both(OpTilings(), InvariantProducts(DEVICE))
    return Both(TILINGS[request.param], Products(DEVICE))


def same(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_layer(both: Both, post: bool, activation: Activation) -> None:
    """Whatever is left half done in between, each result is that of torch."""
    ids = torch.tensor([4, -2, 0], dtype=torch.int32, device=DEVICE)
    step = StepInputs.from_parts(Bucket(0, 0, TOKENS, TOKENS), {"input_ids": ids})
    table = random(20, HIDDEN)
    qkv, output, up, down = (
        plain(random(rows, columns) / columns**0.5)
        for rows, columns in ((48, HIDDEN), (HIDDEN, 16), (2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    )
    norms = [norm() for _ in range(5)]
    mixed, head = random(TOKENS, 16), plain(random(30, HIDDEN))
    found: list[list[Tensor]] = []
    for ops in (both.torch, both.triton):
        any_ops: Any = ops
        any_ops.begin(step)
        x: ResidualStream = any_ops.embed(step, table, 2.5, norms[0])
        results = [any_ops.linear(x, qkv)]
        x = any_ops.add_norm(x, any_ops.project(mixed, output), norms[1], norms[3] if post else None)
        gated = any_ops.gated(x, up, activation)
        x = any_ops.add_norm(x, any_ops.project(gated, down), norms[2], norms[4] if post else None)
        results += [gated, x.residual.clone()]
        whole = Projection(output(mixed), None)  # as behind a sum over ranks
        x = any_ops.add_norm(x, any_ops.reduce(whole), norms[1], norms[3] if post else None)
        results += [x.residual]
        chosen = torch.tensor([2, 0], device=DEVICE)
        results += [any_ops.head(x, lines, head, cap) for lines in (None, chosen) for cap in (None, 2.0)]
        found.append(results)
    for ours, wanted in zip(found[1], found[0], strict=True):
        same(ours, wanted)


def test_a_norm_is_left_half_done_where_products_are_tiled() -> None:
    torch.manual_seed(3)
    both = Both(TILINGS["tiled"], Products(DEVICE))
    residual, following = random(TOKENS, HIDDEN), norm()
    x = LazyStream(residual, residual, None, following.eps, TILINGS["tiled"])
    added = both.triton.project(random(TOKENS, 16), plain(random(HIDDEN, 16)))
    lazy = both.triton.add_norm(x, added, following)
    assert lazy.squares is not None
    mean = lazy.squares.sum(1, keepdim=True) / HIDDEN
    same(lazy.normed * (mean + following.eps).rsqrt(), following(lazy.residual))


def test_a_blank_stream_has_a_head() -> None:
    both = Both(OpTilings(), Products(DEVICE))
    logits = both.triton.head(both.triton.blank(2), None, plain(random(30, HIDDEN)), None)
    assert logits.tolist() == torch.zeros(2, 30).tolist()
