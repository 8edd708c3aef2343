"""The index equals sets by brute force, whatever comes, goes and is swept; its memory is bounded."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.kit.blocks import BlockHasher
from ramify.actors.routing import index as module
from ramify.actors.routing.index import ENTRY, PrefixIndex, Promises, levels

PROMPTS = [[a, b, c, d] for a in range(2) for b in range(2) for c in range(2) for d in range(2)]


def hashes_of(prompt: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return BlockHasher(1).chain(0, np.array(prompt, dtype=np.int32))


def depths(index: PrefixIndex, promises: Promises, prompt: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for blocks, slots in levels(index, promises, hashes_of(prompt)):
        for slot in range(slots.bit_length()):
            if slots >> slot & 1:
                assert slot not in found
                found[slot] = blocks
    return found


# a program: (what, replica, prompt, how many of its blocks)
steps = st.tuples(
    st.sampled_from(["add", "add", "add", "cut", "leave", "promise"]),
    st.integers(0, 3),
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, 4),
)


@given(st.lists(steps, max_size=40))
@settings(deadline=None)
def test_equals_brute_force(program: list[tuple[str, int, int, int]]) -> None:
    """Each replica's blocks are a tree, as a cache's are; a cut takes all below it."""
    index, promises = PrefixIndex(1 << 20), Promises(10.0, 1000)
    slots = [index.join() for _ in range(4)]
    has: list[set[tuple[int, ...]]] = [set() for _ in slots]
    hopes: list[set[tuple[int, ...]]] = [set() for _ in slots]
    for what, replica, number, count in program:
        prompt = PROMPTS[number]
        prefixes = [tuple(prompt[: i + 1]) for i in range(4)]
        if what == "add":
            index.add(slots[replica], hashes_of(prompt)[:count])
            has[replica].update(prefixes[:count])
        elif what == "promise":
            promises.add(slots[replica], hashes_of(prompt)[:count].tolist(), 0.0)
            hopes[replica].update(prefixes[:count])
        elif what == "cut":
            top = tuple(prompt[:count])
            gone = {each for each in has[replica] if each[: len(top)] == top}
            for each in gone:
                index.remove(slots[replica], hashes_of(list(each))[-1:])
            has[replica] -= gone
        else:
            index.leave(slots[replica])
            promises.leave(slots[replica])
            slots[replica] = index.join()
            has[replica], hopes[replica] = set(), set()
    assert len(set(slots)) == 4
    for prompt in PROMPTS:
        want = {}
        for replica, slot in enumerate(slots):
            both = has[replica] | hopes[replica]
            depth = max((i + 1 for i in range(4) if tuple(prompt[: i + 1]) in both), default=0)
            if depth:
                want[slot] = depth
        assert depths(index, promises, prompt) == want
    for _ in range(2 * module._MOST_SHARDS):
        index.tidy()
    assert index.entries == len(set().union(*has))
    assert index._dead == 0


def test_twice_is_once() -> None:
    index = PrefixIndex(1 << 20)
    slot, other = index.join(), index.join()
    for _ in range(2):
        index.add(slot, hashes_of([1, 2, 3]))
    index.add(other, hashes_of([1, 2]))
    for _ in range(2):
        index.remove(slot, hashes_of([1, 2, 3]))
    assert depths(index, Promises(1.0, 10), [1, 2, 3]) == {other: 2}
    assert index.entries == 2


@pytest.mark.parametrize("blocks", [1, 7, 512])
def test_few_look_ups(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt that many have a part of: the deepest sets, then all that have anything."""
    index = PrefixIndex(1 << 20)
    prompt = hashes_of(list(range(blocks)))
    slots = [index.join() for _ in range(40)]
    for i, slot in enumerate(slots):
        index.add(slot, prompt[: max(1, blocks - 3 * i)])
    asked = 0
    get = index.get

    def counted(each: int) -> int:
        nonlocal asked
        asked += 1
        return get(each)

    monkeypatch.setattr(index, "get", counted)
    found = levels(index, Promises(1.0, 10), prompt)
    assert found[0][0] == blocks
    assert sum(slots.bit_count() for _, slots in found) == 40
    assert asked <= 12 * 13


def test_memory_is_bounded_by_sampling() -> None:
    """Ten times as many blocks as there is room for: long prefixes are found still, about."""
    index = PrefixIndex(5000 * ENTRY)
    dice = random.Random(0)
    slots = [index.join() for _ in range(5)]
    prompts = []
    for i in range(100):
        prompt = hashes_of([dice.randrange(1 << 30) for _ in range(500)])
        prompts.append((slots[i % 5], prompt))
        for start in range(0, 500, 50):
            index.add(slots[i % 5], prompt[start : start + 50])
            assert index.entries <= 1.2 * index.most
    for _ in range(module._MOST_SHARDS):
        index.tidy()
    assert index.stride == 16
    assert index.entries <= index.most
    for slot, prompt in prompts:
        ((blocks, found),) = levels(index, Promises(1.0, 10), prompt)
        assert found == 1 << slot
        assert blocks > 350
    index.remove(prompts[0][0], prompts[0][1])
    assert levels(index, Promises(1.0, 10), prompts[0][1]) == []


def test_promises_are_forgotten() -> None:
    promises = Promises(10.0, 8)
    promises.add(0, [1], 0.0)
    promises.add(1, [1, 2], 9.0)
    assert (promises.get(1), promises.get(2)) == (3, 2)
    promises.age(19.0)
    assert promises.get(1) == 3
    promises.age(30.0)
    assert promises.get(1) == 0
    for i in range(100):
        promises.add(0, [i], 30.0)
    assert len(promises) <= 9
    promises.age(1000.0)
    assert len(promises) == 0
