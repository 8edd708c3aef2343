"""Weights of 4 bits as kernels read them, and products with them, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear, PlainWeight, plain
from ramify.gpu.ops.linear.four_bits import FourBitWeight, four_bit_form, packed
from ramify.gpu.ops.linear.grouped import GroupedWeight, four_bits, mxfp4
from ramify.gpu.ops.tilings import FOUR_BITS_INVARIANT, FourBitTiling, four_bit_tiling

pytest.importorskip("triton", minversion="3.6")
from ramify.gpu.ops import triton_four_bits as kernels
from ramify.gpu.ops.invariant_linear import InvariantProducts, invariant_product
from ramify.gpu.ops.triton_linear import Products, UnscaledRows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies no bfloat16
OUTPUTS = 48
KINDS = ["32", "64 with zeros", "128", "256", "128 with zeros", "128 with offsets", "mxfp4"]


def weight(kind: str, inputs: int = 256) -> GroupedWeight:
    torch.manual_seed(0)
    floats = torch.randn(OUTPUTS, inputs) * 0.05
    if kind == "mxfp4":
        return mxfp4(floats)
    group, _, zeros = kind.partition(" with ")
    if not zeros:
        return four_bits(floats, int(group))
    codes = torch.randint(0, 16, floats.shape, dtype=torch.int8)
    scales = (torch.rand(OUTPUTS, inputs // int(group)) / 50).half().float()
    offsets = torch.randn(scales.shape) / 20
    if zeros == "zeros":
        offsets = -scales * torch.randint(1, 17, scales.shape)
    return GroupedWeight(codes, scales, offsets, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_what_they_were(kind: str) -> None:
    """In four and a half bits a number, at most; what pads the inputs is not seen."""
    for inputs in (320, 256) if kind in ("32", "mxfp4") else (256,):
        grouped = weight(kind, inputs)
        own = packed(grouped, inputs)
        assert own.shape == (OUTPUTS, inputs)
        room = 1e-6 if "offsets" in kind else 0
        torch.testing.assert_close(own.floats(), grouped.floats(), rtol=0, atol=room)
        assert (
            own.zero_kind
            == {"": "none", "zeros": "integers", "offsets": "floats"}[kind.partition(" with ")[2]]
        )
        x = torch.randn(3, inputs)
        assert torch.equal(own.product(x, None), F.linear(x, own.floats()))
    scales = own.scales.nbytes if own.zeros is None else 0
    assert 8 * scales <= OUTPUTS * inputs / 2


def test_scales_keep_their_numbers() -> None:
    """In 16 bits where these hold them."""
    codes = torch.zeros(2, 128, dtype=torch.int8)
    for scale, dtype in ((0.5, torch.float16), (1e30, torch.bfloat16), (0.1, torch.float32)):
        scales = torch.full((2, 1), scale)
        scales = scales.bfloat16().float() if dtype == torch.bfloat16 else scales
        assert packed(GroupedWeight(codes, scales, None, 4), 128).scales.dtype == dtype


def test_mxfp4_has_the_nearest_numbers() -> None:
    """Of the eight that a scale gives, by its definition; none is further away than half a step."""
    floats = torch.randn(8, 64, dtype=torch.float64) * torch.logspace(-3, 3, 8)[:, None]
    own = packed(mxfp4(floats.float()), 64)
    assert own.is_mxfp4
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scales = torch.ldexp(torch.ones(2, 8), own.scales[:2].int() - 127).t().double()
    for scale, group, found in zip(
        scales.flatten(), floats.view(-1, 32), own.floats().double().view(-1, 32), strict=True
    ):
        assert 4 * scale <= group.abs().max() < 8 * scale
        numbers = torch.cat((levels, -levels)) * scale
        nearest = (group[:, None] - numbers).abs().amin(1)
        torch.testing.assert_close((group - found).abs(), nearest, rtol=1e-6, atol=1e-12)


def test_what_four_bits_do_not_hold() -> None:
    for broken in (weight("32"), four_bits(torch.randn(4, 96), 96), mxfp4(torch.randn(4, 64))):
        if broken.group == 96:
            told = "groups of 96 inputs"
        elif broken.bits == 4:
            broken.bits, told = 8, "8 bits are not served"
        else:
            broken.scales *= 1.5
            told = "not powers of 2"
        with pytest.raises(ValueError, match=told):
            packed(broken, broken.codes.shape[1])


def test_which_products_are_rounded() -> None:
    floats = torch.randn(32, 128)
    for use, kept in (("rows", False), ("gated", False), ("logits", True), ("scores", True)):
        linear = plain(floats, use=use)  # type: ignore[arg-type]
        form = four_bit_form("int4", rounds=True)(linear)
        assert isinstance(form, PlainWeight if kept else FourBitWeight)
        assert isinstance(four_bit_form("int4", rounds=False)(linear), PlainWeight)
    own = four_bit_form("mxfp4", rounds=True)(plain(floats))
    assert isinstance(own, FourBitWeight)
    assert own.is_mxfp4


def close(got: Tensor, wanted: Tensor) -> None:
    assert float((got.double().cpu() - wanted).abs().max()) < 1e-2 * float(wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str) -> None:
    """Each variant alone, with its inputs split: shifts, scales of sums and of weights, zeros."""
    inputs = 320 if kind in ("32", "mxfp4") else 256
    own = on_device(packed(weight(kind, inputs), inputs))
    floats = own.floats().double().cpu()
    torch.testing.assert_close(kernels.widened(own, torch.float32).double().cpu(), floats)
    x = torch.randn(3, inputs).to(DEVICE, HALF)
    output = torch.empty(3, OUTPUTS, device=DEVICE, dtype=HALF)
    bias = torch.randn(OUTPUTS).to(DEVICE, HALF)
    tiling = FourBitTiling(16, 64, 4, 2, splits=2)
    arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    kernels.four_bit_product(kernels.STORE, x, Linear(own, bias), output, tiling, arrived)
    close(output, x.double().cpu() @ floats.T + bias.double().cpu())
    assert not arrived.any()


def on_device(own: FourBitWeight) -> FourBitWeight:
    zeros = None if own.zeros is None else own.zeros.to(DEVICE)
    return FourBitWeight(own.codes.to(DEVICE), own.scales.to(DEVICE), zeros, own.group, own.inputs)


@pytest.mark.parametrize("splits", [1, 2])
def test_what_stands_before_and_after_a_product(splits: int) -> None:
    """The norm of the rows, the activation, the residual sum with the next norm's squares."""
    own = on_device(packed(weight("128"), 256))
    floats = own.floats().double().cpu()
    arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    tiling = FourBitTiling(16, 32, 4, 2, splits)
    x = torch.randn(3, 256).to(DEVICE, HALF)
    squares = torch.rand(3, 3, device=DEVICE) * 64
    divided = x.double().cpu() * torch.rsqrt(squares.double().cpu().sum(1) / 256 + 1e-6)[:, None]
    gate, up = (divided @ floats.T).chunk(2, 1)
    output = torch.empty(3, OUTPUTS // 2, device=DEVICE, dtype=HALF)
    kernels.four_bit_product(kernels.GATED, x, Linear(own), output, tiling, arrived, squares, eps=1e-6)
    close(output, F.silu(gate) * up)
    residual = torch.randn(3, OUTPUTS).to(DEVICE, HALF)
    gain = torch.rand(OUTPUTS).to(DEVICE, HALF)
    wanted = residual.double().cpu() + x.double().cpu() @ floats.T
    rows, parts = torch.empty_like(residual), torch.empty(3, 2, device=DEVICE)
    kernels.four_bit_product(
        kernels.ADD,
        x,
        Linear(own),
        rows,
        tiling,
        arrived,
        residual=residual,
        gain=gain,
        squares_out=parts,
    )
    close(residual, wanted)
    close(rows, wanted * gain.double().cpu())
    close(parts.sum(1), (wanted * wanted).sum(1))


def test_many_tokens_are_the_librarys_and_deterministic_ones_their_own() -> None:
    """A step's products; in the deterministic mode a token's sums do not depend on the others."""
    own = on_device(packed(weight("128"), 256))
    linear, x = Linear(own), torch.randn(260, 256).to(DEVICE, HALF)
    wanted = x.double().cpu() @ own.floats().double().cpu().T
    for products in (Products(DEVICE), InvariantProducts(DEVICE)):
        close(products.plain(UnscaledRows(x), linear, 0.0, None), wanted)
        close(products.library(x[:3], linear), wanted[:3])
    assert torch.equal(invariant_product(linear, x)[7], invariant_product(linear, x[7:8])[0])


@pytest.mark.skipif(not CUDA, reason="the instructions are a GPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 17, 40, 130, 600])
def test_products_on_a_gpu(kind: str, dtype: torch.dtype, tokens: int) -> None:
    if kind == "mxfp4" and dtype == torch.float16:
        pytest.skip("not served")
    own = on_device(packed(weight(kind, 1024), 1024))
    x = torch.randn(tokens, 1024, device=DEVICE).to(dtype)
    wanted = x.double() @ own.floats().double().T
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for tiling in (four_bit_tiling(tokens, OUTPUTS, dtype), FOUR_BITS_INVARIANT):
        output = torch.empty(tokens, OUTPUTS, device=DEVICE, dtype=dtype)
        if tiling is not None:
            kernels.four_bit_product(kernels.STORE, x, Linear(own), output, tiling, arrived)
            close(output, wanted.cpu())
    close(x @ kernels.widened(own, dtype).T, wanted.cpu())
