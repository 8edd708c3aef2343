"""Weights in 8-bit floats: the numbers of codes and scales, and products with them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear, plain
from ramify.gpu.ops.linear.fp8 import CODES, GROUP, Fp8Weight, fp8_form, rounded

CPU = torch.device("cpu")


def weights(outputs: int, inputs: int, grouped: bool) -> Fp8Weight:
    torch.manual_seed(outputs)
    groups = -(-inputs // GROUP) if grouped else 1
    return Fp8Weight(torch.randn(outputs, inputs).to(CODES), torch.rand(outputs, groups) + 0.1)


def exact(weight: Fp8Weight) -> Tensor:
    """By definition, number by number in float64."""
    inputs = weight.codes.shape[1]
    group = torch.arange(inputs) // (GROUP if weight.scales.shape[1] > 1 else inputs)
    return weight.codes.double() * weight.scales.double()[:, group]


@pytest.mark.parametrize("grouped", [False, True])
def test_forms_keep_the_numbers(grouped: bool) -> None:
    one, two = weights(6, 300, grouped), weights(4, 300, not grouped)
    order = torch.tensor([3, 0, 9, 1, 2, 4, 8, 5, 6, 7])
    both = torch.cat((exact(one), exact(two)))
    merged = one.joined([two])
    assert torch.equal(merged.floats(), both.float())
    assert torch.equal(merged.in_order(order).floats(), both[order].float())
    assert torch.equal(merged.rows(2, 7).floats(), both[2:7].float())
    x, bias = torch.randn(3, 300), torch.randn(10)
    wanted = x.double() @ both.t() + bias.double()
    torch.testing.assert_close(merged.product(x, bias).double(), wanted, rtol=1e-5, atol=1e-4)


def test_rounding_takes_the_nearest_code_of_each_row() -> None:
    weight = torch.randn(5, 64) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0])[:, None]
    found = rounded(weight)
    assert torch.equal(found.floats()[3], weight[3])
    error = (found.floats() - weight).abs()
    assert bool((error <= weight.abs() / 16 + found.scales * 2**-10).all())  # half a unit of 3 bits


def test_logits_and_routers_stay_floats() -> None:
    form = fp8_form(CPU, rounds=True)
    for use in ("logits", "scores"):
        linear = plain(torch.randn(4, 8), use=use)
        assert form(linear) is linear.weight
    assert isinstance(form(plain(torch.randn(4, 8))), Fp8Weight)
    kept = plain(torch.randn(4, 8))
    assert fp8_form(CPU, rounds=False)(kept) is kept.weight


# --- Triton's products, in the interpreter or on a GPU ---


def check(found: Tensor, wanted: Tensor, room: float) -> None:
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < room


@pytest.mark.parametrize("grouped", [False, True])
def test_kernels_widen_codes(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated, added to a residual and split, merged; of few rows and of many. Reference: float64."""
    pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")
    from ramify.gpu.ops import triton_linear
    from ramify.gpu.ops.rmsnorm import RMSNorm
    from ramify.gpu.ops.tilings import Tiling
    from ramify.gpu.ops.triton_linear import Products, UnscaledRows

    device, dtype, room = CPU, torch.float32, 1e-5
    if torch.cuda.is_available():
        device, dtype, room = torch.device("cuda"), torch.bfloat16, 2**-7
    products = Products(device)
    inputs, outputs = 2 * GROUP, 64
    weight = weights(outputs, inputs, grouped)
    numbers = exact(weight)
    linear = Linear(weight.on(device), torch.randn(outputs).to(device, dtype))
    assert linear.bias is not None
    x = torch.randn(3, inputs).to(device, dtype)
    wanted = x.double().cpu() @ numbers.t() + linear.bias.double().cpu()

    def tiling(self: Any, x: Tensor, linear: Linear, own: Any, gated: bool = False) -> Tiling:
        return Tiling(16, 32, GROUP, splits=2 - gated, stages=2)

    check(products.library(x, linear).cpu(), wanted, room)
    monkeypatch.setattr(triton_linear.Products, "_tiling", tiling)
    check(products.plain(UnscaledRows(x), linear, 0.0, None).cpu(), wanted, room)
    gate, up = wanted.chunk(2, 1)
    found = products.gated(UnscaledRows(x), linear, 0.0, None)
    check(found.cpu(), torch.nn.functional.silu(gate) * up, room)
    residual = torch.randn(3, outputs).to(device, dtype)
    before = residual.double().cpu()
    products.add(x, linear, residual, RMSNorm(torch.ones(outputs).to(device, dtype), 1e-5), None)
    check(residual.cpu(), before + wanted, room)


def test_rows_are_rounded_and_weights_widened_in_one_launch_each() -> None:
    pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")
    from ramify.gpu.ops.triton_tiles import rounded_rows, widened_weight

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(5, 200, device=device) * torch.rand(5, 1, device=device) * 100
    codes, scales = rounded_rows(x)
    found = codes.double() * scales.double()
    assert bool(((found - x).abs() <= x.abs() / 16 + scales * 2**-10).all())
    for grouped in (False, True):
        weight = weights(3, 300, grouped)
        floats = widened_weight(weight.on(device).operand, torch.float32)
        assert torch.equal(floats.cpu(), exact(weight).float())


def test_experts_kernels_widen_codes() -> None:
    """Few tokens with a shared expert, and many: as torch with the floats that codes stand for.

    Gate and up have groups, two of them; down has a scale for each output.
    """
    pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")
    from ramify.gpu.ops.experts import LayerExperts, RouterSettings, SharedExpert, run
    from ramify.gpu.ops.triton_experts import route_tokens
    from ramify.gpu.ops.triton_experts_few import run_few, sum_few
    from ramify.gpu.ops.triton_experts_many import run_many
    from ramify.gpu.ops.triton_experts_together import open_together
    from ramify.gpu.ops.triton_linear import UnscaledRows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts, hidden, size = 2, GROUP + 8, 16

    def coded(outputs: int, inputs: int, stacked: int = 0) -> Linear:
        weight = weights(outputs * max(1, stacked), inputs, inputs > GROUP)
        return Linear(Fp8Weight(weight.codes, weight.scales / 10).on(device), stacked=stacked)

    shared = SharedExpert(coded(2 * size, hidden), coded(hidden, size), size, False, "silu")
    layer = LayerExperts(
        router=plain(torch.randn(experts, hidden, device=device)), correction=None,
        gate_up=coded(2 * size, hidden, experts), down=coded(hidden, size, experts), shared=shared,
        settings=RouterSettings(top=1), activation="silu",
    )  # fmt: skip
    x = torch.randn(2, hidden, device=device) / 10
    wanted = run(x, layer)
    routes = route_tokens(layer.router(x), layer)
    check(run_few(UnscaledRows(x), 0.0, layer, routes).cpu(), wanted.cpu(), 1e-4)
    opened = open_together(UnscaledRows(x), 0.0, layer, routes)
    check(sum_few(opened, layer, routes).cpu(), wanted.cpu(), 1e-4)
    beside = wanted - run(x, replace(layer, shared=None))
    check(run_many(x, layer, routes, beside, True).cpu(), wanted.cpu(), 1e-4)


def test_some_inputs_of_it() -> None:
    """In whole blocks alone."""
    weight = Fp8Weight(torch.randn(5, 300).to(CODES), torch.rand(5, 3))
    for first, last in ((0, 128), (128, 300)):
        torch.testing.assert_close(weight.columns(first, last).floats(), weight.floats()[:, first:last])
    with pytest.raises(ValueError, match="blocks of 128 inputs cannot be divided from 0 to 100"):
        weight.columns(0, 100)
