"""The HTTP routes on a real port, and what a hostile or broken client can do to it."""

import asyncio
import json
import os
import socket as sockets
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from ramify.actors.gateway.actor import GatewayActor
from ramify.actors.gateway.port.http import HEAD_BYTES, RequestParser, Response
from ramify.actors.gateway.port.routes import SharedReadings
from ramify.actors.gateway.port.static import StaticFiles
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol.config import Limits, ServerConfig
from ramify.protocol.errors import ConfigError


async def test_probes_and_readiness(serve) -> None:
    async with serve() as gateway:
        gateway.status.ready, gateway.status.phase = False, "loading 40%"
        assert (await gateway.get("/healthz"))[0] == 200
        status, headers, body = await gateway.get("/readyz")
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body) == {"ready": False, "phase": "loading 40%"}
        gateway.status.ready = True
        assert (await gateway.get("/readyz?verbose=1", Host="10.1.2.3:80"))[0] == 200


async def test_who_asks_for_metrics_together_shares_one_reading_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ramify.actors.gateway.port.routes._SCRAPE_S", 0.01)
    readings: list[Any] = []
    shared = SharedReadings(SimpleNamespace(scrape=readings.append))  # type: ignore[arg-type]
    got: list[Any] = []
    for number in range(6):
        shared.ask(partial(lambda number, text: got.append((number, text)), number))
    assert len(readings) == 1, "it is read for the first one, who does not wait"
    with anyio.fail_after(5):
        while len(readings) < 2:
            await asyncio.sleep(0.01)
    readings[1](b"later")  # however the answers come
    readings[0](b"first")
    assert got == [*((number, b"later") for number in range(1, 6)), (0, b"first")]
    await asyncio.sleep(0.05)
    assert len(readings) == 2, "for nobody nothing is read"
    shared.ask(got.append)
    assert len(readings) == 3


async def test_metrics_info_and_unknown_paths(serve) -> None:
    async with serve() as gateway:
        status, headers, body = await gateway.get("/metrics")
        assert (status, body) == (200, b"ramify_sockets 0\n")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        status, headers, body = await gateway.get("/v1/info")
        assert (status, json.loads(body)) == (200, {"model": "stub"})
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        status, _, body = await gateway.get("/nope")
        assert status == 404
        assert json.loads(body)["type"] == "error"
        assert (await gateway.get("/v1/ws"))[0] == 426
        status, headers, body = await gateway.get("/v1/info", "HEAD")
        assert (status, headers["content-length"], body) == (200, "16", b"")
        status, headers, _ = await gateway.get("/v1/info", "DELETE")
        assert (status, headers["allow"]) == (405, "get, head")
        assert (await gateway.get("/v1/tokens"))[0] == 405
        assert (await gateway.get("/v1/tokens", "POST"))[0] == 404  # no tokens, none to mint


async def test_tokens_guard_info_and_minting(serve) -> None:
    async with serve(tokens=("k1", "k2")) as gateway:
        for path, method in (("/v1/info", "GET"), ("/v1/tokens", "POST")):
            for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic azE6"}):
                status, headers, _ = await gateway.get(path, method, **header)
                assert (status, headers["www-authenticate"]) == (401, "bearer")
        assert (await gateway.get("/v1/info", Authorization="bearer k2"))[0] == 200
        _, _, body = await gateway.get("/v1/tokens", "POST", Authorization="Bearer k1")
        minted = json.loads(body)["token"]
        # A minted token opens a socket; it does not mint others.
        assert (await gateway.get("/v1/tokens", "POST", Authorization=f"Bearer {minted}"))[0] == 401
        assert (await gateway.get("/metrics"))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
    ],
)
async def test_host_and_origin(serve, headers, status) -> None:
    async with serve() as gateway:
        assert (await gateway.get("/v1/info", **headers))[0] == status


async def test_static_files(serve, tmp_path) -> None:
    (tmp_path / "index.html").write_text("<p>hi</p>")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "app.js").write_text("1")
    (tmp_path / "secret.py").write_text("no")
    async with serve(static=StaticFiles({"/": tmp_path})) as gateway:
        status, headers, body = await gateway.get("/")
        assert (status, body) == (200, b"<p>hi</p>")
        assert headers["content-type"] == "text/html; charset=utf-8"
        status, again, body = await gateway.get("/", If_None_Match=headers["etag"])
        assert (status, body, again["etag"]) == (304, b"", headers["etag"])
        status, headers, _ = await gateway.get("/lib/app.js")
        assert (status, headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        for path in (
            "/secret.py",
            "/../conftest.py",
            "/lib/../secret.py",
            "/%2e%2e/x",
            "/lib",
            "//etc/passwd",
        ):
            assert (await gateway.get(path))[0] == 404


@pytest.mark.parametrize(
    ("request_bytes", "status", "stays"),
    [
        (b"garbage\r\n\r\n", 400, False),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, False),  # TLS on the plain port
        (b"GET / HTTP/1.1\r\n\r\n", 400, False),  # no Host
        (b"POST /v1/tokens HTTP/2.0\r\nHost: %s\r\n\r\n", 505, False),
        (b"PRI * HTTP/2.0\r\n\r\n", 505, False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (2 * HEAD_BYTES), 431, False),
        (
            b"POST /v1/tokens HTTP/1.1\r\nHost: %s\r\nContent-Length: 99\r\n\r\n",
            404,
            False,
        ),  # no body is read
        (b"GET / HTTP/1.1\r\nHost: %s\r\n" + b"X:\r\n" * 200 + b"\r\n", 431, False),
        (
            b"GET http://%s/x HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            404,
            True,
        ),  # the target's host counts
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: %s\r\n\r\n", 403, True),
        (b"GET / HTTP/1.1\r\nHost: localhost:" + b"9" * 5000 + b"\r\n\r\n", 403, True),
        (b"GET / HTTP/1.1\r\nHost: %s\r\nOrigin: http://a:" + b"9" * 5000 + b"\r\n\r\n", 403, True),
        (b"OPTIONS * HTTP/1.1\r\nHost: %s\r\n\r\n", 405, True),
        (b"GET /v1/ws HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\n\r\n", 426, False),
        (b"GET /x HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\n\r\n", 404, False),
        (b"PUT /v1/ws HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\n\r\n", 405, True),
    ],
)
async def test_bad_requests_get_an_answer(serve, request_bytes, status, stays) -> None:
    async with serve() as gateway:
        request = request_bytes.replace(b"%s", gateway.address.encode())
        got, headers, body = await gateway.http(request)
        assert got == status
        assert headers.get("connection") == (None if stays else "close")
        assert json.loads(body)["type"] == "error"


async def test_slow_headers_get_408_and_the_connection_ends(serve) -> None:
    async with serve() as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET / HTTP/1.1\r\nHo")
        while not gateway.actor.hub.connections:
            await asyncio.sleep(0)
        gateway.clock.advance(10.1)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        # The peer does not close its half: after the deadline we do.
        gateway.clock.advance(5.1)
        await gateway.until_gone()
        writer.close()


async def test_garbage_after_the_upgrade_and_resets_leak_nothing(serve) -> None:
    handshake = (
        "GET /v1/ws HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    async with serve() as gateway:
        await gateway.get("/healthz")
        await gateway.until_gone()
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        head = handshake.format(gateway.address).encode()
        for tail in (
            b"\xff" * 64,
            b"\x81\x05hello",
            b"\x81",
            b"\x81\xfe\x00",
            b"\x83\x80\0\0\0\0",
            b"\x01\x80\0\0\0\0" * 3,
        ):
            for reset in (False, True):
                raw = sockets.create_connection(("127.0.0.1", gateway.port))
                raw.sendall(head + tail)
                if reset:
                    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                raw.close()
        for _ in range(1000):
            await asyncio.sleep(0)
        while gateway.actor.hub.connections:
            gateway.clock.advance(5.1)
            await asyncio.sleep(0)
        assert gateway.metrics.open == 0
        assert len(gateway.actor.hub.timers) == 0
        assert len(asyncio.all_tasks()) == tasks
        assert len(os.listdir("/proc/self/fd")) == files


async def test_port_in_use_is_a_config_error_that_names_it(serve) -> None:
    async with serve() as gateway:
        config = ServerConfig(port=gateway.port)
        actor = GatewayActor(
            Mailbox("g", 1),
            config,
            Limits(),
            Mailbox("d", 1),
            Router("s"),
            gateway.status,
            gateway.metrics,
            gateway.clock,
        )
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{gateway.port}.*--port"):
            await actor.run()


def test_parser_takes_any_split() -> None:
    data = b"POST /v1/tokens?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    for size in (1, 2, 7, len(data)):
        parser = RequestParser(lambda _: 3)
        found = [parser.feed(data[i : i + size]) for i in range(0, len(data), size)]
        assert [request is None for request in found] == [True] * (len(found) - 1) + [False]
        assert (found[-1].path, found[-1].body) == ("/v1/tokens", b"abc")
        assert parser.plain
    parser = RequestParser(lambda _: 9)
    parser.feed(data.replace(b"\r\n\r\nabc", b"\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"))
    assert not parser.plain  # each chunk is work
    head, rest = b"GET /v1/ws HTTP/1.1\r\nHost: a\r\nUpgrade: WebSocket\r\n\r\n", b"\x81\x80"
    for size in (1, 11, len(head) + 2):
        parser = RequestParser(lambda _: 3)
        stream = head + rest
        for i in range(0, len(stream), size):
            request = parser.feed(stream[i : i + size])
            if request is not None:
                assert request.websocket
                assert parser.handshake() in ((head, b""), (head, rest[: max(0, i + size - len(head))]))
                break
        else:
            pytest.fail("no request")


def test_nothing_has_no_type() -> None:
    head = Response(204, content_type="text/plain").render(keeps=True)
    assert head.startswith(b"HTTP/1.1 204 No Content\r\n")
    assert b"\r\nContent-Type" not in head
    assert b"\r\nContent-Length" not in head
