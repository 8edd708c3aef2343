"""A gateway on a free port between stub actors: the directory and the sessions are mailboxes."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
from websockets.asyncio.client import ClientConnection, connect

from ramify.actors.credentials import read_credentials
from ramify.actors.gateway.actor import GatewayActor
from ramify.actors.gateway.port.static import StaticFiles
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.kit.report import StoreHealth
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits, ServerConfig
from ramify.protocol.messages import (
    Deliver,
    DirectoryMessage,
    GatewayMessage,
    Opened,
    OpenSession,
    SessionMessage,
)
from ramify.protocol.wire import ServerMessage, StateReply
from tests.manual_clock import ManualClock

JSON = Codec("json")


async def response(
    reader: asyncio.StreamReader, *, head_only: bool = False
) -> tuple[int, dict[str, str], bytes]:
    """The next response on a connection: status, headers, body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().rstrip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = b"" if head_only else await reader.readexactly(int(headers.get("content-length", 0)))
    return int(first.split()[1]), headers, body


class StubStatus:
    """An engine that is ready unless a test says otherwise."""

    model = "stub"

    def __init__(self) -> None:
        self.ready = True
        self.phase = "ready"
        self.fault: str | None = None
        self.store = StoreHealth()

    def info(self) -> dict[str, Any]:
        return {"model": "stub"}

    def load(self) -> dict[str, float]:
        return {"queue": 3.0, "kv": 0.5}


class StubMetrics:
    def __init__(self) -> None:
        self.open = 0

    def sockets(self, delta: int, /) -> None:
        self.open += delta

    def scrape(self, done: Callable[[bytes], object], /) -> None:
        done(b"ramify_sockets %d\n" % self.open)


class Harness:
    """A running gateway and both sides of it."""

    def __init__(self, config: ServerConfig, limits: Limits, static: StaticFiles | None) -> None:
        self.clock = ManualClock()
        self.status = StubStatus()
        self.metrics = StubMetrics()
        self.mailbox: Mailbox[GatewayMessage] = Mailbox("gateway", 100_000)
        self.directory: Mailbox[DirectoryMessage] = Mailbox("directory", 1000)
        self.sessions: Router[SessionMessage] = Router("sessions")
        self.actor = GatewayActor(
            self.mailbox,
            config,
            limits,
            self.directory,
            self.sessions,
            self.status,
            self.metrics,
            clock=self.clock,
            static=static or StaticFiles({}),
            credentials=read_credentials(config),
        )
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self, *subprotocols: str, **options: Any) -> connect:
        """A client that never pings by itself and takes long messages."""
        return connect(
            f"ws://{self.address}/v1/ws",
            subprotocols=list(subprotocols) or None,  # type: ignore[arg-type]
            compression=options.pop("compression", None),
            ping_interval=None,
            max_size=None,
            close_timeout=2,
            **options,
        )

    def session(self, number: int = 1, capacity: int = 10_000) -> Mailbox[SessionMessage]:
        mailbox: Mailbox[SessionMessage] = Mailbox(f"session {number}", capacity)
        self.sessions.add(number, mailbox)
        return mailbox

    async def next_open(self) -> OpenSession:
        (message,) = await self.directory.drain()
        assert isinstance(message, OpenSession)
        return message

    def state(self, socket: int, session: int = 1) -> None:
        """What the directory and the session say to a good `open`."""
        self.mailbox.tell(Opened(socket, session))
        state = StateReply(session=f"s_{session}", op=0, revision=0, branches=[])
        self.mailbox.tell(Deliver(socket, [state]))

    async def attach(self, client: ClientConnection, session: int = 1) -> int:
        """Open a session on a client; its socket number."""
        await client.send('{"type":"open","client":"c"}')
        socket = (await self.next_open()).socket
        self.state(socket, session)
        assert isinstance((await self.read(client))[0], StateReply)
        return socket

    async def read(self, client: ClientConnection) -> list[ServerMessage]:
        return JSON.decode_server(await client.recv(decode=False))

    async def until_gone(self) -> None:
        """Until no connection of any kind is left."""
        while self.actor.hub.connections:
            await anyio.lowlevel.checkpoint()

    async def http(self, request: str | bytes) -> tuple[int, dict[str, str], bytes]:
        """One raw HTTP request on a connection of its own; status, headers and body of the response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request.encode() if isinstance(request, str) else request)
        head_only = request[:4] in ("HEAD", b"HEAD")
        answer = await response(reader, head_only=head_only)
        if answer[1].get("connection") == "close":
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        return answer

    async def get(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        named = {"Host": self.address} | {k.replace("_", "-"): v for k, v in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return await self.http(f"{method} {path} HTTP/1.1\r\n{lines}\r\n")


@pytest.fixture
def remains() -> Iterator[Callable[..., list[Any]]]:
    """`remains(Kind, ...)`: what there is of these kinds and came since, while the collector rests.

    What it has frozen it does not look at for long (`kit/collector.py`).
    """
    gc.collect()
    gc.disable()
    before = [
        it for it in gc.get_objects() if str(type(it).__module__).startswith("ramify.actors.gateway")
    ]
    yield lambda *kinds: [
        it for it in gc.get_objects() if type(it) in kinds and not any(it is each for each in before)
    ]
    gc.enable()


Serve = Callable[..., AbstractAsyncContextManager[Harness]]


@pytest.fixture
def serve() -> Serve:
    """`async with serve(limits=..., tokens=(...)) as gateway:`"""

    @asynccontextmanager
    async def running(
        *, limits: Limits | None = None, static: StaticFiles | None = None, **config: Any
    ) -> AsyncIterator[Harness]:
        harness = Harness(ServerConfig(port=0, **config), limits or Limits(), static)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                harness.port = await tasks.start(harness.actor.run)
                yield harness
                tasks.cancel_scope.cancel()

    return running
