"""A replica and its fronts: what one leaves behind, the next one does not find."""

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from ramify.actors.cluster.replica import OtherModel, Replica
from ramify.actors.cluster.replica_messages import (
    Dismiss,
    Draining,
    StartReplica,
    ToFront,
    Up,
)
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.front.core_messages import MAX_FRAME, ToCore, ToSessions
from ramify.actors.kit.report import Report
from ramify.actors.links.link import open_link
from ramify.actors.processes.messages import Loading, StartFailed, decoder, encoder
from ramify.protocol import messages as m
from ramify.protocol.config import EngineConfig, ModelConfig
from ramify.protocol.plan import pack, unpack
from ramify.protocol.sampling import SamplingParams


class Front:
    """The other end: what the replica says, by kind."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.came = asyncio.Event()

    async def open(self, sock: socket.socket) -> None:
        def message(one: Any) -> None:
            self.heard.append(one)
            self.link.consumed()
            self.came.set()

        self.link = await open_link(
            "replica",
            sock,
            decoder(ToFront),
            encoder(),
            on_message=message,
            on_end=lambda error: None,
            max_frame=MAX_FRAME,
        )

    async def until(self, kind: type) -> Any:
        async with asyncio.timeout(60):
            while True:
                for each in self.heard:
                    if isinstance(each, kind):
                        self.heard.remove(each)
                        return each
                self.came.clear()
                await self.came.wait()

    async def output(self, session: int, tokens: list[int]) -> list[int]:
        """A session with these tokens generates four."""
        branch = session << 32 | 1
        request = m.Submit(session << 32 | 2, branch, len(tokens), 4, SamplingParams(temperature=0))
        said = [m.OpenBranch(branch), m.ExtendBranch(branch, pack(tokens)), request]
        self.link.tell(ToCore(said))
        found: list[int] = []
        while True:
            for whose, _, told in (await self.until(ToSessions)).messages:
                assert whose == session
                for progress in told.progress:
                    found += unpack(progress.tokens)
                if told.finished:
                    assert told.finished[0].reason == "length"
                    return found


def begin(**model: Any) -> StartReplica:
    config = EngineConfig(model=ModelConfig(path=Path("m"), **model), executor="thread")
    return StartReplica(0, config, FakeSpec({"verify": True}), "e", 0.0, "", check_idle=True)


async def test_one_front_after_the_other() -> None:
    """The same numbers mean other sessions; a front that goes while the model loads costs nothing."""
    replica = Replica()
    async with anyio.create_task_group() as group:
        for number in range(4):
            ours, theirs = socket.socketpair()
            front = Front()
            serving = asyncio.create_task(replica.serve(group, partial(open_link, "front", theirs)))
            await front.open(ours)
            front.link.tell(begin())
            if number == 0:
                await asyncio.sleep(0)
                front.link.close()
                assert not await serving
                continue
            assert (await front.until(Up)).info.vocab_size
            assert (await front.until(Report)).running == 0
            tokens = [5, 6, 7, number]
            assert len(await front.output(1, tokens)) == 4
            if number < 3:
                # Something runs when it goes.
                request = m.Submit(1 << 32 | 3, 1 << 32 | 1, 8, 10_000, SamplingParams())
                front.link.tell(ToCore([request]))
                front.link.close()
                assert not await serving
            else:
                replica.drain()
                await front.until(Draining)
                front.link.tell(Dismiss())
                assert await serving
                front.link.close()
        group.cancel_scope.cancel()
    await replica.close()


async def test_another_model_needs_another_process() -> None:
    replica = Replica()
    async with anyio.create_task_group() as group:
        for name in ("one", "two"):
            ours, theirs = socket.socketpair()
            front = Front()
            serving = asyncio.create_task(replica.serve(group, partial(open_link, "front", theirs)))
            await front.open(ours)
            front.link.tell(begin(name=name))
            if name == "one":
                await front.until(Up)
                front.link.close()
                await serving
            else:
                assert "other settings" in (await front.until(StartFailed)).message
                with pytest.raises(OtherModel):
                    await serving
                front.link.close()
        group.cancel_scope.cancel()
    await replica.close()


async def test_loading_is_told() -> None:
    replica = Replica()
    async with anyio.create_task_group() as group:
        ours, theirs = socket.socketpair()
        front = Front()
        serving = asyncio.create_task(replica.serve(group, partial(open_link, "front", theirs)))
        await front.open(ours)
        config = EngineConfig(model=ModelConfig(path=Path("nothing"), device="cpu"), executor="thread")
        front.link.tell(StartReplica(0, config, None, "e", 0.0, ""))
        failed = await front.until(StartFailed)
        assert failed.kind == "ModelError"
        assert "nothing" in failed.message
        assert all(isinstance(each, Loading) for each in front.heard)
        with pytest.raises(Exception, match="nothing"):
            await serving
        front.link.close()
        group.cancel_scope.cancel()
    await replica.close()
