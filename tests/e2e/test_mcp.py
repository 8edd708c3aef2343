"""/v1/mcp/NAME: MCP servers that this server calls: scripted ones, and one of the package `mcp`."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.actors.gateway.apis import mcp
from ramify.clients.agent import Agent, mcp_tools
from ramify.clients.agent.calls import Runner
from ramify.clients.agent.tools import Context, ToolCall
from ramify.clients.agent.transcript import Did

SCENES = Path(__file__).parent / "page"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PACKAGES = Path(__file__).resolve().parents[2] / "clients/web/page/node_modules"
INSTALLED = shutil.which("node") is not None and PACKAGES.is_dir()
MODEL = Path(str(files("ramify.gpu") / "default_model"))
BUNDLED: dict[str, Any] = {
    "real": True,
    "model": {"path": MODEL, "device": "cpu", "dtype": "float32", "threads": 1},
}
Writes = Callable[[asyncio.StreamWriter], Awaitable[object]]
BODY = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"


class Script:
    """An HTTP server that notes what comes and writes what the test says."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.left = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.heads.append(head)
        self.bodies.append(await reader.readexactly(length))
        try:
            await self.writes(writer)
            await writer.drain()
            await reader.read()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.left += 1
            writer.close()


@asynccontextmanager
async def scripted(answer: bytes | Writes) -> AsyncIterator[Script]:
    async def writes(writer: asyncio.StreamWriter) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)

    script = Script(writes if isinstance(answer, bytes) else answer)
    async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
        script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp?x=1"
        yield script


def whole(body: bytes, more: bytes = b"") -> bytes:
    return JSON + b"Content-Length: %d\r\n%b\r\n%b" % (len(body), more, body)


@asynccontextmanager
async def asking(
    serving: Any, url: str, gateways: int = 0, **server: Any
) -> AsyncIterator[httpx.AsyncClient]:
    fields = {"mcp": (f"shop={url}",), **server}
    async with serving(server=fields, gateways=gateways, alone=False) as served:
        async with httpx.AsyncClient(base_url=served.http, timeout=30) as client:
            yield client


@pytest.mark.parametrize("gateways", [0, 2])
async def test_what_is_sent_arrives_and_the_answer_comes_back(
    serving: Any, monkeypatch: pytest.MonkeyPatch, gateways: int
) -> None:
    monkeypatch.setenv("RAMIFY_MCP_SHOP_TOKEN", "theirs")
    answer = whole(b'{"jsonrpc":"2.0","id":1,"result":{}}', b"Mcp-Session-Id: s1\r\nSet-Cookie: a=b\r\n")
    async with (
        scripted(answer) as script,
        asking(serving, script.url, gateways, tokens=("ours",)) as client,
    ):
        told = {"Authorization": "Bearer ours"}
        assert (await client.get("/v1/info", headers=told)).json()["mcp"] == ["shop"]
        assert (await client.post("/v1/mcp/shop", content=BODY)).status_code == 401
        assert not script.heads
        sent = {"Mcp-Session-Id": "s1", "MCP-Protocol-Version": "2025-06-18", "Cookie": "c=d", **told}
        found = await client.post("/v1/mcp/shop", content=BODY, headers=sent)
        assert found.status_code == 200
        assert found.json() == {"jsonrpc": "2.0", "id": 1, "result": {}}
        assert found.headers["mcp-session-id"] == "s1"
        assert found.headers["content-type"] == "application/json"
        assert "set-cookie" not in found.headers
        await client.delete("/v1/mcp/shop", headers=sent)
    assert script.bodies == [BODY, b""]
    head = script.heads[0].lower()
    assert head.startswith(b"post /mcp?x=1 http/1.1\r\n")
    assert b"\r\nauthorization: bearer theirs\r\n" in head
    assert b"\r\nmcp-session-id: s1\r\n" in head
    assert b"\r\nmcp-protocol-version: 2025-06-18\r\n" in head
    assert b"cookie" not in head
    assert b"ours" not in head
    assert script.heads[1].startswith(b"DELETE ")


@pytest.mark.parametrize(
    ("answer", "status", "word"),
    [
        (whole(b"x" * (mcp.MOST_BYTES + 1)), 502, "more than"),
        (JSON + b"\r\n" + b"x" * (mcp.MOST_BYTES + 9), 502, "more than"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", 502, "answered 401"),
        (b"HTTP/1.1 302 No\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n", 502, "answered 302"),
        (b"SSH-2.0-x\r\n\r\n", 502, "RemoteProtocolError"),
        (JSON + b"Content-Length: 9\r\n\r\nabc", 504, "did not answer"),
        (b"", 504, "did not answer"),
    ],
)
async def test_bad_answers_are_said_in_words(
    serving: Any, monkeypatch: pytest.MonkeyPatch, answer: bytes, status: int, word: str
) -> None:
    monkeypatch.setattr(mcp, "MOST_S", 30.0 if status == 502 else 0.2)
    async with scripted(answer) as script, asking(serving, script.url) as client:
        found = await client.post("/v1/mcp/shop", content=BODY)
        assert (found.status_code, word in found.json()["message"]) == (status, True), found.text
        assert "127.0.0.1" not in found.text


async def test_small_chunks_leave_the_loop_free(serving: Any) -> None:
    chunks = b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n"
    answer = JSON + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    async with scripted(answer) as script, asking(serving, script.url) as client:
        asked = asyncio.create_task(client.post("/v1/mcp/shop", content=BODY))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await asked).content == b"x" * 50_000
        assert turns > len(chunks) // mcp._PIECE


async def test_what_is_not_served_is_refused_by_its_head(serving: Any) -> None:
    async with scripted(b"") as script, asking(serving, script.url) as client:
        unknown = await client.post("/v1/mcp/other", content=BODY)
        assert (unknown.status_code, "--mcp" in unknown.json()["message"]) == (404, True)
        stream = await client.get("/v1/mcp/shop")
        assert (stream.status_code, stream.headers["allow"]) == (405, "POST, DELETE")
        foreign = await client.post("/v1/mcp/shop", content=BODY, headers={"Origin": "http://evil"})
        assert foreign.status_code == 403
        assert not script.heads
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        async with asking(serving, url) as client:
            gone = await client.post("/v1/mcp/shop", content=BODY)
            assert (gone.status_code, "cannot be asked" in gone.json()["message"]) == (502, True)


async def test_calls_are_bounded_and_end_with_their_client(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MOST_OF_ONE", 2)
    async with scripted(b"") as script, asking(serving, script.url) as client:
        waiting = [asyncio.create_task(client.post("/v1/mcp/shop", content=BODY)) for _ in range(2)]
        while len(script.heads) < 2:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/mcp/shop", content=BODY)).status_code == 503
        for each in waiting:
            each.cancel()
        async with asyncio.timeout(30):
            while script.left < 2:
                await asyncio.sleep(0.01)
        script.writes = lambda writer: asyncio.sleep(0, writer.write(whole(b"{}")))
        assert (await client.post("/v1/mcp/shop", content=BODY)).status_code == 200


@asynccontextmanager
async def calculating() -> AsyncIterator[str]:
    """The URL of a server of the package `mcp` with one tool."""
    server = pytest.importorskip("mcp.server", reason="needs the package mcp")
    import uvicorn

    shop = server.MCPServer("shop")

    @shop.tool()
    def calculator(expression: str) -> str:
        """Work out a sum"""
        left, sign, right = expression.split()
        return str(int(left) + int(right) * (1 if sign == "+" else -1))

    settings = uvicorn.Config(shop.streamable_http_app(), port=0, log_level="error", lifespan="on")
    running = uvicorn.Server(settings)
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        running.should_exit = True
        await task


async def test_tools_of_a_real_server_through_this_one(serving: Any) -> None:
    async with calculating() as shop:
        async with serving(server={"mcp": (f"shop={shop}",)}, alone=False) as served:
            async with mcp_tools(f"{served.http}/v1/mcp/shop") as tools:
                runner = Runner(Agent(tools).tools, timeout_s=30, approve=None, parallel=2)
                done: dict[str, Did] = {}
                branch: Any = None
                call = ToolCall("0", "calculator", '{"expression": "31 + 47"}')
                await runner.run([Context(branch, call)], lambda event: None, done)
    assert done["0"].text == "78"


@pytest.mark.skipif(CHROMIUM is None or not INSTALLED, reason="needs chromium, node, and `npm ci`")
async def test_the_page_calls_what_a_person_allows(serving: Any) -> None:
    async with calculating() as shop:
        async with serving(**BUNDLED, server={"mcp": (f"shop={shop}",)}, alone=False) as served:
            process = await asyncio.create_subprocess_exec(
                "node", "run.mjs", served.http, str(CHROMIUM), "tools", cwd=SCENES,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                said, _ = await asyncio.wait_for(process.communicate(), 240)
            finally:
                if process.returncode is None:
                    process.kill()
    assert process.returncode == 0, said.decode()
