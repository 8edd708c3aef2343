"""The port where replicas join: strangers get nothing, replicas get a link, with TLS or without."""

import asyncio
import gc
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import ref

import msgspec
import pytest

from ramify.actors.cluster.joining import BACK_OFF_SECONDS, join
from ramify.actors.links import tcp
from ramify.actors.links.handshake import FROM_FRONT, GREETING, Stranger
from ramify.actors.links.link import Link
from ramify.protocol.errors import ConfigError

SECRET = b"sixteen bytes or more"
CODECS = msgspec.msgpack.Decoder(list[int]), msgspec.msgpack.Encoder()


class Side:
    """One end of a link."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = asyncio.Event()
        self.link: Link[Any, Any] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "on_message": self.heard.append,
            "on_end": lambda error: self.ended.set(),
            "max_frame": 1 << 20,
        }


@asynccontextmanager
async def a_port(context: Any = None) -> AsyncIterator[tuple[int, list[Side]]]:
    """Its number, and the front's ends of the links; each says [1, 2, 3] at once."""
    sides: list[Side] = []

    def joined(open_link: Any, host: str) -> None:
        assert host == "127.0.0.1"
        side = Side()
        side.link = open_link("replica", *CODECS, **side.fields)
        side.link.tell([1, 2, 3])
        sides.append(side)

    port = tcp.JoinPort(SECRET, joined)
    number = await port.listen("127.0.0.1", 0, context)
    try:
        yield number, sides
    finally:
        port.close()
        for side in sides:
            assert side.link is not None
            side.link.abort()
            await side.link.wait_closed()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def exchange(number: int, sides: list[Side], context: Any = None) -> None:
    """Messages go both ways, however large."""
    side = Side()
    side.link = await (await tcp.knock("127.0.0.1", number, SECRET, context))(*CODECS, **side.fields)
    big = list(range(100_000))
    side.link.tell(big)
    await until(lambda: sides and sides[-1].heard and side.heard)
    assert (side.heard, sides[-1].heard) == ([[1, 2, 3]], [big])
    side.link.close()
    await sides[-1].ended.wait()
    await side.ended.wait()


async def test_a_replica_gets_a_link() -> None:
    async with a_port() as (number, sides):
        await exchange(number, sides)
        await exchange(number, sides)


async def test_a_machine_that_vanishes_is_noticed_by_the_kernel() -> None:
    async with a_port() as (number, sides):
        side = Side()
        side.link = await (await tcp.knock("127.0.0.1", number, SECRET))(*CODECS, **side.fields)
        await until(lambda: sides)
        for link in (side.link, sides[0].link):
            assert link is not None
            assert link._transport is not None
            sock = link._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
        side.link.close()
        await side.ended.wait()


async def test_a_replica_joins_past_a_crowd_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take each other's places, not its own."""
    monkeypatch.setattr(tcp, "STRANGERS", 3)
    async with a_port() as (number, sides):
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(8)]
        await exchange(number, sides)
        async with asyncio.timeout(tcp.PATIENCE_SECONDS / 2):
            early = (reader.read() for reader, _ in silent[:-3])
            await asyncio.gather(*early, return_exceptions=True)
        for _, writer in silent:
            writer.close()
            with suppress(ConnectionResetError):
                await writer.wait_closed()


async def test_a_stranger_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a link, no answer, and no more time and places than others need."""
    monkeypatch.setattr(tcp, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(tcp, "STRANGERS", 3)
    async with a_port() as (number, sides):
        with pytest.raises((Stranger, OSError)):
            await tcp.knock("127.0.0.1", number, b"another secret, long", None)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20_000, bytes(64)):
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            assert (await reader.readexactly(FROM_FRONT)).startswith(GREETING)
            writer.write(said)
            async with asyncio.timeout(60):
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(8)]
        heard = await asyncio.gather(*(r.read() for r, _ in silent), return_exceptions=True)
        assert all(isinstance(h, OSError) or len(h) <= FROM_FRONT for h in heard)
        for _, writer in silent:
            writer.close()
        assert sides == []
        await exchange(number, sides)


async def test_a_replica_that_is_sent_away_does_not_come_back_at_once() -> None:
    """One with another model, perhaps: its front would do nothing else."""
    times: list[float] = []

    def joined(open_link: Any, host: str) -> None:
        times.append(asyncio.get_running_loop().time())
        open_link("replica", *CODECS, **Side().fields).abort()

    port = tcp.JoinPort(SECRET, joined)
    number = await port.listen("127.0.0.1", 0, None)
    try:
        async with asyncio.timeout(60):
            replica = asyncio.create_task(join("127.0.0.1", number, SECRET, signals=False))
            await until(lambda: len(times) == 3)
            replica.cancel()
            await asyncio.gather(replica, return_exceptions=True)
    finally:
        port.close()
    assert times[1] - times[0] > 0.9 * BACK_OFF_SECONDS
    assert times[2] - times[1] > 1.8 * BACK_OFF_SECONDS


async def test_a_replica_notices_a_front_that_is_none() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(32))
        await reader.readexactly(64)
        writer.write(bytes(32))
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    async with server:
        number = server.sockets[0].getsockname()[1]
        with pytest.raises(Stranger, match="front"):
            await tcp.knock("127.0.0.1", number, SECRET)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Two, that nobody has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    made = []
    for name in ("one", "two"):
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", cert],
            check=True,
            capture_output=True,
        )  # fmt: skip
        made.append((cert, key))
    return made


async def test_with_tls(certificates: list[tuple[Path, Path]]) -> None:
    (cert, key), (other, _) = certificates
    async with a_port(tcp.server_context(cert, key)) as (number, sides):
        await exchange(number, sides, tcp.client_context(cert.read_text()))
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await tcp.knock("127.0.0.1", number, SECRET, tcp.client_context(other.read_text()))
        with pytest.raises((OSError, Stranger, TimeoutError)):  # in the clear
            await tcp.knock("127.0.0.1", number, SECRET)


async def test_strangers_in_a_tls_handshake_are_bounded_in_number(
    certificates: list[tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who never says a word of TLS takes no place from a replica, and soon loses its own."""
    monkeypatch.setattr(tcp, "STRANGERS", 3)
    cert, key = certificates[0]
    async with a_port(tcp.server_context(cert, key)) as (number, sides):
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(8)]
        async with asyncio.timeout(tcp.PATIENCE_SECONDS / 2):
            heard = await asyncio.gather(*(r.read() for r, _ in silent[:-3]), return_exceptions=True)
        assert all(isinstance(each, OSError) or each == b"" for each in heard)
        await exchange(number, sides, tcp.client_context(cert.read_text()))
        for _, writer in silent:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"abc\n")
    with pytest.raises(ConfigError, match="3 bytes"):
        tcp.read_secret(short)
    with pytest.raises(ConfigError, match="cannot be read"):
        tcp.read_secret(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        tcp.read_secret(Path("/dev/zero"))
    short.write_bytes(SECRET + b"\n")
    assert tcp.read_secret(short) == SECRET
    with pytest.raises(ConfigError, match="replica-tls-cert"):
        tcp.server_context(short, short)
    with pytest.raises(ConfigError, match="tls-ca"):
        tcp.client_context("no certificate")


async def test_a_stranger_that_goes_leaves_nothing_to_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone: list[ref[tcp.Knocking]] = []
    connected = tcp.JoinPort._connected

    def noted(port: tcp.JoinPort, who: tcp.Knocking) -> None:
        gone.append(ref(who))
        connected(port, who)

    monkeypatch.setattr(tcp.JoinPort, "_connected", noted)
    gc.collect()
    gc.disable()
    try:
        async with a_port() as (number, _):
            _, writer = await asyncio.open_connection("127.0.0.1", number)
            writer.write(b"GET / HTTP/1.1\r\n")
            writer.close()
            await until(lambda: gone and gone[0]() is None)
    finally:
        gc.enable()
