"""Pauses follow what is new, not what there is; rings of old objects go when there is time."""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from ramify.actors.kit.collector import (
    FEW_BLOCKS,
    GROWTH,
    IDLE,
    LATEST_SECONDS,
    LOOK_SECONDS,
    WHOLE_SECONDS,
    Collector,
)
from tests.manual_clock import ManualClock


class Node:
    """An object in a ring, or none."""

    def __init__(self) -> None:
        self.other: Any = None


class Process:
    """A collector, its clock, and what its thread has used."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.used = 0.0
        self.collector = Collector(self.clock, lambda: self.used)

    def passes(self, seconds: float, *, busy: bool) -> None:
        for _ in range(int(seconds / LOOK_SECONDS)):
            self.used += LOOK_SECONDS * IDLE * (2 if busy else 0.5)
            self.clock.advance(LOOK_SECONDS)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    process.collector.begin()
    yield process
    process.collector.end()


def old_ring() -> "ref[Node]":
    """Two objects that have survived a full collection, and then are nobody else's."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    gc.collect()
    return ref(one)


def test_what_has_survived_a_full_collection_is_not_walked_again(process: Process) -> None:
    held = [[i] for i in range(300_000)]
    assert len(gc.get_objects()) < 100_000
    gc.collect()
    assert len(gc.get_objects()) < 1000
    assert gc.get_freeze_count() > len(held)


def test_young_rings_go_as_ever(process: Process) -> None:
    one = Node()
    one.other = one
    gone = ref(one)
    del one
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("busy", "after"), [(False, WHOLE_SECONDS), (True, LATEST_SECONDS)])
def test_old_rings_go_when_there_is_time(process: Process, busy: bool, after: float) -> None:
    gone = old_ring()
    process.passes(after - 2 * LOOK_SECONDS, busy=busy)
    assert gone() is not None
    process.passes(4 * LOOK_SECONDS, busy=busy)
    assert gone() is None
    assert process.collector.whole == 1


def test_old_rings_go_when_memory_has_grown_by_half(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.collector.end()
    blocks = FEW_BLOCKS
    monkeypatch.setattr("sys.getallocatedblocks", lambda: blocks)
    process.collector.begin()  # again: how much memory the tests' process holds is no matter
    gone, blocks = old_ring(), 10 * FEW_BLOCKS
    process.passes(LOOK_SECONDS, busy=True)
    assert gone() is None
    whole, gone = process.collector.whole, old_ring()
    process.passes(10 * LOOK_SECONDS, busy=True)  # what it left is the measure
    assert (gone() is None, process.collector.whole) == (False, whole)
    blocks = int(blocks * GROWTH) + 1
    process.passes(LOOK_SECONDS, busy=True)
    assert (gone() is None, process.collector.whole) == (True, whole + 1)


def test_nothing_is_walked_where_nothing_was_frozen(process: Process) -> None:
    process.collector._frozen = False
    gc.disable()
    try:
        process.passes(2 * LATEST_SECONDS, busy=False)
    finally:
        gc.enable()
    assert process.collector.whole == 0


def test_its_end_leaves_all_as_it_was() -> None:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    process = Process()
    process.collector.end()  # it has not begun
    process.collector.begin()
    assert gc.get_threshold() != before
    process.collector.end()
    assert (gc.get_threshold(), gc.callbacks) == (before, callbacks)
    process.passes(2 * LATEST_SECONDS, busy=False)
    assert process.collector.whole == 0
