"""The kernel between the pool and a chunk: the bytes and seals that `HostMemory` has of a block."""

import pytest
import torch

from ramify.gpu.kv.blocks import HostBlocks, block_bytes
from ramify.gpu.kv.layout import FP8, KVLayout, LatentLayout, PairLayout
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import MovedBlock, pack

pytest.importorskip("triton")

LAYOUTS = [
    PairLayout(((2, 4), (1, 16), (2, 4)), torch.bfloat16),
    LatentLayout(3, 8, 4, torch.float32),
    PairLayout(((2, 4), (1, 16)), FP8),  # with scales of 4 bytes a slot
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_what_the_host_makes_of_them_and_come_back(layout: KVLayout) -> None:
    from ramify.gpu.kv.triton_blocks import move_blocks, slot_words

    pool = layout.allocate(4 * BLOCK, 1, torch.device("cpu"))
    torch.manual_seed(1)
    for tensor in pool.memory:
        tensor[:] = torch.randn(tensor.shape).to(tensor.dtype)
    places = torch.randperm(4 * BLOCK)[: 2 * BLOCK]
    key = bytes(16)  # adds nothing to a seal
    host = HostBlocks(pool, 2)
    host.save([MovedBlock(i, key, pack(places[i * BLOCK :][:BLOCK].tolist())) for i in range(2)])
    memory = [slot_words(tensor) for tensor in pool.memory]
    chunk = torch.zeros(2, block_bytes(pool) // 8, dtype=torch.int64)
    seals = torch.zeros(2, dtype=torch.int64)
    move_blocks(memory, places, chunk, seals, save=True)
    assert torch.equal(chunk.view(torch.uint8), host.bytes)
    assert seals.tolist() == host.host.seals.tolist()
    before = [tensor[:, places].clone() for tensor in memory]
    for tensor in memory:
        tensor.zero_()
    sums = torch.zeros(2, dtype=torch.int64)
    move_blocks(memory, places, chunk, sums, save=False)
    assert torch.equal(sums, seals)
    assert all(torch.equal(a[:, places], b) for a, b in zip(memory, before, strict=True))
    chunk[1, 5] ^= 1 << 40
    sums.zero_()
    move_blocks(memory, places, chunk, sums, save=False)
    assert (sums == seals).tolist() == [True, False]
