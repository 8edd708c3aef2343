"""Servers that end, in any way, and the next one on the same store: clients find what they had."""

import asyncio
import base64
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed

from ramify.actors.session.saver import LAZY_SECONDS
from ramify.actors.store.sqlite import SqliteStore
from ramify.protocol.errors import Close, ConfigError

SLOW = {"step_seconds": 0.002}


def login(state: dict[str, Any]) -> dict[str, Any]:
    return {"session": state["session"], "key": state["key"]}


async def refused(peer: Any, code: str, **fields: Any) -> dict[str, Any]:
    """The error that answers such an `open`."""
    await peer.send({"type": "open", "client": "peer", **fields})
    error: dict[str, Any] = await peer.next("error", "state")
    assert error.get("code") == code, error
    return error


async def test_a_generation_goes_on_after_a_restart(
    serving: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    """The first server stops in mid-stream: nobody hears an end, and the text is that of one run."""
    kept = {"store": tmp_path / "s.db", "grace_s": 0.0}
    async with AsyncExitStack() as sockets:
        async with serving(**placement, fake=SLOW, server=kept, idle_at_end=False) as served:
            oracle = served.oracle
            expected = oracle.output(oracle.turn("long"), 300)
            peer = await sockets.enter_async_context(served.connect())
            state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=300), tokens=True)
            assert state["persist"] == "lazy"
            await peer.next("delta")
            await peer.next("delta")
    assert not [m for m in peer.log if m["type"] in ("done", "error")]
    async with serving(**placement, fake=SLOW, server=kept) as served, served.connect() as again:
        again.follow(peer)
        back = await again.open(**login(state), **peer.seen, tokens=True)
        assert back["resumed"]
        assert "lost" not in back
        done = await again.terminal(2)
        assert (done["reason"], done["usage"]["output"]) == ("length", 300)
        assert again.text() == oracle.text(expected)


async def test_tools_are_in_force_after_a_restart(
    serving: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    kept = {"store": tmp_path / "s.db", "grace_s": 0.0}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}]
    async with serving(**placement, server=kept) as served, served.connect() as peer:
        state = await peer.open(peer.user(1, "hi"), tools=tools)
        assert state["tools"] == ["f"]
        await peer.terminal(1)
    async with serving(**placement, server=kept) as served:
        async with served.connect() as again:
            again.follow(peer)
            assert (await again.open(**login(state), **peer.seen))["tools"] == ["f"]
            await again.send(again.greedy(2, max_tokens=300, tool_choice="f", seed=1))
            done = await again.terminal(2)
            assert done["reason"] in ("tool", "length")
        async with served.connect() as other:
            assert (await other.open(client="other", **login(state)))["tools"] == ["f"]
        async with served.connect() as last:
            last.follow(peer)
            assert "tools" not in await last.open(**login(state), **peer.seen, tools=[])
            await last.send(last.greedy(3, max_tokens=3, tool_choice="f"))
            assert (await last.terminal(3))["code"] == "bad_request"


async def test_a_session_leaves_the_memory_and_comes_back(
    serving: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    kept = {"store": tmp_path / "s.db", "session_ttl_s": 0.0}
    async with serving(**placement, server=kept) as served:
        async with served.connect() as peer:
            state = await peer.open(peer.user(1, "hi"), peer.greedy(2, max_tokens=5))
            await peer.terminal(2)
            text, tree = peer.text(), await peer.tree(3)
        await served.quiet()
        async with served.connect() as again:
            again.follow(peer)
            await again.open(**login(state), **peer.seen)
            assert await again.tree(4) == tree
            assert again.text() == text
            await again.send({"type": "close", "id": 5})
            await again.terminal(5)
        async with served.connect() as late:
            assert "closed" in (await refused(late, "no_session", **login(state)))["message"]


async def warm_tokens(served: Any) -> float:
    """What the warm start has computed, wherever the core is."""
    _, text = await served.request("GET", "/metrics")
    found = re.findall(r"^ramify_spare_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("warm", [None, 0])
async def test_a_chat_that_returns_finds_its_prompt_computed(
    serving: Any, placement: dict[str, Any], tmp_path: Path, warm: int | None
) -> None:
    kept = {"store": tmp_path / "s.db", "warm_start": warm}
    async with serving(**placement, server=kept) as served, served.connect() as peer:
        state = await peer.open(peer.user(1, "hello " * 40), peer.greedy(2, max_tokens=5))
        await peer.terminal(2)
    async with serving(**placement, server=kept) as served:
        await served.quiet()
        if warm is None:
            async with asyncio.timeout(60):
                while await warm_tokens(served) <= 40:
                    await asyncio.sleep(0.01)
        async with served.connect() as again:
            again.follow(peer)
            await again.open(again.user(3, "more"), again.greedy(4, max_tokens=5), **login(state))
            usage = (await again.terminal(4))["usage"]
            assert (usage["cached"] > 40) == (warm is None)


async def test_a_view_key_and_a_wrong_key_after_a_restart(
    serving: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    kept = {"store": tmp_path / "s.db"}
    async with serving(**placement, server=kept) as served, served.connect() as peer:
        state = await peer.open(peer.user(1, "hi"))
        await peer.terminal(1)
    async with serving(**placement, server=kept) as served:
        async with served.connect() as viewer:
            seen = await viewer.open(session=state["session"], key=state["view_key"])
            assert "key" not in seen
        async with served.connect() as thief:
            await refused(thief, "forbidden", session=state["session"], key="k_wrong")
    async with serving(**placement, server=kept) as served:
        async with served.connect() as thief:
            await refused(thief, "forbidden", session=state["session"], key="k_wrong")
        await served.deserted()  # it was not even taken up


async def test_sync_and_none(serving: Any, placement: dict[str, Any], tmp_path: Path) -> None:
    kept = {"store": tmp_path / "s.db", "session_ttl_s": 0.0}
    async with serving(**placement, server=kept) as served:
        async with served.connect() as peer:
            state = await peer.open({"type": "set", "id": 1, "persist": "sync"}, peer.user(2, "hi"))
            await peer.terminal(2)
        async with served.connect() as other:
            gone = await other.open({"type": "set", "id": 1, "persist": "none"}, other.user(2, "hi"))
            await other.terminal(2)
        await served.quiet()
        async with served.connect() as peer:
            assert (await peer.open(**login(state)))["persist"] == "sync"
        async with served.connect() as other:
            await refused(other, "no_session", **login(gone))


async def test_requests_that_nobody_comes_back_to_are_not_saved(
    serving: Any, openai_of: Any, tmp_path: Path
) -> None:
    """Chat completions, and responses that are not to be stored, also while their socket is open."""
    path = tmp_path / "s.db"

    async def saved() -> int:
        await asyncio.sleep(LAZY_SECONDS + 0.3)
        store = SqliteStore(path, read_only=True)
        try:
            return len(list(store.kept()))
        finally:
            store.close()

    async with serving(server={"store": path}) as served, openai_of(served) as (client, model):
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "secret"}], max_tokens=3
        )
        async with client.responses.connect() as connection:
            settings = {"model": model, "input": "secret", "max_output_tokens": 3}
            await connection.response.create(**settings, store=False)
            while (await connection.recv()).type not in ("response.completed", "response.incomplete"):
                pass
            assert await saved() == 0
        await client.responses.create(**settings)
        assert await saved() == 1


async def said(connection: Any) -> Any:
    """The response that a lane says next."""
    async for event in connection:
        assert event.type not in ("error", "response.failed"), event
        if event.type in ("response.completed", "response.incomplete"):
            return event.response
    raise AssertionError("the socket was closed")


async def test_a_stored_response_behind_one_that_is_not(
    serving: Any, placement: dict[str, Any], openai_of: Any, tmp_path: Path
) -> None:
    """It is saved, and with it what it continues; another one that is not stored is not, at any time."""
    path = tmp_path / "s.db"

    def texts() -> bytes:
        store = SqliteStore(path, read_only=True)
        try:
            items = [store.read(each.session) for each in store.kept()]
        finally:
            store.close()
        return b"".join(b"".join(each.values()) for each in items)

    kept: dict[str, Any] = {**placement, "server": {"store": path}}
    async with serving(**kept) as served, openai_of(served) as (client, model):
        settings = {"model": model, "max_output_tokens": 3, "temperature": 0}
        async with client.responses.connect() as connection:
            await connection.response.create(**settings, input="first", store=False)
            first = await said(connection)
            await connection.response.create(**settings, input="second", previous_response_id=first.id)
            second = await said(connection)
            behind = {"previous_response_id": second.id, "store": False}
            await connection.response.create(**settings, input="secret", **behind)
            third = await said(connection)
            last = {"previous_response_id": third.id, "store": False}
            await connection.response.create(**settings, input="secret", **last)
            await said(connection)
            await asyncio.sleep(LAZY_SECONDS + 0.3)
            assert b"second" in await asyncio.to_thread(texts)
            assert b"secret" not in await asyncio.to_thread(texts)
            await client.responses.create(**settings, input="secret", **behind)
            await asyncio.sleep(LAZY_SECONDS + 0.3)
        assert b"secret" not in await asyncio.to_thread(texts)
        prompt = (await client.responses.input_items.list(second.id)).data
    async with serving(**kept) as served, openai_of(served) as (client, model):
        again = await client.responses.retrieve(second.id)
        assert again.output_text == second.output_text
        assert (await client.responses.input_items.list(second.id)).data == prompt
        more = await client.responses.create(**settings, input="on", previous_response_id=second.id)
        assert more.usage.input_tokens > second.usage.total_tokens
        for gone in (first, third):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone.id)
            assert (await client.responses.retrieve(second.id)).output_text == second.output_text


async def test_two_servers_on_one_store(serving: Any, tmp_path: Path) -> None:
    kept = {"store": tmp_path / "s.db"}
    async with serving(server=kept):
        with pytest.raises(ConfigError, match="in use by another server"):
            async with serving(server=kept):
                await asyncio.sleep(0)


async def test_the_open_that_first_meets_a_broken_store(
    serving: Any, placement: dict[str, Any], openai_of: Any, tmp_path: Path
) -> None:
    """It is answered at once, on a socket that may `open` again; a stored session goes on later."""
    path, aside = tmp_path / "s.db", tmp_path / "aside.db"
    kept = {"store": path, "session_ttl_s": 0.0}
    async with serving(**placement, server=kept) as served:
        async with served.connect() as peer:
            state = await peer.open(peer.user(1, "hi"))
            await peer.terminal(1)
        await served.quiet()
        await asyncio.to_thread(path.rename, aside)
        async with served.connect() as new:
            async with asyncio.timeout(60):
                error = await refused(new, "overloaded")
            assert "cannot be saved" in error["message"]
            await asyncio.to_thread(aside.rename, path)
            async with asyncio.timeout(60):
                while True:
                    await new.send([{"type": "open", "client": "new"}, new.user(1, "hi")])
                    if (await new.next("error", "state"))["type"] == "state":
                        break
                    await asyncio.sleep(0.2)
            await new.terminal(1)
        async with served.connect() as again:
            again.follow(peer)
            await again.open(**login(state), **peer.seen)
    store = SqliteStore(path, read_only=True)
    assert len(list(store.kept())) == 2  # nothing is left of the sessions that were refused
    store.close()


async def test_an_encrypted_store(serving: Any, placement: dict[str, Any], tmp_path: Path) -> None:
    """The next server with the key has everything; without it, or with another one, none starts."""
    path, keys, other = tmp_path / "s.db", tmp_path / "keys", tmp_path / "other"
    for number, file in enumerate((keys, other)):
        file.write_bytes(base64.b64encode(bytes([number]) * 32))
        file.chmod(0o600)
    kept = {"store": path, "store_key_file": keys}
    async with serving(**placement, server=kept) as served, served.connect() as peer:
        state = await peer.open(peer.user(1, "one two three"), peer.greedy(2, max_tokens=5))
        await peer.terminal(2)
        text, tree = peer.text(), await peer.tree(3)
    assert b"one two three" not in path.read_bytes()
    for wrong in ({}, {"store_key_file": other}):
        with pytest.raises(ConfigError, match="--store-key-file"):
            async with serving(**placement, server={"store": path} | wrong):
                pass
    async with serving(**placement, server=kept) as served, served.connect() as again:
        again.follow(peer)
        await again.open(**login(state), **peer.seen)
        assert await again.tree(4) == tree
        assert again.text() == text


async def test_who_took_a_session_meanwhile_has_it(
    serving: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    """Here somebody takes it out of the store of a server that has it in memory and generates. Its
    socket is sent away and nothing more is written; who comes back hears what it has, and goes on.
    """
    path = tmp_path / "s.db"
    async with serving(**placement, fake={"step_seconds": 0.006}, server={"store": path}) as served:
        oracle = served.oracle
        expected = oracle.output(oracle.turn("long"), 400)
        async with served.connect() as peer, served.connect() as other:
            state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=400), tokens=True)
            await other.open(other.user(1, "hi"))
            await peer.next("delta")
            await asyncio.sleep(LAZY_SECONDS + 0.3)
            store = SqliteStore(path)
            taken = store.take(state["session"], "force")
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await peer.next("delta")
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == Close.RESTART
            assert taken is not None
            assert store.read(state["session"]) == taken.items
            store.release(state["session"])
            store.close()
            await other.send(other.greedy(2, max_tokens=5))  # nobody else has noticed
            assert (await other.terminal(2))["reason"] == "length"
        async with served.connect() as again:
            again.follow(peer)
            assert (await again.open(**login(state), **peer.seen, tokens=True))["resumed"]
            assert (await again.terminal(2))["usage"]["output"] == 400
            assert again.text() == oracle.text(expected)


@pytest.mark.parametrize(
    ("fault", "mended", "advice"),
    [
        ("max_page_count = 1", "max_page_count = 1000000", "make room on the disk"),
        ("query_only = 1", "query_only = 0", "must be writable"),
    ],
    ids=["full", "read-only"],
)
async def test_a_full_or_read_only_disk(
    serving: Any, tmp_path: Path, monkeypatch: Any, caplog: Any, fault: str, mended: str, advice: str
) -> None:
    """SQLite says so itself. Who is there goes on, `sync` replies wait, who comes is told to come later;
    nothing that was committed is lost, and what waited is written when there is room.
    """
    opened: list[SqliteStore] = []
    begin = SqliteStore._begin

    def noted(self: SqliteStore, read_only: bool) -> None:
        begin(self, read_only)
        opened.append(self)

    monkeypatch.setattr(SqliteStore, "_begin", noted)
    kept = {"store": tmp_path / "s.db", "warm_start": 0}
    async with serving(server=kept) as served:
        async with served.connect() as lazy, served.connect() as sync:
            before = await lazy.open(lazy.user(1, "hi"))
            await lazy.terminal(1)
            state = await sync.open({"type": "set", "id": 1, "persist": "sync"}, sync.user(2, "hi"))
            await sync.terminal(2)
            opened[-1]._db.execute(f"PRAGMA {fault}")
            await sync.send(sync.user(3, "word " * 300))
            await lazy.send(lazy.greedy(2, max_tokens=5))
            assert (await lazy.terminal(2))["reason"] == "length"
            async with served.connect() as new:
                async with asyncio.timeout(60):
                    while True:  # until a save has failed
                        await new.send({"type": "open", "client": "new"})
                        answer = await new.next("error", "state")
                        if answer["type"] == "error":
                            break
                        await new.send({"type": "close", "id": 1, "keep": True})
                        await asyncio.sleep(0.1)
            assert answer["code"] == "overloaded"
            assert not [m for m in sync.log if m["type"] == "ok" and m["id"] == 3]
            assert any(advice in str(record.__dict__) for record in caplog.records)
            opened[-1]._db.execute(f"PRAGMA {mended}")
            async with asyncio.timeout(60):
                await sync.terminal(3)
            told = await sync.tree(4)
    async with serving(server=kept) as served:
        for state_of, branches in ((state, told), (before, None)):
            async with served.connect() as again:
                found = await again.open(**login(state_of))
                assert branches is None or await again.tree(9) == branches
                assert found["branches"][0]["position"]


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
async def test_a_corrupted_page(serving: Any, tmp_path: Path, byte: bytes) -> None:
    """Its session comes back without what was there, and says so; the others are what they were."""
    kept = {"store": tmp_path / "s.db", "warm_start": 0}
    states = []
    async with serving(server=kept) as served:
        for text in ("first", "second", "third"):
            async with served.connect() as peer:
                states.append(await peer.open({"type": "append", "id": 1, "text": f"{text} " * 400}))
                await peer.terminal(1)
    data = bytearray(kept["store"].read_bytes())
    assert not (tmp_path / "s.db-wal").exists()
    at = data.index(b"second second") // 4096 * 4096
    data[at : at + 4096] = byte * 4096
    await asyncio.to_thread(kept["store"].write_bytes, data)
    async with serving(server=kept) as served:
        for i, state in enumerate(states):
            async with served.connect() as peer:
                if i == 1:
                    back = await peer.open(**login(state), revision=state["revision"])
                    assert back["lost"]
                    assert back["branches"][0]["position"] == 0
                    await peer.say(1, "goes on", max_tokens=5)
                else:
                    assert (await peer.open(**login(state)))["branches"][0]["position"] > 400


async def test_while_the_store_cannot_be_written(serving: Any, tmp_path: Path) -> None:
    """Here its file is taken away. Who is there goes on; who comes is told to try later."""
    path, aside = tmp_path / "s.db", tmp_path / "aside.db"
    async with serving(server={"store": path}) as served, served.connect() as peer:
        await peer.open(peer.user(1, "hi"))
        await peer.terminal(1)
        await asyncio.to_thread(path.rename, aside)
        await peer.send(peer.greedy(2, max_tokens=5))
        assert (await peer.terminal(2))["reason"] == "length"
        async with asyncio.timeout(60):
            while (await served.request("GET", "/readyz"))[0] == 200:  # until a save has failed
                await asyncio.sleep(0.02)
        async with served.connect() as new:
            assert "saved" in (await refused(new, "overloaded"))["message"]
        code, body = await served.request("GET", "/readyz")
        assert code == 503
        assert "sessions cannot be saved" in body["fault"]
        assert "ramify_store_writable 0.0" in (await served.request("GET", "/metrics"))[1]
        async with served.connect() as late:
            await refused(late, "overloaded", session="s_unknown", key="k_wrong")
        await asyncio.to_thread(aside.rename, path)
        async with asyncio.timeout(60):
            while True:
                async with served.connect() as new:
                    await new.send({"type": "open", "client": "new"})
                    if (await new.next("error", "state"))["type"] == "state":
                        break
                await asyncio.sleep(0.2)
