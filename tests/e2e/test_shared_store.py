"""Several servers on one PostgreSQL or Redis: clients may go from one to another, or from a dead one."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from ramify.actors.session.saver import LAZY_SECONDS
from ramify.actors.store import actor as store_actor
from ramify.actors.store import opening
from ramify.protocol.errors import Close, ConfigError
from tests.e2e.test_store import login, refused
from tests.servers import Server

SLOW = {"step_seconds": 0.002}


@pytest.fixture(params=["postgres", "redis"])
def server(request: pytest.FixtureRequest) -> Server:
    """A database server without a store."""
    request.getfixturevalue(f"{request.param}_url")
    running: Server = request.getfixturevalue(f"{request.param}_server")
    return running


async def closed(peer: Any) -> int:
    """Read until the server closes the socket. Returns the code."""
    with pytest.raises(ConnectionClosed) as end:
        while True:
            await peer.next("delta", "done")
    assert end.value.rcvd is not None
    return end.value.rcvd.code


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_client_takes_its_session_along(serving: Any, gateways: int, server: Server) -> None:
    """In mid-stream, to a server that has none of it; the first one saves it before it lets it go, so
    that nothing of what the client has seen is taken back, and the text is that of one run.
    """
    kept = {"store": server.url}
    async with (
        serving(gateways=gateways, fake=SLOW, server=kept, alone=False) as first,
        serving(gateways=gateways, fake=SLOW, server=kept, alone=False) as second,
    ):
        oracle = first.oracle
        expected = oracle.output(oracle.turn("long"), 400)
        async with first.connect() as peer, first.connect() as other, second.connect() as again:
            state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=400), tokens=True)
            await other.open(other.user(1, "hi"))
            await peer.next("delta")
            await peer.next("delta")
            again.follow(peer)
            back = await again.open(**login(state), **peer.seen, tokens=True)
            assert back["resumed"]
            assert "lost" not in back
            assert await closed(peer) == Close.RESTART
            await again.terminal(2)
            assert not any("truncate" in message for message in again.log)
            assert again.text() == oracle.text(expected)
            assert oracle.text(expected).startswith(peer.text())
            await other.send(other.greedy(2, max_tokens=5))  # nobody else has noticed
            assert (await other.terminal(2))["reason"] == "length"
            async with first.connect() as thief:
                await refused(thief, "forbidden", session=state["session"], key="k_wrong")
            await again.send(again.greedy(3, max_tokens=2))
            assert (await again.terminal(3))["reason"] == "length"


async def test_a_server_that_does_not_answer_loses_its_sessions(
    serving: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for a second; what it writes later changes nothing."""
    monkeypatch.setattr(store_actor, "TEND_SECONDS", 1e6)  # deaf
    kept = {"store": server.url}
    async with (
        serving(fake=SLOW, server=kept, alone=False) as first,
        serving(fake=SLOW, server=kept, alone=False) as second,
    ):
        oracle = first.oracle
        expected = oracle.output(oracle.turn("long"), 1500)
        async with first.connect() as peer, second.connect() as again:
            state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=1500), tokens=True)
            await peer.next("delta")
            await asyncio.sleep(LAZY_SECONDS)
            again.follow(peer)
            assert (await again.open(**login(state), **peer.seen, tokens=True))["resumed"]
            assert await closed(peer) == Close.RESTART
            await again.terminal(2)
            assert again.text() == oracle.text(expected)


async def test_sessions_of_a_dead_server_go_on_elsewhere(
    serving: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops leaves them with their ops, and one that runs takes them up by itself."""
    monkeypatch.setattr(store_actor, "LOOK_SECONDS", 0.1)
    kept = {"store": server.url, "grace_s": 0.0}
    async with serving(fake=SLOW, server=kept, alone=False) as second:
        async with AsyncExitStack() as sockets:
            async with serving(fake=SLOW, server=kept, alone=False, idle_at_end=False) as first:
                peer = await sockets.enter_async_context(first.connect())
                state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=300))
                await peer.next("delta")
        async with asyncio.timeout(60):
            while not second.engine.metrics.running:  # before anybody comes
                await asyncio.sleep(0.02)
        async with second.connect() as again:
            again.follow(peer)
            await again.open(**login(state), **peer.seen)
            assert (await again.terminal(2))["usage"]["output"] == 300


async def test_while_the_database_is_away(serving: Any, server: Server) -> None:
    """Who is there goes on, `sync` waits, who comes is told to try later; then everything is saved."""
    kept = {"store": server.url, "session_ttl_s": 0.0}
    async with serving(server=kept) as served:
        async with served.connect() as peer, served.connect() as careful:
            state = await peer.open(peer.user(1, "hi"))
            await peer.terminal(1)
            safe = await careful.open({"type": "set", "id": 1, "persist": "sync"}, careful.user(2, "hi"))
            await careful.terminal(2)
            await asyncio.sleep(2 * LAZY_SECONDS)
            await asyncio.to_thread(server.stop)
            await peer.send(peer.greedy(2, max_tokens=5))
            assert (await peer.terminal(2))["reason"] == "length"
            await careful.send(careful.greedy(3, max_tokens=5))
            await asyncio.sleep(1.0)
            assert not [message for message in careful.log if message.get("id") == 3]
            async with served.connect() as new:
                assert "saved" in (await refused(new, "overloaded"))["message"]
            await asyncio.to_thread(server.start)
            assert (await careful.terminal(3))["reason"] == "length"
            await asyncio.sleep(2 * LAZY_SECONDS)
            trees = [await peer.tree(4), await careful.tree(4)]
        await served.quiet()
    async with serving(server=kept) as served:
        for who, tree in zip((state, safe), trees, strict=True):
            async with served.connect() as again:
                await again.open(**login(who))
                assert await again.tree(5) == tree


async def test_a_lost_connection_is_made_anew(
    serving: Any, postgres_server: Server, postgres_url: str
) -> None:
    import psycopg

    async with serving(server={"store": postgres_url}) as served, served.connect() as peer:
        await peer.open({"type": "set", "id": 1, "persist": "sync"})
        await peer.terminal(1)
        with psycopg.connect(postgres_url, autocommit=True) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'ramify'"
            )
        await peer.send(peer.user(2, "hi"))
        await peer.terminal(2)


async def test_a_server_without_its_database_does_not_start(serving: Any, server: Server) -> None:
    """The error names the place, and no password."""
    await asyncio.to_thread(server.stop)
    try:
        with pytest.raises(ConfigError) as error:
            async with serving(server={"store": server.url}):
                pass
    finally:
        await asyncio.to_thread(server.start)
    assert f"127.0.0.1:{server.port}" in error.value.message
    assert "secret" not in error.value.message


async def test_no_password_is_told(
    serving: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(server={"store": server.url}) as served:
        info = served.engine.status.info()
    assert "secret" not in repr(info)
    assert "secret" not in caplog.text
    store = opening.open_store(server.url)
    assert "secret" not in repr(store.warnings())
    store.close()
