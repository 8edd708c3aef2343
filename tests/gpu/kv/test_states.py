import torch

from ramify.gpu.kv.states import StateLayout

LAYOUT = StateLayout((((3, 8), (2, 4, 4)), ((2, 8),), ((3, 8), (2, 4, 4))))
CPU = torch.device("cpu")


def test_no_layer_is_padded_to_another() -> None:
    assert LAYOUT.bytes_per_slot == 4 * (2 * (24 + 32) + 16)
    pool = LAYOUT.allocate(5, CPU)
    assert sum(tensor.numel() * 4 for tensor in pool.memory) == 6 * LAYOUT.bytes_per_slot
    assert [[part.shape[1:] for part in layer] for layer in pool.layers] == [
        list(map(torch.Size, parts)) for parts in LAYOUT.shapes
    ]


def test_each_layer_has_parts_of_its_own_and_slot_0_is_zeros() -> None:
    pool = LAYOUT.allocate(2, CPU)
    parts = [part for layer in pool.layers for part in layer]
    for number, part in enumerate(parts, 1):
        assert not part[0].any()
        part[1:] = number
    assert [int(part[2].max()) for part in parts] == [1, 2, 3, 4, 5]


def test_slots_are_all_read_before_one_is_written() -> None:
    pool = LAYOUT.allocate(3, CPU)
    for part in (part for layer in pool.layers for part in layer):
        for slot in (1, 2, 3):
            part[slot] = slot
    pool.copy(torch.tensor([1, 2, 0]), torch.tensor([2, 3, 1]))
    for part in (part for layer in pool.layers for part in layer):
        assert [int(part[slot].max()) for slot in (1, 2, 3)] == [0, 1, 2]
