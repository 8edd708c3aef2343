"""Weights of 4 bits in the layout of `humming-kernels`, and what serves where the package cannot."""

import importlib.util
import logging

import pytest
import torch

from ramify.gpu.ops.linear.base import Linear, plain
from ramify.gpu.ops.linear.four_bits import FourBitWeight, four_bit_form, packed
from ramify.gpu.ops.linear.grouped import GroupedWeight, four_bits, mxfp4
from ramify.gpu.ops.linear.humming import HummingWeight, eights, fits, humming_form

CUDA = torch.cuda.is_available() and importlib.util.find_spec("humming") is not None


def stored(kind: str, outputs: int, inputs: int) -> GroupedWeight:
    weight = torch.randn((outputs, inputs))
    if kind == "mxfp4":
        return mxfp4(weight)
    made = four_bits(weight, 128)
    if kind == "int4":
        return made
    zeros = torch.randint(0, 16, made.scales.shape).float()
    return GroupedWeight(made.codes + 8, made.scales, -zeros * made.scales, 4)


def test_words_hold_eight_neighbours() -> None:
    made = stored("int4", 3, 256)
    words = eights(packed(made, 256))
    codes = torch.stack([(words >> 4 * place) & 15 for place in range(8)], 2).view(3, 256)
    assert torch.equal(codes - 8, made.codes.int())


def test_what_does_not_fit_is_left_to_our_own_kernels() -> None:
    assert fits(packed(stored("int4", 256, 128), 128))
    assert fits(packed(stored("zeros", 256, 128), 128))
    assert not fits(packed(stored("int4", 256, 160), 160))
    assert not fits(packed(stored("int4", 128, 128), 128))
    assert not fits(plain(torch.zeros((256, 128))).weight)
    made = stored("zeros", 256, 128)
    assert made.offsets is not None
    assert not fits(packed(GroupedWeight(made.codes, made.scales, made.offsets + 0.01, 4), 128))


def test_without_the_package_or_its_compiler_our_own_kernels_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner, cuda = four_bit_form("int4", rounds=True), torch.device("cuda")
    assert humming_form(inner, torch.float32, cuda) is inner
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert humming_form(inner, torch.bfloat16, cuda) is inner
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert humming_form(inner, torch.bfloat16, cuda) is inner
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    form = humming_form(inner, torch.bfloat16, cuda)

    with caplog.at_level(logging.WARNING, "ramify.gpu.startup"):
        for _ in range(2):
            assert isinstance(form(plain(torch.randn((256, 128)))), FourBitWeight)
    assert caplog.text.count("humming-kernels cannot be used") == 1


@pytest.mark.skipif(not CUDA, reason="needs a GPU and humming-kernels")
@pytest.mark.parametrize("kind", ["int4", "zeros", "mxfp4"])
def test_products_on_a_gpu(kind: str) -> None:
    torch.manual_seed(3)
    made, device = stored(kind, 512, 1024), torch.device("cuda")
    own = packed(made, 1024)
    zeros = None if own.zeros is None else own.zeros.cuda()
    own = FourBitWeight(own.codes.cuda(), own.scales.cuda(), zeros, own.group, own.inputs)
    weight = humming_form(lambda linear: linear.weight, torch.bfloat16, device)(Linear(own))
    assert isinstance(weight, HummingWeight)
    wanted_of = made.floats().double()
    for rows in (1, 9, 64, 300):
        x = torch.randn((rows, 1024)).bfloat16()
        found = weight.product(x.cuda(), torch.ones(512, dtype=x.dtype, device=device)).double().cpu()
        wanted = x.double() @ wanted_of.T + 1
        assert (found - wanted).norm() < 6e-3 * wanted.norm()
