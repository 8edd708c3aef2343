"""Any number of gateway processes with any number of replicas: some are killed, some told to end."""

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.amount import stride
from tests.e2e.test_gateways import socket_in
from tests.e2e.test_replicas import SLOW, Joining, until

TOKENS = 150
LAYOUTS = [(2, 2), (1, 1), (1, 2), (4, 1), (2, 1), (4, 2)]


@pytest.mark.parametrize(("gateways", "replicas"), LAYOUTS[:: stride(3)])
async def test_processes_of_every_kind_may_end(serving: Any, gateways: int, replicas: int) -> None:
    async with serving(gateways=gateways, replicas=replicas, fake=SLOW) as served:
        await _each_ends(served, gateways, replicas)


@pytest.mark.parametrize("gateways", [1, 2])
async def test_with_replicas_that_join(serving: Any, tmp_path: Path, gateways: int) -> None:
    """They outlive a front with all its gateways, and serve the next one."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test")
    port = _free_ports(1 + gateways)
    joining = Joining(port, secret)
    settings = {"count": 2, "on": "join", "listen_port": port, "secret_file": secret}
    for _ in range(2):
        joining.start()
    try:
        async with serving(gateways=gateways, replicas=settings, fake=SLOW) as served:
            await _each_ends(served, gateways, 2, lambda: joining.start())
        async with serving(gateways=gateways, replicas=settings, fake=SLOW) as served:
            await until(lambda: len(served.engine.core.pids) == 2, "they come back")
            async with _streams(served, gateways):
                pass
    finally:
        codes = await asyncio.to_thread(joining.end)
    assert sorted(codes) == [-9, 0, 0]


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
                return int(first)


async def _each_ends(served: Any, gateways: int, replicas: int, again: Any = None) -> None:
    cluster, front = served.engine.core, served.engine.front
    await until(lambda: len(cluster.pids) == replicas, "the replicas")
    async with _streams(served, gateways):  # no session hears of the end of a replica
        os.kill(next(iter(cluster.pids.values())), signal.SIGKILL)
    if again is not None:
        again()
    await until(lambda: len(cluster.pids) == replicas, "another one in its place")
    if again is None:
        old = set(cluster.pids.values())
        async with _streams(served, gateways):
            os.kill(min(old), signal.SIGTERM)
        await until(
            lambda: len(cluster.pids) == replicas and min(old) not in cluster.pids.values(),
            "another one in the place of the one that was told to end",
        )
    before = front.pids
    async with _streams(served, gateways, first=1):  # its sessions end, those of the others do not
        os.kill(before[0], signal.SIGKILL)
    await until(lambda: len(front.pids) == gateways and front.pids[0] != before[0], "a new gateway")
    async with _streams(served, gateways):
        await _all_tell(served, gateways, sessions=gateways)
    await _all_tell(served, gateways, sessions=0)
    await served.deserted()


async def _all_tell(served: Any, gateways: int, sessions: int) -> None:
    """Wait until every gateway process tells the same at /v1/info: what is so now."""
    async with asyncio.timeout(60):
        while True:
            told = [(await served.request("GET", "/v1/info"))[1] for _ in range(4 * gateways)]
            so = msgspec.to_builtins(served.engine.status.info())
            alike = all({**each, "model": None} == {**so, "model": None} for each in told)
            if alike and sum(each["sessions"] for each in so["replicas"]) == sessions:
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _streams(served: Any, gateways: int, first: int = 0) -> Any:
    """A stream in each gateway process from `first` on, which say what an undisturbed one says."""
    async with AsyncExitStack() as sockets:
        peers = []
        for worker in range(first, gateways):
            peer = await sockets.enter_async_context(socket_in(served, worker))
            peers.append(peer)
            await peer.open(
                peer.user(1, f"say {worker}"), peer.greedy(2, max_tokens=TOKENS), tokens=True
            )
            await peer.next("delta")
        yield
        for worker, peer in enumerate(peers, first):
            await peer.terminal(2)
            prompt = served.oracle.turn(f"say {worker}")
            assert peer.tokens["main"] == served.oracle.output(prompt, TOKENS)
            await peer.send({"type": "close", "id": 3})
