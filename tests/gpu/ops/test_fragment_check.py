"""A kernel that does not fit what a package or a compiler does is found out before a model needs it."""

import logging

import pytest
import torch

pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")

from ramify.gpu.ops.fragment_check import fragment_obstacle
from ramify.gpu.ops.linear.base import Linear, plain
from ramify.gpu.ops.linear.humming import told
from ramify.gpu.ops.tilings import FragmentTiling, fragment_tiling
from tests.gpu.ops.test_triton_fragments import DEVICE, drawn


@pytest.mark.gpu
def test_weights_in_another_order_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    weight, wide = drawn(128, 256, has_zeros=True)
    tensors, tiling = weight.tensors, FragmentTiling(2, 1)
    with caplog.at_level(logging.WARNING, "ramify.gpu.startup"):
        for gated in (False, True):
            assert not fragment_obstacle(tensors, wide.to(DEVICE), tiling, gated)
        assert not caplog.text
        weight.obstacle = fragment_obstacle(tensors, wide.roll(1, 0).to(DEVICE), tiling, True)
        assert "off by" in weight.obstacle
        assert weight.obstacle in caplog.text
    assert "KeyError" in fragment_obstacle({}, wide.to(DEVICE), tiling, False)
    products: list[tuple[Linear, list[str]]] = [(Linear(weight), []), (plain(wide), [])]
    assert told("as asked", products * 2) == f"as asked; few tokens are slower: {weight.obstacle}"
    assert told("as asked", products[1:]) == "as asked"


def test_one_token_of_large_matrices_has_tilings() -> None:
    assert fragment_tiling(1, (28672, 4096)) == FragmentTiling(8, 1)
    assert fragment_tiling(1, (4096, 14336)) == FragmentTiling(8, 4)
    assert fragment_tiling(2, (4096, 14336)) is None
    assert fragment_tiling(1, (2048, 4096)) is None
