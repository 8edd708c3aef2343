"""A server that breaks the protocol, or means harm: the client ends with an error, and soon."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

import ramify
from ramify.clients import session_link
from ramify.clients.errors import Internal
from ramify.clients.trees import whole
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import BranchState, SegmentState, StateReply

STATE = {
    "type": "state",
    "session": "s",
    "op": 0,
    "revision": 1,
    "branches": [{"branch": "main", "position": 3}],
}
Script = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def hostile(script: Script) -> AsyncIterator[str]:
    async with serve(
        script, "127.0.0.1", 0, subprotocols=[Subprotocol("ramify.v1+json")], max_size=None
    ) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/v1/ws"


async def attach(ws: ServerConnection, **fields: Any) -> None:
    await ws.recv()
    await ws.send(json.dumps(STATE | fields))


def usage(**fields: Any) -> dict[str, Any]:
    return (
        dict.fromkeys(["prompt", "cached", "computed", "output", "forced"], 0)
        | {"hit": {}, "queue_ms": 0, "ttft_ms": None, "total_ms": 0}
        | fields
    )


BAD: list[Any] = [
    {
        "type": "event",
        "revision": 2,
        "op": "fork",
        "branch": "main",
        "details": {"position": "x", "as": 5},
    },
    {"type": "event", "revision": 2, "op": "rollback", "branch": "main", "details": {"position": [1]}},
    {"type": "event", "revision": 2, "op": "fork", "branch": "main", "details": {"kept": [{"into": 1}]}},
    {"type": "event", "revision": 2, "op": "fork", "branch": "main", "details": {"kept": 7}},
    {"type": "ok", "id": 1, "branch": "main", "position": 4},  # a generation has no `ok`
    {"type": "delta", "branch": "main", "position": "far", "text": ""},
    {"type": "nonsense"},
    [[[]]],
]


@pytest.mark.parametrize("message", [*map(json.dumps, BAD), "[" * 100_000, "{", "1" * 5000])
async def test_a_frame_that_makes_no_sense_ends_the_session(message: str) -> None:
    async def script(ws: ServerConnection) -> None:
        await attach(ws)
        await ws.recv()
        await ws.send(message)
        await ws.wait_closed()

    async with hostile(script) as url, asyncio.timeout(60):
        session = await ramify.connect(url)
        with pytest.raises(Internal, match=r"the server sent|answers it"):
            await session.main.generate(max_tokens=5)
        await session.close()


async def test_a_frame_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_link, "MOST_BYTES", 1 << 16)

    async def script(ws: ServerConnection) -> None:
        await attach(ws)
        await ws.recv()
        await ws.send(
            json.dumps({"type": "delta", "branch": "main", "position": 4, "text": "x" * (1 << 17)})
        )
        await ws.wait_closed()

    async with hostile(script) as url, asyncio.timeout(60):
        session = await ramify.connect(url)
        with pytest.raises(Internal, match="a frame of more than 65536 bytes"):
            await session.main.generate(max_tokens=5)
        await session.close()


@pytest.mark.parametrize("forward", [False, True])
async def test_a_tree_without_end(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    monkeypatch.setattr("ramify.clients.handles.MOST_PAGES", 20)

    async def script(ws: ServerConnection) -> None:
        await attach(ws)
        count = 0
        while True:
            op = json.loads(await ws.recv())
            if op["type"] != "tree":
                continue
            count += forward
            place = {"branch": "main", "position": count}
            await ws.send(json.dumps(STATE | {"id": op["id"], "next": place}))

    async with hostile(script) as url, asyncio.timeout(60):
        session = await ramify.connect(url)
        with pytest.raises(Internal, match="no end"):
            await session.tree(text=True)
        await session.link.stop()  # it would not answer `close`


async def test_a_tree_without_the_branch() -> None:
    async def script(ws: ServerConnection) -> None:
        await attach(ws)
        op = json.loads(await ws.recv())
        await ws.send(json.dumps(STATE | {"id": op["id"], "branches": []}))
        await ws.wait_closed()

    async with hostile(script) as url, asyncio.timeout(60):
        session = await ramify.connect(url)
        with pytest.raises(Internal, match="lacks branch 'main'"):
            await session.main.tree()
        await session.link.stop()  # it would not answer `close`


def test_parents_in_a_circle() -> None:
    turn = SegmentState(kind="input", start=0, end=2)
    branches = [
        BranchState(branch="a", position=2, parent="b", turns=[turn], turns_from=1),
        BranchState(branch="b", position=2, parent="a", turns=[turn], turns_from=1),
        BranchState(branch="c", position=2, parent="c", turns=[turn], turns_from=1),
    ]
    state = whole([StateReply(session="s", op=0, revision=1, branches=branches)])
    assert [branch.branch for branch in state.branches] == ["a", "b", "c"]


async def test_a_server_that_always_drops_the_connection_is_not_stormed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time it attaches the session first, which made each loss look like the first one."""
    attempts: list[int] = []
    slept = asyncio.sleep

    def counted(attempt: int, jitter: float, floor: float = 0.0) -> float:
        attempts.append(attempt)
        return 0.0

    monkeypatch.setattr(session_link, "delay", counted)

    async def script(ws: ServerConnection) -> None:
        await attach(ws)
        if len(attempts) == 12:
            await ws.close(1000)
        await ws.close(1012)

    async with hostile(script) as url, asyncio.timeout(60):
        session = await ramify.connect(url)
        while session.core.error is None:
            await slept(0.01)
        await session.close()
    assert attempts[:5] == [0, 0, 0, 0, 0]
    assert attempts[-1] >= 6


@pytest.mark.parametrize("retry_ms", [-1000, 10**400])
async def test_a_refusal_with_an_absurd_wait(retry_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    floors: list[float] = []
    connections = 0

    def noted(attempt: int, jitter: float, floor: float = 0.0) -> float:
        floors.append(floor)
        return 0.0

    monkeypatch.setattr(session_link, "delay", noted)

    async def script(ws: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            await attach(ws)
            await ws.close(1012)
            return
        await ws.recv()
        code = "overloaded" if connections == 2 else "forbidden"
        await ws.send(f'{{"type":"error","code":"{code}","message":"no","retry_ms":{retry_ms}}}')
        await ws.wait_closed()

    async with hostile(script) as url, asyncio.timeout(60):
        session = await ramify.connect(url)
        with pytest.raises(RamifyError):
            await session.main.append("x")
        await session.close()
    assert max(floors) <= 60
    assert min(floors) >= 0
