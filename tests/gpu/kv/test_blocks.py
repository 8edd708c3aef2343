"""Blocks of KV in host memory: bit for bit what was saved, or lost."""

import random

import pytest
import torch

from ramify.gpu.kv.blocks import HostBlocks, block_bytes
from ramify.gpu.kv.layout import FP8, KVLayout, KVPool, LatentLayout, PairLayout
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import MovedBlock, pack

LAYOUTS = [
    PairLayout(((2, 4), (1, 16), (2, 4)), torch.bfloat16),
    LatentLayout(3, 8, 4, torch.float32),
    PairLayout(((2, 4), (1, 16)), FP8),
]
KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture(params=[1, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def filled(layout: KVLayout, page_size: int) -> KVPool:
    pool = layout.allocate(4 * BLOCK // page_size, page_size, torch.device("cpu"))
    torch.manual_seed(1)
    for tensor in pool.memory:
        tensor[:] = torch.randn(tensor.shape).to(tensor.dtype)
    return pool


def block(slot: int, key: bytes, page_size: int, first: int, kept: int = 0) -> MovedBlock:
    """Every second page from `first` on, the first `kept` of which stay as they are."""
    pages = [first + 2 * i for i in range(BLOCK // page_size)]
    return MovedBlock(slot, key, pack([-1] * kept + pages[kept:]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_comes_back_to_other_pages(layout: KVLayout, page_size: int) -> None:
    pool = filled(layout, page_size)
    blocks = HostBlocks(pool, 3)
    assert block_bytes(pool) == BLOCK * layout.bytes_per_token == blocks.bytes[0].nbytes
    before = [tensor.clone() for tensor in pool.memory]
    blocks.save([block(2, KEY, page_size, 0)])
    pages = 4 * BLOCK // page_size
    assert blocks.load([block(2, KEY, page_size, pages // 2, kept=1)]) == []
    for tensor, was in zip(pool.memory, before, strict=True):
        now, old = (
            each[:, :-1].unflatten(1, (pages, page_size)).view(torch.uint8) for each in (tensor, was)
        )
        half = pages // 2
        assert torch.equal(now[:, half + 2 :: 2], old[:, 2:half:2])
        assert torch.equal(now[:, : half + 1], old[:, : half + 1])  # the first page is not written
        assert torch.equal(now[:, half + 1 :: 2], old[:, half + 1 :: 2])


def test_no_block_with_a_flipped_bit_is_loaded() -> None:
    pool = filled(LAYOUTS[0], 1)
    blocks, dice = HostBlocks(pool, 2), random.Random(3)
    blocks.save([block(1, KEY, 1, 0)])
    before = [tensor.clone() for tensor in pool.memory]
    size = blocks.bytes.shape[1]
    for _ in range(1000):
        at, bit = dice.randrange(size), 1 << dice.randrange(8)
        blocks.bytes[1, at] ^= bit
        assert blocks.load([block(1, KEY, 1, 128)]) == [1]
        blocks.bytes[1, at] ^= bit
    assert all(torch.equal(*pair) for pair in zip(pool.memory, before, strict=True))
    assert blocks.load([block(1, KEY, 1, 128)]) == []


def test_what_is_torn_or_not_what_was_asked_for_is_lost() -> None:
    pool = filled(LAYOUTS[0], 1)
    blocks = HostBlocks(pool, 2)
    blocks.save([block(0, KEY, 1, 0), block(1, OTHER, 1, 1)])
    assert blocks.load([block(0, OTHER, 1, 128)]) == [0]
    half = blocks.bytes.shape[1] // 2
    blocks.bytes[0, half:] = blocks.bytes[1, half:]
    assert blocks.load([block(0, KEY, 1, 128), block(1, OTHER, 1, 128)]) == [0]
