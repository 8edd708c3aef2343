"""A replica and its fronts: what one leaves behind, the next one does not find."""

import asyncio
import socket
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import TaskStatus

from ramify.actors.cluster.cores import GatewayCores
from ramify.actors.cluster.replica import OtherModel, Replica, _reach
from ramify.actors.cluster.replica_messages import (
    ENGINE,
    Dismiss,
    Draining,
    FromReplica,
    Hello,
    Leave,
    StartReplica,
    Up,
)
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.front.core_messages import MAX_FRAME, ToCore, ToSessions
from ramify.actors.kit.clock import MonotonicClock
from ramify.actors.kit.report import Report
from ramify.actors.links.handshake import Stranger
from ramify.actors.links.link import open_link
from ramify.actors.processes.messages import Loading, StartFailed, decoder, encoder
from ramify.protocol import messages as m
from ramify.protocol.config import EngineConfig, ModelConfig, ReplicasConfig
from ramify.protocol.plan import pack, unpack
from ramify.protocol.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("caches_are_checked")
SECRET = b"a secret of this test"
GREEDY = SamplingParams(temperature=0)


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
            decoder(FromReplica),
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
            for whose, told in (await self.until(ToSessions)).messages:
                assert whose == session
                for progress in told.progress:
                    found += unpack(progress.tokens)
                if told.finished:
                    assert told.finished[0].reason == "length"
                    return found

    def said(self, kind: type) -> list[Any]:
        return [each for each in self.heard if isinstance(each, kind)]


def begin(**model: Any) -> StartReplica:
    config = EngineConfig(model=ModelConfig(path=Path("m"), **model), executor="thread")
    return StartReplica(0, config, FakeSpec({"verify": True}), "e", Hello(0, 0.0, ""))


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
            assert len(await front.output(64, tokens)) == 4
            if number < 3:
                # Something runs when it goes.
                request = m.Submit(64 << 32 | 3, 64 << 32 | 1, 8, 10_000, SamplingParams())
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
        front.link.tell(StartReplica(0, config, None, "e", Hello(0, 0.0, "")))
        failed = await front.until(StartFailed)
        assert failed.kind == "ModelError"
        assert "nothing" in failed.message
        assert all(isinstance(each, Loading) for each in front.heard)
        with pytest.raises(Exception, match="nothing"):
            await serving
        front.link.close()
        group.cancel_scope.cancel()
    await replica.close()


class Gateway:
    """A gateway process' cores, and what its sessions are told."""

    def __init__(self, worker: int, door: socket.socket, secret: bytes = SECRET) -> None:
        config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=1))
        self.session = 64 + worker
        self.told: list[Any] = []
        self.host = GatewayCores(config, worker, secret, MonotonicClock())
        self.life = anyio.CancelScope()
        self._door = door
        self._count = 0

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        with self.life:
            await self.host.listen(self._door.dup())
            await self.host.run(self, task_status=task_status)

    def put(self, messages: Iterable[tuple[int, Any]], /) -> None:
        for key, message in messages:
            assert key == self.session
            self.told.append(message)

    def start(self) -> None:
        pass

    def flush(self) -> None:
        pass

    @property
    def states(self) -> list[str]:
        return [member.state for member in self.host.cores.members]

    def generate(self, tokens: list[int], count: int) -> None:
        self._count += 2
        branch = self.session << 32 | self._count
        request = m.Submit(branch | 1, branch, len(tokens), count, GREEDY)
        for said in (m.OpenBranch(branch), m.ExtendBranch(branch, pack(tokens)), request):
            self.host.bindings.tell(said)

    @property
    def output(self) -> list[int]:
        told = [each for each in self.told if isinstance(each, m.Tokens)]
        return [token for each in told for p in each.progress for token in unpack(p.tokens)]

    @property
    def ended(self) -> bool:
        return any(each.finished for each in self.told if isinstance(each, m.Tokens))


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_core_serves_several_fronts() -> None:
    """Gateway processes, which it joins: one that goes takes its sessions along, and may come back."""
    replica, front = Replica(reach=_reach), Front()
    ours, theirs = socket.socketpair()
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    async with anyio.create_task_group() as group:
        gateways = [Gateway(worker, door) for worker, door in enumerate(doors)]
        for gateway in gateways:
            await group.start(gateway.run)
        serving = asyncio.create_task(replica.serve(group, partial(open_link, "front", theirs)))
        await front.open(ours)
        ports = [door.getsockname()[1] for door in doors]
        started = msgspec.structs.replace(
            begin(), number=5, hello=Hello(ENGINE, 0.0, ""), ports=ports, secret=SECRET
        )
        front.link.tell(started)
        await until(lambda: all(gateway.states == ["ready"] for gateway in gateways))
        assert [member.number for member in gateways[1].host.cores.members] == [5]
        gateways[0].generate([5, 6, 7], 30)
        gateways[1].generate([5, 6, 7], 30)
        await until(lambda: all(gateway.ended for gateway in gateways))
        assert gateways[0].output == gateways[1].output
        assert len(gateways[0].output) == 30
        await until(lambda: _sessions(front) == 2)
        gateways[1].life.cancel()
        await until(lambda: _sessions(front) == 1)
        gateways[0].generate([5, 6, 7, 8], 5)
        await until(lambda: len(gateways[0].output) == 35)
        again = Gateway(1, doors[1])
        await group.start(again.run)
        await until(lambda: again.states == ["ready"])
        again.generate([5, 6, 7], 30)  # numbers that the one before had as well
        await until(lambda: again.ended)
        assert again.output == gateways[0].output[:30]
        assert front.said(m.Tokens) == []
        front.link.tell(Leave())
        await until(lambda: again.states == gateways[0].states == ["draining"])
        assert isinstance(again.told[-1], m.ChangeCore)
        for gateway in (again, gateways[0]):
            gateway.host.bindings.tell(m.Reopen(gateway.session))
        await until(lambda: _sessions(front) == 0)
        front.link.tell(Dismiss())
        assert await serving
        front.link.close()
        group.cancel_scope.cancel()
    for door in doors:
        door.close()
    await replica.close()


async def test_a_gateway_process_takes_no_replica_without_its_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        async with anyio.create_task_group() as group:
            gateway = Gateway(0, door)
            await group.start(gateway.run)
            with pytest.raises((OSError, Stranger)):
                await _reach(door.getsockname()[1], b"another secret, of sixteen bytes")
            assert gateway.states == []
            group.cancel_scope.cancel()


def _sessions(front: Front) -> int:
    """As the replica reported last."""
    reports = front.said(Report)
    return reports[-1].sessions if reports else -1
