"""The common bound on masks, and who gives up what."""

import numpy as np
import pytest

from ramify.gpu.constraints import masks
from ramify.gpu.constraints.masks import KeptMasks, MaskStore, Row


def row(number: int) -> Row:
    return np.full(25, number, np.int32)  # 100 bytes


def held(kept: KeptMasks, numbers: range) -> list[int]:
    return [number for number in numbers if number in kept.young or number in kept.old]


def test_equal_masks_are_kept_once_and_cannot_be_changed() -> None:
    store = MaskStore()
    kept = store.open()
    first = kept.put(1, row(7))
    assert kept.put(2, row(7)) is first
    assert kept.get(1) is first
    assert kept.get(3) is None
    assert (store.bytes, store.made, store.dropped) == (100, 2, 0)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_what_was_not_used_for_longest_goes_whoevers_it_is() -> None:
    store = MaskStore(600)  # three in each generation
    one, two = store.open(), store.open()
    for number in range(3):
        one.put(number, row(number))
    two.put(10, row(10))  # those of the first are old now
    assert one.get(1) is not None  # and this one young again
    two.put(11, row(11))
    assert store.bytes <= 600
    two.put(12, row(12))
    assert held(one, range(3)) == [1]
    assert held(two, range(10, 13)) == [10, 11, 12]
    assert store.dropped > 0
    assert store.bytes <= 600


def test_the_bound_holds_for_many() -> None:
    store = MaskStore(1000)
    kepts = [store.open() for _ in range(5)]
    rng = np.random.default_rng(3)
    for _ in range(500):
        kept, number = kepts[rng.integers(5)], int(rng.integers(40))
        found = kept.get(number)
        assert (kept.put(number, row(number)) if found is None else found)[0] == number
        distinct = {id(row) for kept in kepts for row in [*kept.young.values(), *kept.old.values()]}
        assert 100 * len(distinct) <= store.bytes <= 1000
    for kept in kepts:
        kept.close()
        kept.close()
    assert store.bytes == 0


def test_what_others_keep_does_not_count() -> None:
    store = MaskStore(300)
    kept, everything = store.open(), row(-1)
    for number in range(50):
        assert kept.put(number, everything, counts=False) is everything
    assert store.bytes == 0
    assert kept.get(49) is everything


def test_the_keys_of_one_constraint_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_KEYS", 10)
    store = MaskStore()
    kept = store.open()
    for number in range(100):
        kept.put(number, row(7), counts=number % 2 > 0)
    assert len(kept.young) + len(kept.old) <= 20
    assert kept.get(99) is not None


def test_a_closed_constraint_keeps_nothing() -> None:
    store = MaskStore(600)
    kept = store.open()
    kept.put(1, row(1))
    kept.close()
    late = row(2)  # of a thread that was under way
    assert kept.put(2, late) is late
    assert (kept.get(2), store.bytes) == (None, 0)
