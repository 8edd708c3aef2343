"""Few tokens by weights of 4 bits in the layout of tensor cores' operands, beside float32."""

from concurrent.futures import Future

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")

from ramify.gpu.ops import triton_linear
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.linear.humming import CompiledRows, HummingWeight
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import FragmentTiling
from ramify.gpu.ops.triton_linear import Products, UnscaledRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def turned(values: Tensor) -> Tensor:
    """[groups, outputs]: of 64 outputs those that are 8 apart lie together."""
    return values.view(-1, values.shape[1] // 64, 8, 8).transpose(2, 3).reshape(values.shape)


def packed(codes: Tensor) -> Tensor:
    """[..., 8] -> int32 [...], the lowest bits first."""
    words = (codes.long() << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def drawn(outputs: int, inputs: int, has_zeros: bool) -> tuple[HummingWeight, Tensor]:
    """A weight as the package lays it out, and its numbers."""
    codes = torch.randint(0, 16, (outputs, inputs))
    scales = (torch.rand(inputs // 128, outputs) * 0.1 + 0.01).bfloat16()
    zeros = torch.randint(0, 16, scales.shape) if has_zeros else torch.full(scales.shape, 8)
    split = codes.view(outputs // 64, 4, 2, 8, inputs // 16, 2, 4, 2)
    words = packed(split.permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(inputs // 16, -1, 8))
    tensors = {"weight": words, "weight_scale": turned(scales)}
    if has_zeros:
        tensors["zero_point"] = packed(turned(zeros).view(len(zeros), -1, 8))
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    groups = (codes.view(outputs, -1, 128) - zeros.t()[:, :, None]) * scales.float().t()[:, :, None]
    weight = HummingWeight(
        tensors, (outputs, inputs), CompiledRows(Future()), torch.empty(0), fragments=True
    )
    return weight, groups.view(outputs, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "has_zeros", "splits"), [(1, False, 1), (5, True, 2), (8, False, 2)])
def test_the_three_products(
    tokens: int, has_zeros: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(tokens)
    monkeypatch.setattr(triton_linear, "fragment_tiling", lambda *_: FragmentTiling(2, splits))
    outputs, inputs = 128, 384
    weight, wide = drawn(outputs, inputs, has_zeros)
    products, linear = Products(DEVICE), Linear(weight)
    x = torch.randn(tokens, inputs).bfloat16()
    squares = torch.rand(tokens, 5) * inputs / 5
    rows = UnscaledRows(x.to(DEVICE), squares.to(DEVICE))
    plain = x.float() @ wide.t()
    scaled = plain * torch.rsqrt(squares.sum(1, keepdim=True) / inputs + 1e-6)
    gate, up = scaled.chunk(2, 1)
    residual, gain = torch.randn(tokens, outputs).bfloat16(), torch.rand(outputs).bfloat16()
    total = residual.to(DEVICE, copy=True)
    added = products.add(x.to(DEVICE), linear, total, RMSNorm(gain.to(DEVICE), 1e-6), None)
    assert added.squares is not None
    summed = residual.float() + plain
    for found, wanted in (
        (products.plain(rows, linear, 1e-6, None), scaled),
        (products.gated(rows, linear, 1e-6, None), F.silu(gate) * up),
        (total, summed),
        (added.values, summed * gain.float()),
        (added.squares.sum(1).sqrt(), summed.norm(dim=1)),
    ):
        assert (found.float().cpu() - wanted).norm() < 0.01 * wanted.norm()
