"""A database that comes back without the end of what it was told, or empty: the sessions that live in a
server are saved again, as they are.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ramify.actors.store import actor as store_actor
from ramify.actors.store.base import StoreError
from ramify.actors.store.opening import open_store
from tests.e2e.test_store import login
from tests.servers import Server


@pytest.fixture(params=["postgres", "redis"])
def server(request: pytest.FixtureRequest) -> Server:
    request.getfixturevalue(f"{request.param}_url")
    running: Server = request.getfixturevalue(f"{request.param}_server")
    return running


async def saved(url: str, sessions: set[str]) -> None:
    """Wait until the store has these sessions."""

    def look() -> set[str]:
        try:
            store = open_store(url, read_only=True)
        except StoreError:  # it is empty
            return set()
        try:
            return {kept.session for kept in store.kept()}
        finally:
            store.close()

    async with asyncio.timeout(60):
        while not sessions <= await asyncio.to_thread(look):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("empty", [False, True])
async def test_no_session_that_lives_is_lost(
    serving: Any, server: Server, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some go on at once, some have nothing more to say, and one leaves the memory just then."""
    monkeypatch.setattr(store_actor, "AGAIN_SECONDS", 0.05)
    kept = {"store": server.url}
    async with serving(server=kept) as served, AsyncExitStack() as sockets:
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(6)]
        states = []
        for i, peer in enumerate(peers):
            states.append(await peer.open(client=f"c{i}"))
            for turn in range(3):
                await peer.say(2 * turn + 1, f"turn {turn}", max_tokens=10)
        await asyncio.to_thread(server.kill)
        if empty:
            await asyncio.to_thread(server.lose)
        for peer in peers[:3]:
            await peer.say(11, "while it is away", max_tokens=10)
        await asyncio.to_thread(server.start)
        for peer in peers[:2]:
            await peer.say(21, "and behind that", max_tokens=10)
        await saved(server.url, {state["session"] for state in states})
        trees = [await peer.tree(31) for peer in peers]
    async with serving(server=kept) as served:
        for i, (peer, state, tree) in enumerate(zip(peers, states, trees, strict=True)):
            async with served.connect() as again:
                again.follow(peer)
                back = await again.open(client=f"c{i}", **login(state), **peer.seen)
                assert back["resumed"]
                assert "lost" not in back
                assert await again.tree(41) == tree
    store = open_store(server.url, read_only=True)
    assert store.check() == []
    store.close()


async def test_what_was_pruned_is_no_loss(serving: Any, server: Server) -> None:
    """The session ends, also after a connection that was made anew."""
    async with serving(server={"store": server.url}) as served, served.connect() as peer:
        state = await peer.open(peer.user(1, "hi"))
        await peer.terminal(1)
        await saved(server.url, {state["session"]})
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        store = open_store(server.url)
        store.delete([state["session"]])
        await peer.send(peer.greedy(2, max_tokens=5))
        await peer.closed()
        assert list(store.kept()) == []
        store.close()
