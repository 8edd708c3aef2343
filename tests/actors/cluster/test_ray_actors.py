"""Which actors are started and forgotten, with a Ray that does as told; `e2e/test_ray.py` has one."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest

from ramify.actors.cluster import ray_actors
from ramify.actors.cluster.ray_actors import ATTEMPTS, RayActors
from ramify.actors.cluster.ray_replicas import Drive
from ramify.actors.processes.messages import NotStarted
from ramify.protocol.config import ReplicasConfig
from ramify.protocol.errors import ConfigError


def drive(host: str, port: int) -> Drive:
    return Drive(ReplicasConfig(count=2, on="ray"), host, port, b"secret", None, "cpu", 2)


class Within(NamedTuple):
    """Ray's PlacementGroupSchedulingStrategy."""

    placement_group: Any
    placement_group_bundle_index: int


class Failing(Exception):
    pass


class Unknown(Failing):
    """Ray's AuthenticationError."""


class Ray:
    """`ended`: runs that are over; `failed`: those that failed, and why."""

    exceptions = SimpleNamespace(RayError=Failing, AuthenticationError=Unknown)

    def __init__(self) -> None:
        self.groups: list[list[dict[str, float]]] = []  # of bundles, that there are
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "10.0.0.7",
            placement_group=self.group,
            remove_placement_group=self.groups.remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=Within),
        )
        self.started = 0
        self.ended: set[int] = set()
        self.failed: dict[int, str] = {}
        self.killed: list[int] = []
        self.asked: dict[str, Any] = {}  # of the last actor
        self.told: tuple[Any, ...] = ()  # of the last actor
        self.alive = 1

    def remote(self, **resources: Any) -> Any:
        self.asked = resources
        return lambda kind: SimpleNamespace(remote=self.actor)

    def group(self, bundles: list[dict[str, float]], strategy: str) -> list[dict[str, float]]:
        assert strategy == "STRICT_PACK"  # on one host
        self.groups.append(bundles)
        return bundles

    def init(self, **settings: Any) -> None:
        pass

    def is_initialized(self) -> bool:
        return True

    def shutdown(self) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True}] * self.alive + [{"Alive": False}]

    def actor(self) -> Any:
        self.started += 1
        number = self.started
        return SimpleNamespace(run=SimpleNamespace(remote=partial(self.run, number)), number=number)

    def run(self, number: int, *arguments: Any) -> int:
        self.told = arguments
        return number

    def wait(self, runs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return [run for run in runs if run in self.ended or run in self.failed], []

    def get(self, run: int) -> None:
        if run in self.failed:
            raise Failing(f"Traceback ...\n{self.failed[run]}")

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.number)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def replicas() -> RayActors:
    return RayActors(drive("127.0.0.1", 1))


def test_there_are_as_many_actors_as_wanted(ray: Ray) -> None:
    made = replicas()
    made.look()
    assert made.names == ["replica-0", "replica-1"]
    ray.ended.add(1)  # its front had dismissed it
    made.look()
    assert (made.names, ray.killed) == (["replica-1", "replica-2"], [1])
    made.scale(3)
    made.look()
    assert len(made.names) == made.wanted == 3


def test_actors_that_never_get_ready_end_the_start(ray: Ray) -> None:
    """As processes of this machine do; once one has been ready, they are tried for ever."""
    for proven in (False, True):
        made = replicas()
        made.proven = proven
        made.look()
        for _ in range(ATTEMPTS - 1):
            ray.failed = dict.fromkeys(range(1, ray.started + 1), "no such module")
            made.look()
        ray.failed = dict.fromkeys(range(1, ray.started + 1), "no such module")
        if proven:
            made.look()
            assert len(made.names) == 2
        else:
            with pytest.raises(NotStarted, match="no such module"):
                made.look()


def test_actors_are_spread_and_told_an_address_that_they_reach(ray: Ray) -> None:
    """Not 0.0.0.0, which is each node's own; not loopback, where there are others."""
    ray.alive = 3
    made = RayActors(drive("0.0.0.0", 7000))
    made.connect()
    made.look()
    assert ray.told[:2] == ("10.0.0.7", 7000)
    assert ray.asked["scheduling_strategy"] == "SPREAD"
    with pytest.raises(ConfigError, match=r"--replica-listen 127\.0\.0\.1 .* 2 other nodes"):
        replicas().connect()
    ray.alive = 1
    replicas().connect()


async def test_a_replica_of_several_ranks_is_a_placement_group_on_one_host(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is given back with its actor, so that the next one finds the GPUs."""
    monkeypatch.setattr(ray_actors, "LOOK_SECONDS", 0.001)
    told = msgspec.structs.replace(drive("127.0.0.1", 1), device="cuda", ranks=4)
    settings = msgspec.structs.replace(told.settings, gpus=4.0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(RayActors(msgspec.structs.replace(told, settings=settings)).run)
        assert ray.groups == [[{"CPU": 1, "GPU": 4.0}]] * 2
        assert ray.asked["scheduling_strategy"] == Within(ray.groups[-1], 0)
        assert (ray.asked["num_cpus"], ray.asked["num_gpus"]) == (1, 4.0)
        ray.ended.add(1)
        while ray.started < 3:
            await anyio.sleep(0.001)
        assert len(ray.groups) == 2
        tasks.cancel_scope.cancel()
    assert ray.groups == []
