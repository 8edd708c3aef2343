"""What a driver does with its actors as its front says, with a Ray that does as told."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ramify.actors.cluster import ray_actors
from ramify.actors.cluster.ray_driver import RayDriver
from ramify.actors.cluster.ray_replicas import (
    Drive,
    EndDriver,
    FromDriver,
    Scale,
    Started,
    ToDriver,
)
from ramify.actors.links.link import Link, open_link
from ramify.actors.processes.messages import StartFailed, decoder, encoder
from ramify.protocol.config import ReplicasConfig
from tests.actors.cluster.test_ray_actors import Ray, ray

__all__ = ["ray"]
WHERE = ("127.0.0.1", 1, b"secret", None, "cpu")
PATIENCE = 30.0


@asynccontextmanager
async def driving(
    settings: ReplicasConfig,
) -> "AsyncIterator[tuple[Link[ToDriver, FromDriver], asyncio.Queue[FromDriver], asyncio.Task[int]]]":
    """A driver, seen from its front."""
    ours, theirs = socket.socketpair()
    heard: asyncio.Queue[FromDriver] = asyncio.Queue()
    link: Link[ToDriver, FromDriver] = await open_link(
        "Ray",
        ours,
        decoder(FromDriver),
        encoder(),
        on_message=heard.put_nowait,
        on_end=lambda error: None,
    )
    task = asyncio.create_task(RayDriver().run(theirs))
    link.tell(Drive(settings, *WHERE, settings.count, False))
    try:
        yield link, heard, task
    finally:
        link.close()
        await asyncio.wait_for(task, PATIENCE)


async def test_it_has_the_actors_that_are_wanted_and_ends_them(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actors, "LOOK_SECONDS", 0.01)
    async with driving(ReplicasConfig(count=2, on="ray")) as (link, heard, task):
        assert await asyncio.wait_for(heard.get(), PATIENCE) == Started()
        assert ray.started == 2
        link.tell(Scale(3))
        async with asyncio.timeout(PATIENCE):
            while ray.started < 3:
                await asyncio.sleep(0.01)
        link.tell(EndDriver())
        assert await asyncio.wait_for(task, PATIENCE) == 0
    assert sorted(ray.killed) == [1, 2, 3]


async def test_its_front_goes(ray: Ray) -> None:
    async with driving(ReplicasConfig(count=1, on="ray")) as (link, heard, task):
        await asyncio.wait_for(heard.get(), PATIENCE)
        link.abort()
        assert await asyncio.wait_for(task, PATIENCE) == 0
    assert ray.killed == [1]


@pytest.mark.parametrize(
    ("error", "mend"),
    [(ConnectionError("nobody is there"), "nobody is there"), (None, "RAY_AUTH_TOKEN")],
)
async def test_a_cluster_that_cannot_be_used_is_told(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, error: Exception | None, mend: str
) -> None:
    def init(**settings: Any) -> None:
        raise error or ray.exceptions.AuthenticationError("InvalidAuthToken")

    monkeypatch.setattr(ray, "init", init)
    settings = ReplicasConfig(count=1, on="ray", listen="10.0.0.1", ray_address="10.0.0.2:6379")
    async with driving(settings) as (_, heard, task):
        failed = await asyncio.wait_for(heard.get(), PATIENCE)
        assert isinstance(failed, StartFailed)
        assert failed.kind == "ConfigError"
        assert mend in failed.message
        assert await asyncio.wait_for(task, PATIENCE) == 2
    assert ray.started == 0
