"""A session's connection, on sockets and a clock that a test makes: what is tried again, and when."""

import asyncio
import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import Close
from websockets.http11 import Response

import ramify.clients.session_link as link_module
from ramify.clients.errors import ConnectionLost, Internal, SessionLost
from ramify.clients.session import ClientCore
from ramify.clients.session_link import Connection, SessionLink
from ramify.protocol.codec import Codec
from ramify.protocol.errors import BadRequest, Forbidden, Overloaded, RamifyError, Unauthorized
from ramify.protocol.wire import (
    Append,
    BranchState,
    Delta,
    Error,
    Event,
    Ok,
    Open,
    ServerMessage,
    StateReply,
)

JSON = Codec("json")


def state(session: str = "s", **limits: int) -> StateReply:
    branches = [BranchState(branch="main", position=0)]
    return StateReply(session=session, op=0, revision=1, branches=branches, limits=limits or None)


class Socket:
    """Gives these frames, and then ends with a close code, breaks (None), or stays silent ("open")."""

    def __init__(self, *frames: ServerMessage | bytes, end: int | str | None = None) -> None:
        self.subprotocol = "ramify.v1+json"
        self.sent: list[tuple[Any, bool]] = []
        self.closed = False
        self.transport = self
        self.aborted = False
        self.codec = JSON
        self._frames = list(frames)
        self._end = end

    async def recv(self, decode: bool) -> bytes:
        assert decode is False
        await asyncio.sleep(0)
        if self._frames:
            frame = self._frames.pop(0)
            return frame if isinstance(frame, bytes) else bytes(self.codec.encode([frame]))
        if self._end == "open":
            await asyncio.Event().wait()
        closed = Close(self._end, "why") if isinstance(self._end, int) else None
        raise ConnectionClosedError(closed, None)

    async def send(self, data: bytes, text: bool) -> None:
        self.sent.append((self.codec.decode_client(data), text))

    async def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Network:
    """What dialling comes to, in order; a clock that sleeping moves; all waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results: list[Socket | Exception] = []
        self.dialled: list[dict[str, Any]] = []
        self.waits: list[float] = []
        self.now = 1000.0
        sleep = asyncio.sleep

        async def waited(seconds: float) -> None:
            if seconds:
                self.waits.append(round(seconds, 6))
            self.now += seconds
            await sleep(0)

        async def dial(url: str, **settings: Any) -> Socket:
            self.dialled.append({"url": url, **settings})
            result = self.results.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(asyncio, "sleep", waited)
        monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(link_module, "websocket", dial)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with monkeypatch.context() as patch:
        yield Network(patch)


def linked(network: Network, *results: Socket | Exception, **settings: Any) -> SessionLink:
    network.results[:] = results
    given: dict[str, Any] = {
        "codec": "json",
        "token": None,
        "reconnect": True,
        "give_up_s": 60.0,
        "open_timeout_s": 5.0,
        "jitter": lambda: 1.0,
    }
    return SessionLink("ws://h:1", ClientCore(Open(client="c")), **(given | settings))


async def over(link: SessionLink) -> RamifyError:
    """Until the session is over: why."""
    while link.core.error is None:
        await link.changed(link)
    await link.stop()
    return link.core.error


async def test_waits_double_until_there_is_no_way_back(network: Network) -> None:
    link = linked(network, Socket(state()), *[OSError("refused")] * 20, give_up_s=20.0)
    await link.start()
    error = await over(link)
    assert network.waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert isinstance(error, ConnectionLost)
    assert error.message == (
        "no way back to the server in 20 s: cannot connect to ws://h:1/v1/ws: refused"
    )


async def test_waits_begin_again_once_the_session_was_attached(network: Network) -> None:
    lost = OSError("refused")
    link = linked(network, Socket(state()), lost, lost, Socket(state()), lost, Socket(state(), end=4409))
    await link.start()
    await over(link)
    assert network.waits == [0.1, 0.2, 0.4, 0.1, 0.2]
    assert link.reconnects == 2


async def test_a_connection_that_was_never_attached_does_not_reset_the_waits(network: Network) -> None:
    link = linked(network, Socket(state()), Socket(), Socket(), Socket(state(), end=1000))
    await link.start()
    await over(link)
    assert network.waits == [0.1, 0.2, 0.4]


async def test_a_server_that_asks_for_fewer_requests_is_left_alone_for_five_seconds(
    network: Network,
) -> None:
    link = linked(network, Socket(state(), end=4429), Socket(state(), end=4409), jitter=lambda: 0.5)
    await link.start()
    await over(link)
    assert network.waits == [5.05]


async def test_a_refusal_says_when_to_try_again(network: Network) -> None:
    full = Error(code="overloaded", message="full", retry_ms=2500)
    link = linked(network, Socket(state()), Socket(full), Socket(Error(code="forbidden", message="no")))
    await link.start()
    assert isinstance(await over(link), Forbidden)
    assert network.waits == [0.1, 2.7]


async def test_the_first_connection_is_tried_once(network: Network) -> None:
    full = Error(code="overloaded", message="full", retry_ms=2500)
    with pytest.raises(Overloaded):
        await linked(network, Socket(full)).start()
    with pytest.raises(ConnectionLost, match="cannot connect to ws://h:1/v1/ws: refused"):
        await linked(network, OSError("refused")).start()
    assert network.waits == []


@pytest.mark.parametrize(
    "raised",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"),
        OSError(f"Multiple exceptions: [Errno {errno.ECONNREFUSED}] Connect call failed ('::1', 1)"),
    ],
)
async def test_a_port_where_nothing_listens_is_said_in_words(network: Network, raised: OSError) -> None:
    with pytest.raises(ConnectionLost, match="ws://h:1/v1/ws: nothing listens there") as caught:
        await linked(network, raised).start()
    assert "Errno" not in str(caught.value)


async def test_without_reconnect_a_loss_is_the_end(network: Network) -> None:
    link = linked(network, Socket(state()), reconnect=False)
    await link.start()
    error = await over(link)
    assert error.message == "the connection broke"
    assert len(network.dialled) == 1


async def test_a_fresh_token_is_fetched_for_each_connection(network: Network) -> None:
    tokens = iter(["a", "b", "c"])
    spent = Error(code="unauthorized", message="spent")
    sockets = [Socket(state(), end=4401), Socket(spent), Socket(state(), end=1000)]
    link = linked(network, *sockets, token=lambda: next(tokens))
    await link.start()
    await over(link)
    headers = [dial["additional_headers"] for dial in network.dialled]
    assert headers == [{"Authorization": f"Bearer {token}"} for token in "abc"]


@pytest.mark.parametrize(
    "end", [Socket(state(), end=4401), Socket(Error(code="unauthorized", message="spent"))]
)
async def test_a_token_that_is_always_the_same_is_not_tried_again(network: Network, end: Socket) -> None:
    link = linked(network, Socket(state()), end, token="t")
    await link.start()
    assert isinstance(await over(link), Unauthorized)
    assert network.waits == [0.1]


async def test_a_connection_without_a_token_has_no_header(network: Network) -> None:
    link = linked(network, Socket(state(), end=1000))
    await link.start()
    await link.stop()
    assert network.dialled == [
        {
            "url": "ws://h:1/v1/ws",
            "subprotocols": ["ramify.v1+json"],
            "compression": None,
            "additional_headers": {},
            "open_timeout": 5.0,
            "close_timeout": 2,
            "max_size": link_module.MOST_BYTES,
            "proxy": None,
        }
    ]


def answer(status: int, body: bytes = b"") -> InvalidStatus:
    return InvalidStatus(Response(status, "", Headers(), body))


@pytest.mark.parametrize(
    ("raised", "kind", "text", "again"),
    [
        (answer(400, b"why"), BadRequest, "ws://h:1/v1/ws answered HTTP 400: why", False),
        (answer(401), Unauthorized, "ws://h:1/v1/ws answered HTTP 401", False),
        (answer(403), Forbidden, "ws://h:1/v1/ws answered HTTP 403", False),
        (answer(404), ConnectionLost, "ws://h:1/v1/ws answered HTTP 404", False),
        (answer(499), ConnectionLost, "ws://h:1/v1/ws answered HTTP 499", False),
        (answer(500), ConnectionLost, "ws://h:1/v1/ws answered HTTP 500", True),
        (
            answer(503, b"x" * 600),
            ConnectionLost,
            f"ws://h:1/v1/ws answered HTTP 503: {'x' * 500}",
            True,
        ),
        (InvalidURI("u", "bad"), BadRequest, "not a WebSocket address", False),
        (InvalidHandshake("odd"), ConnectionLost, "cannot connect to ws://h:1/v1/ws: odd", False),
        (TimeoutError(), ConnectionLost, "cannot connect to ws://h:1/v1/ws: TimeoutError", True),
    ],
)
async def test_what_a_failed_dial_means(
    network: Network, raised: Exception, kind: type[RamifyError], text: str, again: bool
) -> None:
    link = linked(network, Socket(state()), raised, Socket(state(), end=4409))
    await link.start()
    error = await over(link)
    assert len(network.dialled) == (3 if again else 2)
    if not again:
        assert type(error) is kind
        assert text in error.message
    else:
        with pytest.raises(kind) as caught:
            await linked(network, raised).start()
        assert text == caught.value.message


async def test_a_server_that_speaks_something_else(network: Network) -> None:
    socket = Socket(state())
    socket.subprotocol = "other"
    with pytest.raises(Internal, match=r"ws://h:1/v1/ws does not speak ramify.v1\+json"):
        await linked(network, socket).start()
    assert socket.closed


async def test_a_frame_that_does_not_decode_is_the_servers_fault(network: Network) -> None:
    socket = Socket(state(), b"{")
    link = linked(network, socket)
    await link.start()
    assert "does not decode" in (await over(link)).message
    assert socket.closed


async def test_a_server_that_does_not_answer_open(network: Network) -> None:
    with pytest.raises(ConnectionLost, match="the connection broke") as caught:
        await linked(network, Socket(end="open"), open_timeout_s=0.01).start()
    assert "no answer to `open` in 0.01 s" in caught.value.message


async def test_once_attached_silence_is_no_fault(network: Network) -> None:
    link = linked(network, Socket(state(), end="open"), open_timeout_s=0.01)
    await link.start()
    clock = asyncio.get_running_loop()
    later = clock.time() + 0.03
    while clock.time() < later:
        await asyncio.sleep(0)
    assert link.attached
    await link.stop()
    assert not link.attached


@pytest.mark.parametrize(("codec", "text"), [("json", True), ("msgpack", False)])
async def test_frames_are_text_or_bytes_as_the_codec_is(
    network: Network, codec: Any, text: bool
) -> None:
    socket = Socket(state(), end="open")
    socket.codec = Codec(codec)
    socket.subprotocol = "ramify.v1+json" if text else "ramify.v1+msgpack"
    link = linked(network, socket, codec=codec)
    await link.start()
    (ticket,) = link.submit([Append(id=0, text="x")])
    while len(socket.sent) < 2:
        await asyncio.sleep(0)
    assert [sent[1] for sent in socket.sent] == [text, text]
    assert [type(sent[0][0]) for sent in socket.sent] == [Open, Append]
    assert ticket.id == 1
    link.abort()
    assert socket.aborted
    await link.stop()


async def test_no_frame_is_sent_faster_than_the_server_allows(network: Network) -> None:
    socket = Socket(state(ops_per_second=10, ops_burst=3), end="open")
    link = linked(network, socket)
    await link.start()
    for _ in range(3):
        link.submit([Append(id=0, text="x"), Append(id=0, text="y")])
    while len(socket.sent) < 4:
        await asyncio.sleep(0)
    assert network.waits == [0.1, 0.2]
    await link.stop()


async def test_without_a_burst_the_rate_is_the_burst(network: Network) -> None:
    socket = Socket(state(ops_per_second=2), end="open")
    link = linked(network, socket)
    await link.start()
    for _ in range(3):
        link.submit([Append(id=0, text="x")])
    while len(socket.sent) < 4:
        await asyncio.sleep(0)
    assert network.waits == [0.5]
    await link.stop()


async def test_a_watcher_is_told_of_each_change_once(network: Network) -> None:
    seen: list[Connection] = []
    refused = OSError("refused")
    sockets = [Socket(state()), refused, refused, Socket(state()), Socket(state("other"))]
    link = linked(network, *sockets, watch=seen.append)
    await link.start()
    error = await over(link)
    assert isinstance(error, SessionLost)
    assert [(now.up, now.over) for now in seen] == [
        (False, False),
        (True, False),
        (False, False),
        (False, True),
    ]
    assert seen[-1].error is error
    assert seen[1].error is None


async def test_a_watcher_hears_nothing_of_a_session_that_never_was(network: Network) -> None:
    seen: list[Connection] = []
    with pytest.raises(ConnectionLost):
        await linked(network, OSError("refused"), watch=seen.append).start()
    assert seen == []


async def test_notes_are_kept_for_their_reader(network: Network) -> None:
    event = Event(revision=2, op="append", branch="main", details={"position": 4})
    theirs = Delta(branch="main", position=9, text="theirs")
    link = linked(network, Socket(state(), event, theirs, end="open"))
    await link.start()
    while len(link.notes) < 2:
        await link.changed(link.notes_key)
    assert list(link.notes) == [event, theirs]
    await link.stop()


async def test_who_stops_waiting_leaves_nothing_behind(network: Network) -> None:
    link = linked(network, Socket(state(), Ok(id=1, branch="main", position=1), end="open"))
    waiting = [asyncio.ensure_future(link.changed("key")) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    link._notify("key")
    await waiting[1]
    lone = asyncio.ensure_future(link.changed("key"))
    await asyncio.sleep(0)
    lone.cancel()
    await asyncio.gather(lone, return_exceptions=True)
    assert link._waiters == {}


async def test_a_refusal_that_names_no_time_adds_nothing_to_the_wait(network: Network) -> None:
    full = Error(code="overloaded", message="full")
    link = linked(network, Socket(state()), Socket(full), Socket(state(), end=4409))
    await link.start()
    await over(link)
    assert network.waits == [0.1, 0.2]


async def test_what_ends_a_session_ends_it_though_the_server_leaves_the_socket_open(
    network: Network,
) -> None:
    refusing = Socket(Error(code="forbidden", message="no"), end="open")
    with pytest.raises(Forbidden):
        await linked(network, refusing).start()
    assert refusing.closed
    restarted = Socket(state("other"), end="open")
    link = linked(network, Socket(state()), restarted)
    await link.start()
    assert isinstance(await over(link), SessionLost)
    assert restarted.closed
