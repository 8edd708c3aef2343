"""What plans load, and whether loading pays."""

from types import SimpleNamespace
from typing import Any

from ramify.actors.scheduler.loads import MOST_ALONE, MOST_BESIDE, PROBE, KvLoads
from ramify.protocol.plan import MovedBlock, StepResult


def blocks(count: int) -> list[MovedBlock]:
    return [MovedBlock(slot, b"", b"") for slot in range(count)]


def run(live: bool = True) -> Any:
    return SimpleNamespace(live=live)


def result(load_us: int) -> StepResult:
    return StepResult(1, b"", b"", 0, load_us, load_us=load_us)


def test_plans_load_in_order_and_in_bounded_parts() -> None:
    loads, first, second, gone = KvLoads(), run(), run(), run(live=False)
    loads.add(first, blocks(MOST_ALONE + 5))
    loads.add(gone, blocks(5))
    loads.add(second, blocks(3))
    taken = loads.take(0, 0.01)
    assert [(each, len(part), last) for each, part, last in taken] == [(first, MOST_ALONE, False)]
    taken = loads.take(3, 0.01)
    assert [(each, len(part), last) for each, part, last in taken] == [
        (first, 5, True),
        (second, 3, True),
    ]
    assert not loads.queue


def test_beside_decodes_loads_take_a_part_of_a_step() -> None:
    loads = KvLoads()
    loads.add(run(), blocks(600))
    assert len(loads.take(1, 0.010)[0][1]) == MOST_BESIDE
    loads.learn(result(4000), 8)  # 0.5 ms a block
    assert len(loads.take(1, 0.010)[0][1]) == 5
    assert len(loads.take(1, 0.0001)[0][1]) == 1
    assert len(loads.take(0, 0.0001)[0][1]) > MOST_BESIDE


def test_loading_pays_while_it_is_quicker_than_computing() -> None:
    loads = KvLoads()
    assert loads.pays(1e9)
    loads.learn(result(64_000), 1)  # 1000 tokens a second
    assert loads.pays(999.0)
    assert [loads.pays(1001.0) for _ in range(PROBE)].count(True) == 1
    for _ in range(100):
        loads.learn(result(640), 1)
    assert loads.pays(50_000.0)
