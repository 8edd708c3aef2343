"""WebSockets end to end: a real client, loopback, stub directory and sessions."""

import asyncio
import base64
import json
import socket as sockets

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ramify.actors.gateway.port.binding import ANSWER_S
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import Close
from ramify.protocol.messages import (
    CloseSocket,
    Deliver,
    Detached,
    Frame,
    Opened,
    OpenRefused,
)
from ramify.protocol.stored_response import Stored
from ramify.protocol.wire import Append, Delta, Error, Generate, Open, Pong, StateReply

APPEND = '{"type":"append","id":%d,"text":"x"}'


def bearer(token: str) -> str:
    return "ramify.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


async def closed(client) -> int:
    """Read until the close; its code."""
    try:
        while True:
            await client.recv(decode=False)
    except ConnectionClosed:
        return client.close_code


async def error(gateway, client) -> Error:
    (message,) = await gateway.read(client)
    assert isinstance(message, Error)
    return message


async def test_open_frame_deliver_and_detach(serve) -> None:
    async with serve() as gateway:
        session = gateway.session(7)
        async with gateway.connect() as client:
            await client.send(
                '[{"type":"open","client":"c","token":"secret"},{"type":"append","id":1,"text":"hi"}]'
            )
            opening = await gateway.next_open()
            assert opening.open == Open(client="c")  # the token stays here
            assert opening.ops == [Append(id=1, text="hi")]
            gateway.state(opening.socket, 7)
            (state,) = await gateway.read(client)
            assert isinstance(state, StateReply)
            assert client.subprotocol is None
            await client.send('{"type":"generate","id":2}')
            (frame,) = await session.drain()
            assert (frame.socket, frame.ops) == (opening.socket, [Generate(id=2)])
            deltas = [Delta(branch="a", position=1, text="x"), Delta(branch="b", position=1, text="y")]
            gateway.mailbox.tell(Deliver(opening.socket, deltas))
            gateway.mailbox.tell(Deliver(opening.socket, deltas[:1]))
            assert await gateway.read(client) == deltas
            assert json.loads(await client.recv())["type"] == "delta"
            assert gateway.metrics.open == gateway.actor.sockets == 1
        assert await session.drain() == [Detached(opening.socket)]
        assert gateway.metrics.open == gateway.actor.sockets == 0


@pytest.mark.parametrize("name", ["json", "msgpack"])
async def test_subprotocol_is_echoed_and_used(serve, name) -> None:
    codec = Codec(name)
    offered = (bearer("k"), "nonsense", f"ramify.v1+{name}")
    async with serve(tokens=("k",)) as gateway, gateway.connect(*offered) as client:
        assert client.subprotocol == f"ramify.v1+{name}"
        data = codec.encode([Open(client="c")])
        await client.send(data, text=not codec.binary)
        opening = await gateway.next_open()
        gateway.mailbox.tell(OpenRefused(opening.socket, Error(code="no_session", message="m")))
        reply = await client.recv()
        assert isinstance(reply, bytes) == codec.binary
        assert codec.decode_server(reply) == [Error(code="no_session", message="m")]


async def test_unknown_subprotocols_only(serve) -> None:
    async with serve() as gateway:
        with pytest.raises(InvalidStatus) as refused:
            await gateway.connect("graphql-ws")
        assert refused.value.response.status_code == 400
        assert b"ramify.v1+json, ramify.v1+msgpack" in refused.value.response.body


async def test_not_ready_is_503_with_retry_after(serve) -> None:
    async with serve() as gateway:
        gateway.status.ready, gateway.status.phase = False, "loading 40%"
        reply = await gateway.get("/v1/ws", Upgrade="websocket", Connection="Upgrade")
        assert reply[0] == 503
        assert reply[1]["retry-after"] == "1"
        assert b"loading 40%" in reply[2]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Sec-WebSocket-Version": "12"}, 400),
    ],
)
async def test_refused_handshakes(serve, headers, status) -> None:
    async with serve() as gateway:
        fields = {
            "Host": gateway.address,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version": "13",
        } | headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        assert (await gateway.http(f"GET /v1/ws HTTP/1.1\r\n{lines}\r\n"))[0] == status


async def test_wrong_bearer_is_401_and_good_ones_pass(serve) -> None:
    async with serve(tokens=("k",)) as gateway:
        for options in (
            {"additional_headers": {"Authorization": "Bearer no"}},
            {"subprotocols": [bearer("no")]},
        ):
            with pytest.raises(InvalidStatus) as refused:
                await gateway.connect(*options.pop("subprotocols", ()), **options)
            assert refused.value.response.status_code == 401
        async with gateway.connect(additional_headers={"Authorization": "Bearer k"}) as client:
            await gateway_attach(gateway, client)


async def gateway_attach(gateway, client) -> int:
    gateway.session()
    return await gateway.attach(client)


async def test_open_token_and_minted_token(serve) -> None:
    async with serve(tokens=("k",)) as gateway:
        status, _, body = await gateway.get("/v1/tokens", "POST", Authorization="Bearer k")
        assert status == 201
        minted = json.loads(body)["token"]
        for token, good in (("no", False), (minted, True), (minted, False), ("k", True)):
            async with gateway.connect() as client:
                await client.send(json.dumps({"type": "open", "client": "c", "token": token}))
                if good:
                    await gateway.next_open()
                else:
                    assert (await error(gateway, client)).code == "unauthorized"
                    assert await closed(client) == 4401


async def test_small_frames_only_before_auth(serve) -> None:
    async with serve(tokens=("k",)) as gateway:
        async with gateway.connect() as client:
            await client.send('{"type":"open","client":"c","key":"' + "x" * 9000 + '"}')
            assert await closed(client) == 1009
        # After the first message the limit is the normal one, even within one read.
        async with gateway.connect() as client:
            gateway.session()
            transport = client.transport
            client.protocol.send_text(b'{"type":"open","client":"c","token":"k"}')
            client.protocol.send_text(b'{"type":"append","id":1,"text":"' + b"x" * 20_000 + b'"}')
            transport.write(b"".join(client.protocol.data_to_send()))
            opening = await gateway.next_open()
            gateway.state(opening.socket)
            assert isinstance((await gateway.read(client))[0], StateReply)
        async with gateway.connect(additional_headers={"Authorization": "Bearer k"}) as client:
            await client.send(
                '{"type":"open","client":"c","tools":[{"name":"f","description":"' + "x" * 9000 + '"}]}'
            )
            assert (await gateway.next_open()).open.client == "c"


async def test_frames_before_the_answer_wait_in_order(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            await client.send('{"type":"open","client":"c"}')
            opening = await gateway.next_open()
            for ident in range(40):
                await client.send(APPEND % ident)
            await client.send('{"type":"ping","n":5}')  # behind the point where reading stops
            gateway.state(opening.socket)
            seen: list[int] = []
            while len(seen) < 40:
                seen += [frame.ops[0].id for frame in await session.drain()]
            assert seen == list(range(40))
            assert isinstance((await gateway.read(client))[0], StateReply)
            assert await gateway.read(client) == [Pong(n=5, load={"queue": 3.0, "kv": 0.5})]


async def test_failed_open_may_open_anew(serve) -> None:
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client:
            await client.send('{"type":"open","client":"c","session":"s_x"}')
            await client.send(APPEND % 3)
            opening = await gateway.next_open()
            gateway.mailbox.tell(OpenRefused(opening.socket, Error(code="no_session", message="gone")))
            assert (await error(gateway, client)).code == "no_session"
            stray = await error(gateway, client)
            assert (stray.code, stray.id) == ("bad_request", 3)
            assert await gateway.attach(client) == opening.socket


async def test_open_twice_and_no_open_first(serve) -> None:
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client:
            await client.send(APPEND % 1)
            refused = await error(gateway, client)
            assert (refused.code, refused.id) == ("bad_request", 1)
            await gateway.attach(client)
            await client.send('{"type":"open","client":"c"}')
            assert (await error(gateway, client)).code == "bad_request"
            await client.send('{"type":"ping","n":1}')
            assert isinstance((await gateway.read(client))[0], Pong)


async def test_invalid_frame_names_path_and_answers_every_op(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            await gateway.attach(client)
            await client.send(
                '[{"type":"append","id":4,"text":"a"},{"type":"generate","id":5,"max_tokens":0}]'
            )
            fault, skipped = await gateway.read(client)
            assert (fault.code, fault.id, fault.details) == (
                "bad_request",
                5,
                {"path": "$[1].max_tokens"},
            )
            assert "$[1].max_tokens" in fault.message
            assert (skipped.code, skipped.id) == ("skipped", 4)
            assert not session.drain_nowait()


async def test_third_unparseable_frame_closes(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            for _ in range(3):
                await client.send("{nonsense")
                assert (await error(gateway, client)).code == "bad_request"
            assert await closed(client) == 4400
        assert await session.drain() == [Detached(socket)]


@pytest.mark.parametrize(
    ("payload", "text", "code"),
    [
        (b"{}", False, 1003),
        (b'{"type":"append","id":1,"text":"\xff"}', True, 1007),
        (b"x" * 5000, True, 1009),
    ],
)
async def test_frames_that_end_the_connection(serve, payload, text, code) -> None:
    async with serve(limits=Limits(frame_bytes=4000)) as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            await client.send(payload, text=text)
            assert await closed(client) == code
        assert await session.drain() == [Detached(socket)]


async def test_ten_thousand_ops_are_refused_whole_and_repetition_closes(serve) -> None:
    ops = "[" + ",".join(f'{{"type":"tree","id":{i}}}' for i in range(10_000)) + "]"
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            await gateway.attach(client)
            await client.send(ops)
            (frame,) = await session.drain()  # it refuses them: it knows which ones it has seen
            assert frame.limit.code == "limit"
            assert [op.id for op in frame.ops] == list(range(512))
            assert frame.limit.details == {"max": 512, "ops": 10_000}
            for _ in range(11):
                await client.send(ops)
            assert await closed(client) == 4429
        *refused, gone = await session.drain()
        assert all(message.limit is not None for message in refused)
        assert type(gone) is Detached


async def test_rate_limit_recovers(serve) -> None:
    limits = Limits(ops_per_second=10, ops_burst=20)
    async with serve(limits=limits) as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            frame = "[" + ",".join([APPEND % 1] * 15) + "]"
            await client.send(frame)
            assert len((await session.drain())[0].ops) == 15
            await client.send(frame)
            (refused,) = await session.drain()
            assert (refused.limit.code, refused.limit.retry_ms) == ("limit", 1101)
            gateway.clock.advance(2)
            await client.send(frame)
            assert [(message.socket, message.limit) for message in await session.drain()] == [
                (socket, None)
            ]


async def test_a_full_session_is_waited_for_and_a_full_directory_is_overloaded(serve) -> None:
    async with serve() as gateway:
        session = gateway.session(capacity=1)
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            await client.send(APPEND % 1)
            await client.send('[{"type":"append","id":2,"text":"x"},{"type":"generate","id":3}]')
            await client.send('{"type":"ping","n":1}')
            while not gateway.actor.hub.blocked:
                await asyncio.sleep(0)
            assert [op.id for frame in await session.drain() for op in frame.ops] == [1]
            gateway.clock.advance(1)
            assert [op.id for frame in await session.drain() for op in frame.ops] == [2, 3]
            assert await gateway.read(client) == [Pong(n=1, load={"queue": 3.0, "kv": 0.5})]
            await client.send(APPEND % 4)
            while not len(session):
                await asyncio.sleep(0)
        # Detached did not fit; it is told as soon as there is room.
        await gateway.until_gone()
        assert len(session.drain_nowait()) == 1
        gateway.clock.advance(1)
        assert await session.drain() == [Detached(socket)]
        gateway.directory.capacity = 0
        async with gateway.connect() as client:
            await client.send('[{"type":"open","client":"c"},{"type":"generate","id":3}]')
            assert [(r.code, r.id) for r in await gateway.read(client)] == [
                ("overloaded", None),
                ("overloaded", 3),
            ]


async def test_session_gone_asks_for_a_new_open(serve) -> None:
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client:
            await gateway.attach(client)
            gateway.sessions.remove(1)
            await client.send(APPEND % 9)
            gone = await error(gateway, client)
            assert (gone.code, gone.id) == ("no_session", 9)
            gateway.session()
            await gateway.attach(client)


async def test_close_socket_after_what_was_delivered(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            gateway.mailbox.tell(Deliver(socket, [Delta(branch="main", position=1, text="x")]))
            gateway.mailbox.tell(CloseSocket(socket, 4409, "replaced"))
            gateway.mailbox.tell(CloseSocket(socket, 1000, "again"))
            assert isinstance((await gateway.read(client))[0], Delta)
            assert await closed(client) == 4409
            assert client.close_reason == "replaced"
        assert await session.drain() == [Detached(socket)]
        gateway.mailbox.tell(Deliver(socket, [Delta(branch="main", position=1, text="x")]))  # dropped


async def test_opened_after_the_socket_went_is_detached_at_once(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            await client.send('{"type":"open","client":"c"}')
            opening = await gateway.next_open()
        gateway.mailbox.tell(Opened(opening.socket, 1))
        assert await session.drain() == [Detached(opening.socket)]


async def test_no_open_in_time(serve) -> None:
    async with serve() as gateway, gateway.connect() as client:
        gateway.clock.advance(5.1)
        assert await closed(client) == 4408


@pytest.mark.parametrize("lost", ["directory", "session"])
async def test_an_open_that_nobody_answers(serve, lost: str) -> None:
    """Its client is told to come again, over WebSocket and over HTTP, and holds no session."""
    async with serve(ping_interval_s=100, ping_timeout_s=200) as gateway:
        session = gateway.session()
        async with gateway.connect() as client, gateway.connect() as answered:
            await gateway.attach(answered)
            await client.send('{"type":"open","client":"c"}')
            sockets = [(await gateway.next_open()).socket]
            path = f"/v1/responses/{Stored('s_1', 'key', 'r1', 0).ident}"
            request = asyncio.create_task(gateway.get(path))
            sockets.append((await gateway.next_open()).socket)
            if lost == "session":
                for socket in sockets:
                    gateway.mailbox.tell(Opened(socket, 1))
            gateway.clock.advance(ANSWER_S - 1)
            await asyncio.sleep(0.01)
            gateway.clock.advance(0.5)
            await asyncio.sleep(0.01)
            assert client.close_code is None
            assert not request.done()
            gateway.clock.advance(1)
            assert await closed(client) == Close.RESTART
            status, headers, body = await request
            assert (status, headers["retry-after"]) == (503, "1")
            assert b"no session has answered within 60 s" in body
            if lost == "directory":  # only late
                for socket in sockets:
                    gateway.mailbox.tell(Opened(socket, 1))
            told = []
            while len(told) < 2:
                told += await session.drain()
            assert sorted(each.socket for each in told if isinstance(each, Detached)) == sockets
            await answered.send(APPEND % 1)  # who was answered has no such limit
            assert [type(each) for each in await session.drain()] == [Frame]


async def test_heartbeat(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            for _ in range(10):  # pongs keep it alive
                gateway.clock.advance(20.1)
                await client.send(APPEND % 1)
                await session.drain()
            client.transport.pause_reading()  # no more pongs
            for _ in range(4):
                gateway.clock.advance(20.1)
                await asyncio.sleep(0)
            assert await session.drain() == [Detached(socket)]
            client.transport.resume_reading()
            assert await closed(client) == 4408


async def test_half_close_and_reset_detach(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        for reset in (False, True):
            async with gateway.connect() as client:
                socket = await gateway.attach(client)
                if reset:
                    raw = client.transport.get_extra_info("socket")
                    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    client.transport.abort()
                else:
                    client.transport.write_eof()
                assert await session.drain() == [Detached(socket)]


async def test_fragmented_and_ping_in_between(serve) -> None:
    async with serve() as gateway:
        session: Mailbox = gateway.session()
        async with gateway.connect() as client:
            await gateway.attach(client)

            async def parts():
                yield '{"type":"append",'
                await client.ping()
                yield '"id":1,"text":"é"}'

            await client.send(parts())
            (frame,) = await session.drain()
            assert frame.ops == [Append(id=1, text="é")]


async def test_deflate_only_if_configured(serve) -> None:
    for deflate in (False, True):
        async with serve(deflate=deflate) as gateway:
            gateway.session()
            async with gateway.connect(compression="deflate") as client:
                assert bool(client.protocol.extensions) == deflate
                socket = await gateway.attach(client)
                delta = Delta(branch="main", position=1, text="x" * 70_000)
                gateway.mailbox.tell(Deliver(socket, [delta]))
                assert await gateway.read(client) == [delta]


async def test_a_bug_closes_only_its_socket(serve) -> None:
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client, gateway.connect() as other:
            socket = await gateway.attach(client)
            await gateway.attach(other)
            gateway.mailbox.tell(Deliver(socket, [object()]))  # type: ignore[list-item]
            assert await closed(client) == 1011
            await other.send('{"type":"ping"}')
            assert isinstance((await gateway.read(other))[0], Pong)


async def test_drain_says_bye_once_then_closes(serve) -> None:
    async with serve() as gateway:
        session = gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            task = asyncio.create_task(gateway.actor.drain(10))
            (bye,) = await gateway.read(client)
            assert (bye.reason, bye.after_ms) == ("the server is stopping", 10_000)
            gateway.mailbox.tell(Deliver(socket, [bye]))
            gateway.mailbox.tell(Deliver(socket, [Delta(branch="main", position=1, text="x")]))
            assert isinstance((await gateway.read(client))[0], Delta)
            with pytest.raises(OSError, match=r".*"):
                await gateway.connect()
            gateway.clock.advance(10.1)
            assert await closed(client) == 1001
            while not task.done():
                gateway.clock.advance(0.1)
                await asyncio.sleep(0)
        assert await session.drain() == [Detached(socket)]


async def test_a_failed_engine_closes_with_1012_what_its_sessions_do_not(serve) -> None:
    """At once where there is no session; after the session's last words; and after the grace time."""
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client, gateway.connect() as silent, gateway.connect() as other:
            socket = await gateway.attach(client)
            await gateway.attach(silent)
            task = asyncio.create_task(gateway.actor.drain(1, "the engine failed", failed=True))
            assert (await gateway.read(client))[0].reason == "the engine failed"
            assert await closed(other) == 1012
            end = Error(code="internal", message="the engine failed", id=1)
            gateway.mailbox.tell(Deliver(socket, [end]))
            gateway.mailbox.tell(CloseSocket(socket, 1012, "the engine failed"))
            assert (await gateway.read(client))[0].id == 1
            assert await closed(client) == 1012
            assert not task.done()
            gateway.clock.advance(1.1)
            assert (await gateway.read(silent))[0].reason == "the engine failed"
            assert await closed(silent) == 1012
            await gateway.until_gone()
            gateway.clock.advance(0.1)
            await task
