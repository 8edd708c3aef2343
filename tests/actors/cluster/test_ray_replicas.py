"""A front's Ray drivers, one after the other; with a real Ray: `e2e/test_ray.py`."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from ramify.actors.cluster import ray_replicas
from ramify.actors.cluster.ray_replicas import Drive, EndDriver, Proven, RayReplicas, Scale, Started
from ramify.actors.processes.messages import NotStarted, StartFailed
from ramify.protocol.config import ReplicasConfig
from ramify.protocol.errors import ConfigError


class Child:
    """A driver's process and its link, in one."""

    def __init__(self, receive: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self.receive, self._on_end = receive, on_end
        self.told: list[Any] = []
        self.over = asyncio.Event()
        self.link = self

    @property
    def closed(self) -> bool:
        return self.over.is_set()

    def tell(self, message: Any) -> None:
        self.told.append(message)
        if message == EndDriver():
            self.end()

    def consumed(self) -> None:
        pass

    def end(self) -> None:
        self.over.set()
        self._on_end()

    async def wait_closed(self) -> None:
        await self.over.wait()

    async def ended(self) -> int:
        return 1

    def explain(self, code: int) -> str:
        return f"exit code {code}"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[Child]":
    """Drivers as they are started."""
    made: asyncio.Queue[Child] = asyncio.Queue()

    async def start(*program: Any, on_end: Callable[[], None], **fields: Any) -> Child:
        child = Child(program[4], on_end)
        made.put_nowait(child)
        return child

    monkeypatch.setattr(ray_replicas.ChildProcess, "start", start)
    monkeypatch.setattr(ray_replicas, "BACK_OFF_SECONDS", 0.0)
    return made


def replicas(again: Callable[[], None] = lambda: None) -> RayReplicas:
    settings = ReplicasConfig(count=2, on="ray")
    return RayReplicas(Drive(settings, "10.0.0.1", 1, b"secret", None, "cpu", 2), again)


async def test_a_driver_that_ends_is_replaced(children: "asyncio.Queue[Child]") -> None:
    """Ray has ended it, because the cluster's head was gone: the front lives."""
    came: list[int] = []
    made = replicas(lambda: came.append(1))
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: group.start(made.run))
        first = await children.get()
        first.receive(Started())
        made.prove()
        made.prove()
        made.scale(3)
        assert first.told[1:] == [Proven(), Scale(3)]
        assert (first.told[0].count, first.told[0].proven) == (2, False)
        first.end()
        second = await children.get()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(second.told[0], Drive)
        assert (second.told[0].count, second.told[0].proven, came) == (3, True, [])
        second.receive(Started())
        await anyio.wait_all_tasks_blocked()
        assert came == [1]
        group.cancel_scope.cancel()
    assert second.told[-1] == EndDriver()


@pytest.mark.parametrize("why", [ConfigError("no cluster"), NotStarted("they fail")])
async def test_a_start_that_fails_says_why(
    children: "asyncio.Queue[Child]", why: ConfigError | NotStarted
) -> None:
    async def fail() -> None:
        child = await children.get()
        child.receive(StartFailed.of(why))
        child.end()

    failing = asyncio.create_task(fail())
    with pytest.raises(ExceptionGroup) as failed:
        async with anyio.create_task_group() as group:
            await group.start(replicas().run)
    assert (type(failed.value.exceptions[0]), str(failed.value.exceptions[0])) == (type(why), str(why))
    await failing
