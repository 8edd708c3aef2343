"""The memory of keys and values, or of latents, slot by slot."""

import torch

from ramify.gpu.kv.layout import FP8, LatentLayout, PairLayout, copy_pages

LAYOUT = PairLayout(sizes=((2, 4),) * 3, dtype=torch.float16)


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


def test_pages_are_copied_in_all_layers_and_nothing_else_changes() -> None:
    pool = LAYOUT.allocate(5, 8, torch.device("cpu"))
    for tensor in pool.memory:
        tensor[:] = torch.rand(tensor.shape).half()
    before = [(layer.k.clone(), layer.v.clone()) for layer in pool.layers]
    pool.copy(torch.tensor([3, 1]), torch.tensor([0, 3]))  # page 3 is read before it is written
    for layer, old in zip(pool.layers, before, strict=True):
        for now, then in zip((layer.k, layer.v), old, strict=True):
            pages, was = now[:40].view(5, -1), then[:40].view(5, -1)
            assert torch.equal(pages, was[[3, 1, 2, 1, 4]])
            assert torch.equal(now[40], then[40])


def test_slots_of_one_number_are_copied_too() -> None:
    slots = torch.arange(13)
    copy_pages(slots, 4, torch.tensor([2]), torch.tensor([0]))
    assert slots.tolist() == [8, 9, 10, 11, *range(4, 13)]


def test_a_latent_is_one_vector_for_keys_and_values() -> None:
    layout = LatentLayout(3, 4, 2, torch.float16)
    pool = layout.allocate(5, 8, torch.device("cpu"))
    assert layout.bytes_per_token == 3 * 6 * 2
    assert sum(tensor.nbytes for tensor in pool.memory) == 41 * layout.bytes_per_token
    first, second, _ = pool.layers
    assert first.v is first.k
    assert not first.k[pool.padding_slot].any()
    pool.memory[0].zero_()
    latents = torch.rand(2, 1, 6).half()
    first.store(torch.tensor([6, 1]), latents, latents)
    assert torch.equal(first.k[[6, 1]], latents)
    assert not second.k.any()
    pool.copy(torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(first.k[[22, 17]], latents)


def test_codes_have_a_scale_for_each_token_and_head() -> None:
    """At most half a unit of 3 bits of mantissa away, however large a head is; pages take it along."""
    torch.manual_seed(0)
    sizes = torch.tensor([[1e-4, 1.0], [300.0, 5e4], [0.0, 7.0]])[..., None]
    k, v = torch.randn(3, 2, 16) * sizes, torch.randn(3, 2, 16)
    layout, slots = PairLayout(((2, 16),), FP8), torch.tensor([6, 1, 3])
    pool = layout.allocate(2, 4, torch.device("cpu"))
    assert layout.bytes_per_token == 2 * 2 * (16 + 4)
    assert sum(tensor.nbytes for tensor in pool.memory) == 9 * layout.bytes_per_token
    (layer,) = pool.layers
    layer.store(slots, k, v)
    for wanted, found in zip((k, v), layer.read(slots, torch.float32), strict=True):
        largest = wanted.abs().amax(-1, keepdim=True)
        room = wanted.abs() / 16 + largest / 448 * 2**-9 + 1e-14
        assert bool(((found - wanted).abs() <= room).all())
    before = layer.read(slice(4, 8), torch.float32)
    pool.copy(torch.tensor([1]), torch.tensor([0]))
    for then, now in zip(before, layer.read(slice(0, 4), torch.float32), strict=True):
        assert torch.equal(then[2], now[2])
    assert not layer.read(slice(8, 9), torch.float32)[0].any()  # the padding's


def test_a_latent_in_codes_has_one_scale() -> None:
    layout = LatentLayout(1, 4, 2, FP8)
    pool = layout.allocate(1, 4, torch.device("cpu"))
    assert layout.bytes_per_token == 6 + 4
    (layer,) = pool.layers
    latent = torch.tensor([[[448.0, 1.0, -2.0, 16.0, 3.0, 0.0]]])
    layer.store(torch.tensor([2]), latent, latent)
    k, v = layer.read(slice(2, 3), torch.float32)
    assert v is k
    assert torch.equal(k, latent)
