"""Who may connect: tokens, minted tokens, Host and Origin; and the HTTP pages beside the socket."""

import asyncio
import base64
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

SECRET = "correct horse / battery ä"
GUARDED = {"tokens": (SECRET, "second")}
BEARER = {"Authorization": f"Bearer {SECRET}".encode().decode("latin-1")}


def subprotocol(token: str) -> str:
    return "ramify.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


async def status_of(served: Any, **options: Any) -> int:
    """The HTTP status of a handshake that is refused."""
    with pytest.raises(websockets.InvalidStatus) as refusal:
        async with served.connect(**options):
            pass
    status: int = refusal.value.response.status_code
    return status


async def test_a_token_opens_in_three_ways(serving: Any) -> None:
    async with serving(server=GUARDED) as served:
        async with served.connect(additional_headers={"Authorization": "bearer second"}) as peer:
            await peer.open()
        async with served.connect(subprotocols=[subprotocol(SECRET)]) as peer:
            assert peer.ws.subprotocol is None  # never echoed
            await peer.open()
        offered = ["ramify.v1+msgpack", subprotocol("second")]
        async with served.connect("msgpack", subprotocols=offered) as peer:
            assert peer.ws.subprotocol == "ramify.v1+msgpack"
            await peer.open()
        async with served.connect() as peer:
            state = await peer.open(token=SECRET)
            assert SECRET not in str(state)
            assert (await peer.say(1, "hello", max_tokens=3))["reason"] == "length"


async def test_no_token_and_wrong_tokens(serving: Any) -> None:
    async with serving(server=GUARDED) as served:
        assert await status_of(served, additional_headers={"Authorization": "Bearer wrong"}) == 401
        assert await status_of(served, additional_headers={"Authorization": "Basic second"}) == 401
        assert await status_of(served, subprotocols=[subprotocol("wrong")]) == 401
        assert await status_of(served, subprotocols=["ramify.bearer.%%%"]) == 401
        for first in (
            {"type": "open", "client": "peer"},
            {"type": "open", "client": "peer", "token": "wrong"},
            {"type": "append", "id": 1, "text": "x"},
        ):
            async with served.connect() as peer:
                await peer.send(first)
                assert (await peer.next("error"))["code"] == "unauthorized"
                assert await peer.closed() == 4401
        async with served.connect() as peer:  # strangers may not send much
            await peer.send({"type": "open", "client": "peer", "token": "x" * 9000})
            assert await peer.closed() == 1009
        assert served.engine.metrics.live_sessions == 0


@pytest.mark.parametrize("gateways", [0, 2])
async def test_minted_tokens_work_once(serving: Any, gateways: int) -> None:
    async with serving(server=GUARDED, gateways=gateways) as served:
        status, refusal = await served.request("POST", "/v1/tokens")
        assert (status, refusal["code"]) == (401, "unauthorized")
        bearer = {"Authorization": "Bearer second"}
        tokens = []
        for _ in range(3):
            status, minted = await served.request("POST", "/v1/tokens", bearer)
            assert (status, minted["expires_s"]) == (201, 60.0)
            tokens.append(minted["token"])
        assert len(set(tokens)) == 3
        async with served.connect() as peer:
            await peer.open(token=tokens[0])
        async with served.connect() as peer:
            await peer.send({"type": "open", "client": "peer", "token": tokens[0]})
            assert await peer.closed() == 4401
        async with served.connect(subprotocols=[subprotocol(tokens[1])]) as peer:
            await peer.open()
        assert await status_of(served, subprotocols=[subprotocol(tokens[1])]) == 401
        minted_bearer = {"Authorization": f"Bearer {tokens[2]}"}  # which does not mint
        assert (await served.request("POST", "/v1/tokens", minted_bearer))[0] == 401
        async with served.connect(additional_headers=minted_bearer) as peer:
            await peer.open()


async def test_host_and_origin(serving: Any) -> None:
    settings = {"allowed_hosts": ("models.example",), "allowed_origins": ("https://chat.example",)}
    async with serving(server=settings) as served:
        port = served.engine.port
        assert await status_of(served, origin="https://evil.example") == 403
        assert await status_of(served, origin="null") == 403
        for origin in ("https://chat.example", f"http://127.0.0.1:{port}"):
            async with served.connect(origin=origin) as peer:
                await peer.open()
        for host, status in (
            ("models.example", 200),
            (f"localhost:{port}", 200),
            ("evil.example", 403),
            (f"127.0.0.1:{port + 1}", 403),
        ):
            assert (await served.request("GET", "/v1/info", host=host))[0] == status, host


async def test_pages_of_an_allowed_site_may_use_the_apis(serving: Any) -> None:
    ours, theirs = "https://chat.example", "https://evil.example"
    async with serving(server={"allowed_origins": (ours,), "tokens": ("secret",)}) as served:
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        }
        url = f"http://127.0.0.1:{served.engine.port}"
        async with httpx.AsyncClient(base_url=url) as client:
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/info", "/v1/nothing"):
                told = await client.options(path, headers={"Origin": ours, **asks})
                assert (told.status_code, told.content) == (200, b""), path
                assert told.headers["access-control-allow-origin"] == ours
                assert told.headers["access-control-allow-headers"] == "authorization, content-type"
                assert "POST" in told.headers["access-control-allow-methods"]
                assert "access-control-allow-private-network" not in told.headers
                refused = await client.options(path, headers={"Origin": theirs, **asks})
                assert refused.status_code == 403
                assert "access-control-allow-origin" not in refused.headers
                assert "--allowed-origin" in refused.text
            near = {"Access-Control-Request-Private-Network": "true"}
            told = await client.options("/v1/models", headers={"Origin": ours, **asks, **near})
            assert told.headers["access-control-allow-private-network"] == "true"
            # without what makes it a preflight it is a method like any other
            assert (await client.options("/v1/info", headers={"Origin": ours})).status_code == 405
            unread = await client.get("/v1/models", headers={"Origin": ours})  # a page may read why
            assert (unread.status_code, unread.headers["access-control-allow-origin"]) == (401, ours)
            bearer_and_origin = {"Origin": ours, "Authorization": "Bearer secret"}
            for stream in (False, True):
                body = {
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 2,
                    "stream": stream,
                }
                answer = await client.post("/v1/chat/completions", headers=bearer_and_origin, json=body)
                assert answer.status_code == 200
                assert answer.headers["access-control-allow-origin"] == ours
                assert answer.headers["vary"] == "Origin"
            plain = await client.get("/v1/models", headers={"Authorization": "Bearer secret"})
            assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize("gateways", [0, 2])
async def test_the_pages_beside_the_socket(serving: Any, gateways: int) -> None:
    async with serving(gateways=gateways) as served:
        assert await served.request("GET", "/healthz") == (200, {"ok": True})
        assert (await served.request("GET", "/readyz"))[1]["ready"] is True
        status, info = await served.request("GET", "/v1/info")
        assert (status, info["ready"]) == (200, True)
        assert info["protocol"] == ["ramify.v1+json", "ramify.v1+msgpack"]
        assert info["limits"]["frame_bytes"] == 1 << 20
        async with served.connect() as peer:
            await peer.open()
            await peer.say(1, "count me", max_tokens=7)
            status, text = await served.request("GET", "/metrics")
            metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            assert float(metrics["ramify_sockets"]) == float(metrics["ramify_sessions"]) == 1
            assert float(metrics["ramify_output_tokens_total"]) == 7
            assert float(metrics['ramify_requests_total{reason="length"}']) == 1
        for method, path, expected in (
            ("GET", "/nothing", 404),
            ("GET", "/../../etc/passwd", 404),
            ("DELETE", "/healthz", 405),
            ("GET", "/v1/ws", 426),
            ("POST", "/v1/tokens", 404),  # no tokens, nothing to mint
        ):
            assert (await served.request(method, path))[0] == expected, path


def bearer(token: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {token}"}}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    path.chmod(0o600)
    return path


ALICE, BOB = {"name": "alice", "token": "a"}, {"name": "bob", "token": "b"}


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_session_belongs_to_a_name(serving: Any, tmp_path: Path, gateways: int) -> None:
    """Its key opens it for its owner only; others see no more than that there is no such session."""
    new = {"name": "alice", "token": "new"}  # the same name: a token that takes the other's place
    settings = {"credentials_file": write(tmp_path / "tokens", ALICE, BOB, new)}
    async with serving(server=settings, gateways=gateways) as served:
        async with served.connect(**bearer("a")) as alice:
            state = await alice.open()
            login = {"session": state["session"], "key": state["key"]}
            viewing = {"session": state["session"], "key": state["view_key"]}
            refusals = []
            async with served.connect(**bearer("b")) as bob:
                for key in (state["key"], "k_wrong", None):
                    await bob.send({"type": "open", "client": "bob", **login, "key": key})
                    refusals.append(await bob.next("error"))
                await bob.send({"type": "open", "client": "bob", "session": "s_none", "key": "k"})
                refusals.append(await bob.next("error"))
                told = {
                    (r["code"], r["message"].replace(r["message"].split("'")[1], "")) for r in refusals
                }
                assert len(told) == 1
                assert refusals[0]["code"] == "no_session"
                assert (await bob.open(client="bob", **viewing))["resumed"]  # given away on purpose
        status, minted = await served.request("POST", "/v1/tokens", {"Authorization": "Bearer a"})
        assert status == 201
        for token in ("new", minted["token"]):
            async with served.connect() as again:
                assert (await again.open(token=token, **login))["resumed"]


@pytest.mark.parametrize("gateways", [0, 2])
@pytest.mark.parametrize("shared", [False, True])
async def test_names_share_what_is_cached_only_by_choice(
    serving: Any, tmp_path: Path, shared: bool, gateways: int
) -> None:
    team = [{"name": name, "token": name, "namespace": "team"} for name in ("carol", "dave")]
    path = write(tmp_path / "tokens", ALICE, BOB, *team)
    settings = {"credentials_file": path, "shared_cache": shared}
    async with serving(server=settings, gateways=gateways) as served:
        cached = {}
        for name, token in (
            ("alice", "a"),
            ("again", "a"),
            ("bob", "b"),
            ("carol", "carol"),
            ("dave", "dave"),
        ):
            async with served.connect(**bearer(token)) as peer:
                await peer.open()
                cached[name] = (await peer.say(1, "a prompt", max_tokens=3))["usage"]["cached"] > 0
    assert cached == {"alice": False, "again": True, "bob": shared, "carol": False, "dave": True}


@pytest.mark.parametrize("gateways", [0, 2])
async def test_tokens_are_read_again(
    serving: Any, tmp_path: Path, gateways: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket whose token is gone closes with 4401; a file that is wrong changes nothing."""
    path = write(tmp_path / "tokens", ALICE, BOB)
    async with serving(server={"credentials_file": path}, gateways=gateways) as served:
        async with served.connect(**bearer("a")) as alice, served.connect(**bearer("b")) as bob:
            await alice.open()
            await bob.open()
            for text in ("{", "", json.dumps({"name": "x"})):
                path.write_text(text)
                served.engine.reload()
            assert [r.getMessage() for r in caplog.records].count("the old tokens stay") == 3
            assert (await alice.say(1, "still here", max_tokens=2))["reason"] == "length"
            write(path, ALICE, {"name": "carol", "token": "c"})
            served.engine.reload()
            assert await bob.closed() == 4401
            assert (await alice.say(3, "still here", max_tokens=2))["reason"] == "length"
        assert await status_of(served, **bearer("b")) == 401
        for _ in range(4):  # in whichever process
            async with served.connect(**bearer("c")) as carol:
                await carol.open()


@pytest.mark.parametrize("gateways", [0, 2])
async def test_sockets_of_a_name_are_counted_in_all_processes(
    serving: Any, tmp_path: Path, gateways: int
) -> None:
    path = write(tmp_path / "tokens", {**ALICE, "limits": {"sockets": 3}}, BOB)
    settings = {"credentials_file": path, "metrics_auth": True}
    async with serving(server=settings, gateways=gateways) as served:

        async def counted() -> float:
            status, text = await served.request("GET", "/metrics", {"Authorization": "Bearer b"})
            assert status == 200
            found = re.search(r'ramify_owner_sockets{owner="alice"} (\S+)', text)
            return float(found[1]) if found else 0.0

        async with AsyncExitStack() as stack:
            for count in range(1, 4):
                await stack.enter_async_context(served.connect(**bearer("a")))
                async with asyncio.timeout(60):
                    while await counted() < count:
                        await asyncio.sleep(0.01)
            refused = 0
            async with asyncio.timeout(60):  # until each process has been told
                while gateways and refused < 10:
                    try:
                        async with served.connect(**bearer("a")):
                            refused = 0
                    except websockets.InvalidStatus:
                        refused += 1
                    await asyncio.sleep(0.02)
            assert await status_of(served, **bearer("a")) == 429
            async with served.connect() as late:
                await late.send({"type": "open", "client": "late", "token": "a"})
                assert (await late.next("error"))["code"] == "limit"
                assert await late.closed() == 4429
            async with served.connect(**bearer("b")) as bob:
                await bob.open()
        for headers in ({}, {"Authorization": "Bearer no"}):
            assert (await served.request("GET", "/metrics", headers))[0] == 401
        assert (await served.request("GET", "/readyz"))[0] == 200
