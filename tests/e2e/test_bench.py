"""The load generator against a whole server: counts that must hold, whatever the speed."""

from random import Random
from typing import Any

import pytest

from ramify.clients.bench import workloads
from ramify.clients.bench.execute import execute
from ramify.clients.bench.figures import figures
from ramify.clients.bench.load_program import Target
from ramify.clients.bench.session import BenchFailed
from ramify.clients.bench.workloads import Case

TOP = 300


async def measured(served: Any, case: Case) -> dict[str, float]:
    programs = case.build(Random(case.name), TOP)
    outcome = await execute(Target("ramify", served.engine.url), programs)
    return figures(case, programs, outcome)


@pytest.mark.parametrize(
    "case",
    [
        workloads.throughput(20, 5, 60, 5, 40, 8),
        workloads.decode(10, 64, 24, 4),
        workloads.prefill(4, 100),
        workloads.chat(6, 4, 20, 8, 0),
        workloads.chat(3, 3, 20, 8, 20),
        workloads.tree(5, 40, 4, 12, 6),
        workloads.shared_prefix(6, 40, 8, 8),
        workloads.overhead(8, 64, 4, 8),
    ],
    ids=lambda case: case.name,
)
async def test_every_workload(serving: Any, case: Case) -> None:
    async with serving(fake={"step_seconds": 0.001}) as served:
        found = await measured(served, case)
        missing = set(case.figures) - found.keys() - {"wall_over_device", "device_s", "steps"}
        assert not missing
        await served.deserted()


async def test_trees_compute_their_prefixes_once(serving: Any) -> None:
    async with serving() as served:
        found = await measured(served, workloads.tree(5, 40, 4, 12, 6))
        # A token or two may be shared by chance: ids are below 300.
        assert found["prompt_optimum"] - 10 <= found["prompt_computed"] <= found["prompt_optimum"]


async def test_what_the_server_refuses_is_an_error(serving: Any) -> None:
    async with serving(fake={"context": 64}) as served:
        with pytest.raises(BenchFailed, match="too_long"):
            await measured(served, workloads.prefill(2, 100))
