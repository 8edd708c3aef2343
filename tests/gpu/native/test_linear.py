"""Products of 8-bit integers: the same sums with every instruction set, and what is done with them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.native.host import Isa, host_isa
from ramify.gpu.native.kernels import Kernels, Quantised, empty_quantised
from ramify.gpu.native.linear import ROW_BLOCK
from ramify.gpu.native.threads import Crew, Recording, Words, aligned
from tests.gpu.native.packed import pack_weight


def count_of(number: int) -> Words:
    count = aligned(1)
    count[0] = number
    return count


def quantised(x: Tensor, isa: Isa) -> Quantised:
    """As the kernel `quantise` does it."""
    target = empty_quantised(len(x), x.shape[1], isa)
    target.scales[:] = x.abs().amax(1) / 127
    whole = (x / target.scales[:, None]).round().to(torch.int32) + isa.offset
    target.values[:, : x.shape[1]] = torch.from_numpy(whole.numpy().astype(np.uint8))
    return target


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float64, of the same 8-bit numbers."""

    def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
        scales = values.abs().amax(1, keepdim=True) / 127
        return (values / scales).round().double(), scales.double()

    (a, a_scales), (b, b_scales) = rounded(x), rounded(weight)
    y = a @ b.t() * a_scales * b_scales.t()
    return y if bias is None else y + bias


def test_every_dot_product_gives_the_same_bits(isa: Isa) -> None:
    kinds = [replace(isa, name="plain", dot="plain", offset=0, matrices=False)]
    if isa.matrices:
        kinds += [replace(isa, name="AVX-512 VNNI without AMX", matrices=False)]
    if isa.code_offset:
        kinds += [Isa("AVX2", "madd256", 8, 0), Isa("AVX-512 without VNNI", "madd256", 32, 0)]
    if isa.dot == "vnni512":
        kinds += [Isa("AVX-512 VNNI, short", "vnni256", 8)]
    torch.manual_seed(1)
    x, weight = torch.randn(53, 72), torch.randn(100, 72)
    found = []
    for kind in [isa, *kinds]:
        kernels = Kernels(kind, 32, torch.float32, ["store"])
        crew = Crew(kernels.isa, 1)
        out = torch.zeros(53, 128)
        packed = pack_weight(weight, None, kind)
        crew.run(Recording([kernels.linear(count_of(53), quantised(x, kind), packed, out, "store")]))
        crew.close()
        found.append(out[:, :100])
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0].double(), reference(x, weight, None), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 16, ROW_BLOCK + 1])
@pytest.mark.parametrize("ending", ["store", "add", "softcap", "silu", "gelu_tanh"])
def test_each_ending(kernels: Kernels, run: Callable[..., None], rows: int, ending: str) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 68), torch.randn(140, 68), torch.randn(140)
    gated = ending in ("silu", "gelu_tanh")
    packed = pack_weight(weight, bias, kernels.isa, gated)
    width = packed.outputs // (2 if gated else 1)
    out = torch.ones(rows, width)
    inputs = quantised(x, kernels.isa)
    run(kernels.linear(count_of(rows), inputs, packed, out, ending, 5.0))
    wanted = reference(x, weight, bias)
    if gated:
        gate, up = wanted.chunk(2, 1)
        act = F.silu(gate) if ending == "silu" else F.gelu(gate, approximate="tanh")
        wanted = act * up
    elif ending == "add":
        wanted = wanted + 1
    elif ending == "softcap":
        wanted = torch.tanh(wanted / 5) * 5
    found = out[:, : wanted.shape[1]].double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_padding_outputs_are_what_is_asked_for(kernels: Kernels, run: Callable[..., None]) -> None:
    packed = pack_weight(torch.randn(70, 64), None, kernels.isa, padding=-torch.inf)
    out = torch.zeros(1, packed.outputs)
    run(kernels.linear(count_of(1), quantised(torch.randn(1, 64), kernels.isa), packed, out, "store"))
    assert out[0, :70].isfinite().all()
    assert (out[0, 70:] == -torch.inf).all()


def test_a_weight_of_zeros_is_none(kernels: Kernels, run: Callable[..., None]) -> None:
    packed = pack_weight(torch.zeros(64, 64), None, kernels.isa)
    out = torch.ones(1, 64)
    run(kernels.linear(count_of(1), quantised(torch.randn(1, 64), kernels.isa), packed, out, "store"))
    assert not out.any()


def test_this_machine_is_known() -> None:
    found = host_isa()
    assert found is None or found.registers in (8, 32)
