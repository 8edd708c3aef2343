"""A session goes from one server to another as a file, over the wire."""

import base64
from typing import Any

import pytest

from ramify.clients.connect import connect
from ramify.protocol.errors import BadRequest, Conflict, LimitExceeded


async def test_a_session_goes_to_another_server(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement) as served, connect(served.engine.url) as session:
        await session.main.chat("hello", max_tokens=5, temperature=0, ignore_eos=True)
        (child,) = await session.main.fork("child")
        await child.chat("and then?", max_tokens=5, temperature=0, ignore_eos=True)
        file = await session.export()
        before = (await session.tree(text=True, tokens=True)).branches
        first = session.id, session.key
        oracle = await child.chat("more", max_tokens=5, temperature=0, ignore_eos=True)
    async with serving(**placement) as served:
        async with connect(served.engine.url, imports=file, keep=True) as other:
            assert (other.id, other.key) != first
            after = (await other.tree(text=True, tokens=True)).branches
            assert [(b.branch, b.position, b.parent, b.at, b.turns) for b in after] == [
                (b.branch, b.position, b.parent, b.at, b.turns) for b in before
            ]
            more = await other.branch("child").chat("more", max_tokens=5, temperature=0, ignore_eos=True)
            assert more.text == oracle.text
            login = {"session": other.id, "key": other.key}
        async with connect(served.engine.url, **login) as again:  # its own key opens it
            assert {branch.name for branch in again.branches} == {"main", "child"}


async def test_an_imported_session_outlives_the_server(serving: Any, tmp_path: Any) -> None:
    kept = {"store": tmp_path / "s.db"}
    async with serving() as served, connect(served.engine.url) as session:
        await session.main.chat("hello", max_tokens=5, temperature=0)
        file = await session.export()
        position = session.main.position
    async with (
        serving(server=kept) as served,
        connect(served.engine.url, imports=file, keep=True) as other,
    ):
        login = {"session": other.id, "key": other.key}
    async with serving(server=kept) as served, connect(served.engine.url, **login) as again:
        assert again.main.position == position


async def test_what_cannot_be_exported_or_imported(serving: Any) -> None:
    async with serving(fake={"step_seconds": 0.01}) as served, connect(served.engine.url) as session:
        running = session.main.chat("hello", max_tokens=200, ignore_eos=True)
        with pytest.raises(Conflict, match="run"):
            await session.export()
        running.cancel()
        with pytest.raises(BadRequest, match="import"):
            async with connect(served.engine.url, imports=b"no session"):
                pass
        async with served.connect() as peer:
            file = base64.b64encode(b"x").decode()
            await peer.send({"type": "open", "session": "s_1", "key": "k", "import": file})
            error = await peer.next("error")
            assert (error["code"], error["details"]["path"]) == ("bad_request", "$.import")
        async with served.connect() as peer:
            await peer.send({"type": "open", "import": file})
            error = await peer.next("error")
            assert error["details"]["path"] == "$.import"
            assert (await peer.open())["branches"]  # the socket may open anew
            await peer.send([peer.user(1, "hi"), *({"type": "export", "id": i} for i in range(2, 9))])
            first, *others = [await peer.terminal(i) for i in range(2, 9)]
            assert first["result"]["file"]
            assert {other["code"] for other in others} == {"overloaded"}  # one at a time


async def test_a_session_that_fits_into_no_frame(serving: Any) -> None:
    limits = {"frame_bytes": 1 << 16}
    async with serving(limits=limits) as served, connect(served.engine.url) as session:
        for name in await session.root(*"abcdefgh"):
            await name.append("word " * 1300)
        with pytest.raises(LimitExceeded, match="limit-frame-bytes"):
            await session.export()
