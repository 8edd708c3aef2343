"""What plans load, and whether loading pays."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ramify.actors.scheduler.loads import (
    ALONE,
    CPU_BYTES,
    GPU_BYTES,
    MOST_ALONE,
    MOST_BESIDE,
    PROBE,
    KvLoads,
)
from ramify.protocol.plan import ExecutorInfo, MovedBlock, StepResult, pack

CPU = ExecutorInfo(
    "m", "M", 1, 9, 99, 4, 99, 4, 99, "cpu", "float32", "torch", [], 1, 0.0, block_bytes=1 << 10
)


def blocks(count: int) -> list[MovedBlock]:
    return [MovedBlock(slot, b"", pack([2 * slot, 2 * slot + 1])) for slot in range(count)]


def step(decodes: int) -> Any:
    return SimpleNamespace(bound=[run()] * decodes, exchanges=False, loads=[], moved=0)


def planned(loads: KvLoads, decodes: int = 0, step_s: float = 0.01) -> list[tuple[Any, int, bool]]:
    """What the next plan loads: for whom, how many blocks, and whether they are the last."""
    loads.plan(now := step(decodes), step_s)
    return [(each, len(part), last) for each, part, last in now.loads]


def run(live: bool = True) -> Any:
    return SimpleNamespace(live=live)


def result(load_us: int) -> StepResult:
    return StepResult(1, b"", b"", 0, load_us, load_us=load_us)


def test_plans_load_in_order_and_in_bounded_parts() -> None:
    loads, first, second, gone = KvLoads(CPU), run(), run(), run(live=False)
    loads.add(first, blocks(MOST_ALONE + 5))
    loads.add(gone, blocks(5))
    loads.add(second, blocks(3))
    assert planned(loads) == [(first, MOST_ALONE, False)]
    assert planned(loads, 3) == [(first, 5, True), (second, 3, True)]
    assert not loads.queue


def test_beside_decodes_loads_take_a_part_of_a_step() -> None:
    loads = KvLoads(CPU)
    loads.add(run(), blocks(600))
    assert planned(loads, 1)[0][1] == MOST_BESIDE
    loads.learn(result(4000), 8)  # 0.5 ms a block
    assert planned(loads, 1)[0][1] == 5
    assert planned(loads, 1, 0.0001)[0][1] == 1
    assert planned(loads, 0, 0.0001)[0][1] == MOST_ALONE


@pytest.mark.parametrize(("device", "most"), [("cpu", CPU_BYTES), ("cuda:0", GPU_BYTES)])
def test_a_plan_moves_no_more_than_so_many_bytes(device: str, most: int) -> None:
    """Whatever was evicted at once. Who is granted pages waits until all is saved, as loads do."""
    each = most // 10
    loads = KvLoads(msgspec.structs.replace(CPU, device=device, block_bytes=each))
    waits, gone, loader = run(), run(live=False), run()
    loads.save(blocks(10))
    assert not loads.waits(waits)  # all of that goes with the next plan
    loads.save(blocks(75)[10:])
    assert loads.waits(waits)
    assert loads.waits(gone)
    loads.add(loader, blocks(3))
    told: list[MovedBlock] = []
    for decodes, count in (1, 10), (0, ALONE * 10), (1, 10), (1, 10):
        assert not loads.saved()
        saves, loaded = loads.plan(step(decodes), 0.01)
        assert len(saves) == count
        assert not loaded
        told += saves
    assert not loads.waits(run())  # the rest goes with the next plan
    loads.learn(result(400_000), 8)  # even if that takes long
    saves, loaded = loads.plan(step(5), 0.01)
    assert told + saves == blocks(75)
    assert not loaded
    assert loads.saved() == [waits]
    assert not loads.saved()
    assert loads.due
    assert loads.plan(step(0), 0.01) == ([], blocks(3))
    assert not loads.due


def test_pages_that_decodes_are_given_are_saved_first() -> None:
    loads = KvLoads(msgspec.structs.replace(CPU, block_bytes=CPU_BYTES))
    loads.write(pack([4]))  # nothing is to be saved
    loads.save(blocks(9))
    loads.write(pack([11, 99]))
    loads.write(pack([4]))
    assert loads.plan(step(1), 0.01)[0] == [blocks(9)[at] for at in (5, 2)]
    assert loads.plan(step(1), 0.01)[0] == blocks(1)


def test_loading_pays_while_it_is_quicker_than_computing() -> None:
    loads = KvLoads(CPU)
    assert loads.pays(1e9)
    loads.learn(result(64_000), 1)  # 1000 tokens a second
    assert loads.pays(999.0)
    assert [loads.pays(1001.0) for _ in range(PROBE)].count(True) == 1
    for _ in range(100):
        loads.learn(result(640), 1)
    assert loads.pays(50_000.0)
