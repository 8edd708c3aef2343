"""`PairLayout`: the memory of keys and values, slot by slot."""

import torch

from ramify.gpu.kv.layout import PairLayout

LAYOUT = PairLayout(layers=3, kv_heads=2, head_dim=4, dtype=torch.float16)


def test_a_pool_has_every_page_and_a_slot_of_zeros_for_padding() -> None:
    pool = LAYOUT.allocate(5, 8, torch.device("cpu"))
    assert (pool.pages, pool.page_size, len(pool.layers), pool.padding_slot) == (5, 8, 3, 40)
    for layer in pool.layers:
        assert layer.k.shape == layer.v.shape == (41, 2, 4)
        assert not layer.k[pool.padding_slot].any()
        assert not layer.v[pool.padding_slot].any()
    taken = sum(layer.k.nbytes + layer.v.nbytes for layer in pool.layers)
    assert taken == 41 * LAYOUT.bytes_per_token


def test_what_is_stored_lies_in_its_slots_of_its_layer_alone() -> None:
    first, second, _ = LAYOUT.allocate(1, 8, torch.device("cpu")).layers
    for layer in (first, second):
        layer.k.zero_()
        layer.v.zero_()
    k, v = torch.rand(2, 2, 4).half(), torch.rand(2, 2, 4).half()
    first.store(torch.tensor([6, 1]), k, v)
    assert torch.equal(first.k[[6, 1]], k)
    assert torch.equal(first.v[[6, 1]], v)
    assert not first.k[[0, 2, 3, 4, 5, 7]].any()
    assert not second.k.any()
    assert not second.v.any()
