"""What a replica says that cannot join. That one joins, ends and joins again: `e2e/test_replicas.py`."""

import asyncio
import gc
import socket
from typing import Any

import pytest

from ramify.actors.cluster import joining
from ramify.actors.kit.collector import YOUNG
from ramify.actors.links import tcp


async def told(port: int, secret: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason in the log, after the first time that it could not join at `port`."""
    reasons: asyncio.Queue[str] = asyncio.Queue()

    def warned(event: str, **fields: Any) -> None:
        assert fields["at"] == f"127.0.0.1:{port}"
        reasons.put_nowait(fields["reason"])

    monkeypatch.setattr(joining.log, "warning", warned)
    task = asyncio.create_task(joining.join("127.0.0.1", port, secret, signals=False))
    try:
        return await asyncio.wait_for(reasons.get(), 60)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_another_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    port = tcp.JoinPort(b"the secret of the front", lambda open_link, host: None)
    number = await port.listen("127.0.0.1", 0, None)
    try:
        assert "another secret" in await told(number, b"a secret of another one", monkeypatch)
    finally:
        port.close()


async def test_a_front_that_waits_for_tls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes the connection
        number = silent.getsockname()[1]
        assert "--tls-ca" in await told(number, b"sixteen bytes or more", monkeypatch)


async def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    assert "Connect call failed" in await told(number, b"sixteen bytes or more", monkeypatch)


async def test_a_replica_of_ray_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front has gone, and the Ray that would end it may have gone, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    secret = b"sixteen bytes or more"
    await asyncio.wait_for(joining.join("127.0.0.1", number, secret, signals=False, patience=0.0), 60)


async def test_pauses_of_its_garbage_collector_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes of `ramify replica` and of Ray's actors, which begin here."""
    before, meanwhile = gc.get_threshold(), []

    async def knock(*_: Any) -> Any:
        meanwhile.append(gc.get_threshold())
        raise ConnectionRefusedError

    monkeypatch.setattr(joining, "knock", knock)
    await joining.join("nowhere", 1, b"sixteen bytes or more", signals=False, patience=0.0)
    assert (meanwhile, gc.get_threshold()) == ([YOUNG], before)
