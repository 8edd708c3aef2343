"""No file of a store has the key of a session."""

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from ramify.actors.store.opening import open_store
from ramify.protocol.stored_response import Stored, with_key
from tests.servers import Server

SLOW = {"step_seconds": 0.02}


def found(folder: Path, key: str) -> list[str]:
    """The files in which the key stands, as it is or in the id of a response."""
    names = []
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        idents = [ident.decode() for ident in re.findall(rb"resp_[A-Za-z0-9_-]+", data)]
        keyed = [ident for ident in idents if Stored.of(ident) and with_key(ident, "") != ident]
        if key.encode() in data or keyed:
            names.append(str(path.relative_to(folder)))
    return names


@pytest.mark.parametrize("kind", ["file", "postgres", "redis"])
async def test_no_file_of_a_store_has_a_key(
    serving: Any, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """Not while an op of a client that came with the key runs, not of a response that is kept."""
    place, folder = str(tmp_path / "s.db"), tmp_path
    if kind != "file":
        place = request.getfixturevalue(f"{kind}_url")
        server: Server = request.getfixturevalue(f"{kind}_server")
        folder = server.folder
    async with serving(fake=SLOW, server={"store": place, "grace_s": 0.0}, idle_at_end=False) as served:
        async with served.connect() as peer:
            state = await peer.open({"type": "set", "id": 1, "persist": "sync"}, peer.user(2, "hi"))
            await peer.terminal(2)
        door = openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0)
        async with door:  # it keeps its connection
            first = await door.responses.create(model="fake", input="hi", max_output_tokens=16)
            second = await door.responses.create(
                model="fake", input="more", max_output_tokens=16, previous_response_id=first.id
            )
            kept = await door.responses.retrieve(second.id)
        assert (kept.id, kept.previous_response_id) == (second.id, first.id)
        async with served.connect() as again:
            login = {"session": state["session"], "key": state["key"]}
            await again.open(again.greedy(3, max_tokens=4000), **login)
            await again.next("delta")
            await again.send(again.user(4, "waits"), {"type": "set", "id": 5, "meta": {"a": 1}})
            await again.next("delta")
            store = open_store(place, read_only=True)
            async with asyncio.timeout(60):
                while not any(key[0] == "f" for key in store.read(state["session"])):
                    await asyncio.sleep(0.05)
            store.close()
            if kind == "postgres":
                import psycopg

                with psycopg.connect(place, autocommit=True) as db:
                    db.execute("CHECKPOINT")
            assert found(folder, state["key"]) == []
    assert found(folder, state["key"]) == []
