"""The asyncio shell on real sockets: the model server behind `websockets`, port 0."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from ramify.clients.connect import connect
from ramify.clients.errors import ConnectionLost, Replaced, SessionLost
from ramify.clients.generation import Generation, Reply
from ramify.clients.handles import Session
from ramify.clients.session_link import Connection, websocket_url
from ramify.protocol.codec import SUBPROTOCOLS, Codec
from ramify.protocol.errors import BadRequest, Cancelled, NoBranch, NoSession, Unauthorized
from ramify.protocol.wire import Error, Event, ServerMessage


class Served:
    """A model server on a socket. `drop_every`: abort the connection after so many frames."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.drop_every = 0
        self.paused = asyncio.Event()
        self.paused.set()
        self.received = asyncio.Event()  # a frame of ops
        self.frames: list[int] = []  # ops in each received frame
        self.headers: list[str | None] = []
        self.connections = 0
        self.close_with: int | None = None
        self.port = 0
        self._socket: ServerConnection | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/ws"

    async def handle(self, socket: ServerConnection) -> None:
        self.connections += 1
        self._socket = socket
        request = socket.request
        assert request is not None
        self.headers.append(request.headers.get("Authorization"))
        codec = Codec(SUBPROTOCOLS[str(socket.subprotocol)])
        reader = asyncio.create_task(self._read(socket, codec))
        try:
            await self._write(socket, codec)
        except ConnectionClosed:
            pass
        finally:
            self.model.disconnect()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, socket: ServerConnection, codec: Codec) -> None:
        async for data in socket:
            frame = codec.decode_client(data)
            self.frames.append(len(frame))
            if len(self.frames) > 1:
                self.received.set()
            self.model.receive(frame)

    async def _write(self, socket: ServerConnection, codec: Codec) -> None:
        sent = 0
        while True:
            if self.paused.is_set():
                self.model.step()
            if self.close_with is not None:
                code, self.close_with = self.close_with, None
                await socket.close(code)
                return
            while self.model.out:
                if self.drop_every and sent >= self.drop_every:
                    socket.transport.abort()
                    return
                await socket.send(codec.encode(self.model.out.popleft()), text=not codec.binary)
                sent += 1
            if self.model.closing:
                await socket.close(self.model.closing)
                return
            if socket.state.name != "OPEN":
                return
            await asyncio.sleep(0)

    def push(self, *messages: ServerMessage) -> None:
        self.model.out.append(list(messages))


@contextlib.asynccontextmanager
async def serving(model: Any) -> AsyncIterator[Served]:
    served = Served(model)
    names = [Subprotocol(name) for name in SUBPROTOCOLS]
    async with serve(served.handle, "127.0.0.1", 0, subprotocols=names, compression=None) as listener:
        served.port = next(iter(listener.sockets)).getsockname()[1]
        yield served


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_a_chat(server: Any, codec: Any) -> None:
    async with serving(server) as served, connect(served.url, codec=codec) as session:
        texts = []
        generation = session.main.chat("hi!", max_tokens=3, seed=4)
        async for delta in generation:
            texts.append(delta.text)
        result = await generation
        assert "".join(texts) == result.text == "<3:4><4:4><5:4>"
        assert (result.reason, result.usage.output, result.position) == ("length", 3, 6)
        assert served.frames == [1, 2]  # open; then append and generate together
        assert session.main.position == 6
        assert session.model == "model"
        assert (await session.main.append("xy", expect=6)).position == 8
        tree = await session.tree(text=True)
        assert [turn.text for turn in tree.branches[0].turns or ()][-1] == "xy"
    assert server.closing == 1000


async def test_forks_programs_and_children(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        await session.main.say("abc")
        a, b = await session.main.fork("a", "b", at=2)
        first, second = a.generate(max_tokens=2, seed=1), b.generate(max_tokens=2, seed=2)
        assert (await first).text == "<2:1><3:1>"
        assert (await second).text == "<2:2><3:2>"
        children = session.main.generate(n=2, max_tokens=1, seed=3)
        assert [(await child).text for child in children] == ["<3:3>", "<3:3>"]
        assert len({child.branch for child in children}) == 2
        await b.drop()
        await a.set(name="c")
        assert a.name == "c"
        assert (await a.rollback(to=1)).position == 1
        (root,) = await session.root("r")
        assert root.position == 0
        reply, generation, many = await session.send(
            [
                {"type": "append", "branch": "r", "text": "q"},
                {"type": "generate", "branch": "r", "max_tokens": 1, "seed": 5},
                {"type": "generate", "branch": ["r", "c"], "max_tokens": 1, "seed": 6},
            ]
        )
        assert isinstance(reply, Reply)
        assert isinstance(generation, Generation)
        assert isinstance(many, list)
        assert (await reply)[0].id
        assert (await generation).text == "<1:5>"
        assert [(await each).text for each in many] == ["<2:6>", "<1:6>"]
        assert {branch.name for branch in session.branches} >= {"main", "c", "r"}


async def test_children_are_read_side_by_side(server: Any) -> None:
    """They share an op: no reader may swallow the wake-up of another."""

    async def read(generation: Generation) -> str:
        return "".join([delta.text async for delta in generation])

    async with serving(server) as served, connect(served.url) as session:
        await session.main.append("abc")
        children = session.main.generate(n=5, max_tokens=20, seed=1)
        async with asyncio.timeout(60):
            texts = await asyncio.gather(*map(read, children))
        assert texts == ["".join(f"<{i}:1>" for i in range(3, 23))] * 5


async def test_one_child_is_cancelled_and_the_others_go_on(server: Any) -> None:
    """They share an op, so it is not the op that is cancelled."""
    async with serving(server) as served, connect(served.url) as session:
        await session.main.append("abc")
        for child in session.main.generate(n=2, max_tokens=10**6):
            await anext(child)
            child.cancel()
            assert (await child).reason == "cancelled"


@pytest.mark.parametrize("every", [1, 2, 3, 5])
async def test_drops_are_not_seen(server: Any, every: int) -> None:
    async with serving(server) as served, connect(served.url) as session:
        session.link.jitter = lambda: 0.0
        served.drop_every = every + 1  # the `state` at least gets through
        generation = session.main.chat("abc", max_tokens=12, seed=9)
        text = ""
        async for delta in generation:
            text = text[: len(text) - delta.cut] + delta.text
        served.drop_every = 0
        assert text == "".join(f"<{i}:9>" for i in range(3, 15))
        assert served.connections > 1
        assert len(set(server.runs)) == len(server.runs)
        assert (await session.main.append("z")).position == 16


async def test_errors_become_exceptions(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        with pytest.raises(NoBranch) as caught:
            await session.branch("nowhere").append("x")
        assert caught.value.message == "no_branch: nowhere"
        with pytest.raises(NoBranch):  # the cause, not "skipped"
            await session.branch("nowhere").chat("x")
        with pytest.raises(BadRequest, match="max_tokens"):
            session.main.generate(max_tokens=0)
        with pytest.raises(BadRequest, match="role"):
            await session.main.append(messages=[{"role": "nobody", "content": ""}])
        with pytest.raises(BadRequest, match="not an op"):
            await session.send([{"type": "ping"}])
        assert (await session.main.append("x")).position == 1


async def test_a_cancelled_task_cancels_its_generation(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        await session.main.append("abc")
        generation = session.main.generate(max_tokens=10**6)
        await anext(generation)

        async def read() -> None:
            async for _ in generation:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await generation
        assert result.reason == "cancelled"
        assert result.text
        async with session.main.generate(max_tokens=10**6) as second:
            await anext(second)
        assert (await second).reason == "cancelled"
        waiting = session.main.generate(max_tokens=10**6)
        behind = session.main.generate(max_tokens=5)
        await anext(waiting)
        await session.main.cancel()
        assert (await waiting).reason == "cancelled"
        with pytest.raises(Cancelled):
            await behind


async def test_a_cancel_before_sending_takes_the_op_back(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        generation = session.main.chat("abc", max_tokens=3)
        generation.cancel()
        with pytest.raises(Cancelled):
            await generation
        assert (await session.main.append("x")).position == 1


async def test_a_lost_session(server: Any, server_type: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        session.link.jitter = lambda: 0.0
        generation = session.main.chat("abc", max_tokens=10**6)
        await anext(generation)
        served.model = server_type()  # a restarted server
        session.link.abort()
        with pytest.raises(SessionLost, match="branches are gone"):
            await generation
        with pytest.raises(SessionLost):
            await session.main.append("x")


async def test_attach_to_an_existing_session(server: Any) -> None:
    async with serving(server) as served:
        async with connect(served.url, client="one", keep=True) as session:
            await session.main.append("abc")
            where = (session.id, session.key)
        server.closing = None
        async with connect(served.url, client="one", session=where[0], key=where[1]) as again:
            assert again.main.position == 3
            assert (await again.main.append("d")).position == 4
        server.closing = None
        with pytest.raises(NoSession):
            async with connect(served.url, session="s_nope", key="k"):
                pass


async def test_replaced_by_the_same_client(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        generation = session.main.chat("abc", max_tokens=10**6)
        await anext(generation)
        served.close_with = 4409
        with pytest.raises(Replaced):
            await generation
        assert served.connections == 1


async def test_fresh_tokens(server: Any) -> None:
    count = 0

    async def token() -> str:
        nonlocal count
        count += 1
        return f"t{count}"

    async with serving(server) as served, connect(served.url, token=token) as session:
        session.link.jitter = lambda: 0.0
        served.close_with = 4401
        await session.main.chat("x", max_tokens=200)
        assert served.headers == ["Bearer t1", "Bearer t2"]
    async with serving(type(server)()) as served, connect(served.url, token="t") as session:
        served.close_with = 4401
        with pytest.raises(Unauthorized):
            await session.main.chat("x", max_tokens=10**6)


async def test_no_server() -> None:
    with pytest.raises(ConnectionLost, match="cannot connect"):
        async with connect("ws://127.0.0.1:9"):
            pass
    with pytest.raises(BadRequest, match="ttl_s"):
        async with connect("ws://127.0.0.1:9", ttl_s=-1):
            pass


async def test_no_reconnect(server: Any) -> None:
    async with serving(server) as served, connect(served.url, reconnect=False) as session:
        generation = session.main.chat("abc", max_tokens=10**6)
        await anext(generation)
        session.link.abort()
        with pytest.raises(ConnectionLost):
            await generation
        assert session.error is not None


async def test_events(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        served.push(Event(revision=5, op="append", branch="main", by="x", details={"position": 4}))
        served.push(Error(code="internal", message="no op"))
        seen = []
        async for event in session.events():
            seen.append(event)
            if len(seen) == 2:
                break
        assert isinstance(seen[0], Event)
        assert isinstance(seen[1], Error)
        assert session.main.position == 4


async def test_a_server_that_breaks_the_protocol(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session:
        from ramify.clients.errors import Internal
        from ramify.protocol.wire import Ok

        generation = session.main.generate(max_tokens=10**6)
        served.paused.clear()
        await served.received.wait()
        served.push(Ok(id=1))
        with pytest.raises(Internal, match="only `done`"):
            await generation


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8765", "ws://localhost:8765/v1/ws"),
        ("http://h:1", "ws://h:1/v1/ws"),
        ("https://h/", "wss://h/v1/ws"),
        ("ws://h/a/b", "ws://h/a/b"),
    ],
)
def test_urls(given: str, url: str) -> None:
    assert websocket_url(given) == url


def test_bad_urls() -> None:
    for bad in ("ftp://h", "ws://", "h:port", "h:99999", "ws://[h/v1/ws"):
        with pytest.raises(BadRequest, match="not a server address"):
            websocket_url(bad)


# --- ways to hold a session and a generation ------------------------------------------------------


async def test_a_session_without_a_block(server: Any) -> None:
    async with serving(server) as served:
        session = await connect(served.url)
        assert session.connected
        assert (await session.main.append("abc")).position == 3
        await session.close()
        assert server.closing == 1000
        assert not session.connected
        await session.close()  # again: nothing happens
        server.closing = None
        async with await connect(served.url) as session:
            assert session.connected
        assert server.closing == 1000


async def test_keep_holds_for_every_way_out(server: Any) -> None:
    async with serving(server) as served:
        async with await connect(served.url, keep=True) as session:
            pass
        kept, server.closing = list(server.closes), None
        session = await connect(served.url, keep=True, session=session.id, key=session.key)
        await session.close(keep=False)
        assert (kept, server.closes) == ([True], [True, False])


def test_an_unknown_setting_is_named_at_once() -> None:
    with pytest.raises(TypeError, match="no setting 'toke': client, session, key, token"):
        connect("ws://h", toke="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def leave_by_break(session: Session) -> None:
    async for _ in session.main.chat("abc", max_tokens=10**6):
        break


async def leave_by_return(session: Session) -> Any:
    generation = session.main.chat("abc", max_tokens=10**6)  # held, and left all the same
    async for delta in generation:
        return delta
    return None


async def leave_by_error(session: Session) -> None:
    with pytest.raises(KeyError):
        async for _ in session.main.chat("abc", max_tokens=10**6):
            raise KeyError


async def leave_by_aclose(session: Session) -> None:
    async with contextlib.aclosing(session.main.chat("abc", max_tokens=10**6)) as generation:
        await anext(generation)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_return, leave_by_error, leave_by_aclose])
async def test_leaving_early_cancels(server: Any, leave: Any) -> None:
    """The next turn waits behind what runs on the branch: a million tokens, but for the cancel."""
    async with serving(server) as served, connect(served.url) as session, asyncio.timeout(60):
        await leave(session)
        assert (await session.main.chat("d", max_tokens=1)).reason == "length"
        assert server.branches["main"].position < 10**5


async def test_what_is_left_tells_so_and_keeps_its_text(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session, asyncio.timeout(60):
        generation = session.main.chat("abc", max_tokens=10**6)
        async for _ in generation:
            break
        result = await generation
        assert (result.reason, result.text[:5]) == ("cancelled", "<3:No")
        assert result.text == generation.text


async def test_a_part_may_be_read_and_the_rest_awaited(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session, asyncio.timeout(60):
        generation = session.main.chat("abc", max_tokens=5)
        first = await anext(generation)
        assert (await generation).text.startswith(first.text)
        unread = session.main.chat("d", max_tokens=3)
        del unread  # nobody reads: it runs
        assert (await session.main.chat("e", max_tokens=1)).usage.prompt == 3 + 5 + 1 + 3 + 1


async def test_tasks_of_a_generation(server: Any) -> None:
    async with serving(server) as served, connect(served.url) as session, asyncio.timeout(60):
        generation = session.main.chat("abc", max_tokens=3, seed=1)
        tasks = [asyncio.create_task(generation) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            tasks.append(group.create_task(generation))
        results = [await task for task in tasks] + [await generation]
        assert {result.text for result in results} == {"<3:1><4:1><5:1>"}
        (reply,) = await session.send([{"type": "append", "text": "x"}])
        assert isinstance(reply, Reply)
        assert (await asyncio.create_task(reply))[0].id
        with pytest.raises(NoBranch):
            await asyncio.create_task(session.branch("nowhere").generate())


@pytest.mark.parametrize("steps", [0, 2])
async def test_a_cancelled_task_of_a_generation_cancels_it(server: Any, steps: int) -> None:
    """Also before its first step."""
    async with serving(server) as served, connect(served.url) as session, asyncio.timeout(60):
        generation = session.main.chat("abc", max_tokens=10**6)
        await anext(generation)
        task = asyncio.create_task(generation)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await generation).reason == "cancelled"


async def test_a_loss_is_told_once_and_its_end(server: Any, server_type: Any) -> None:
    seen: list[Connection] = []
    async with serving(server) as served:
        async with connect(served.url, watch=seen.append) as session:
            session.link.jitter = lambda: 0.0
            assert seen == []
            session.link.abort()
            assert (await session.main.append("x")).position == 1
            assert [(change.up, change.over) for change in seen] == [(False, False), (True, False)]
            assert isinstance(seen[0].error, ConnectionLost)
            served.model = server_type()  # a restarted server
            session.link.abort()
            with pytest.raises(SessionLost):
                await session.main.append("x")
            assert [change[::2] for change in seen[2:]] == [(False, False), (False, True)]
            assert isinstance(seen[-1].error, SessionLost)
        seen.clear()
        async with connect(served.url, watch=seen.append):
            pass
        assert seen == []  # its own end is no loss
