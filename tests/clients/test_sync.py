"""The synchronous facade: the same outcome without await, on a real socket."""

import pytest

from ramify.clients import connect_sync
from ramify.clients.errors import ConnectionLost
from ramify.clients.sync import SyncGeneration, SyncReply
from ramify.protocol.errors import NoBranch


def test_a_conversation(url: str) -> None:
    with connect_sync(url) as session:
        assert session.model == "model"
        generation = session.main.chat("abc", max_tokens=2, seed=1)
        assert "".join(delta.text for delta in generation) == "<3:1><4:1>"
        assert generation.result().position == 5
        assert generation.text == "<3:1><4:1>"
        (child,) = session.main.fork("x")
        assert child.position == 5
        assert [g.result().text for g in child.generate(n=2, max_tokens=1)] == ["<5:None>"] * 2
        assert session.main.rollback(to=3).position == 3
        assert session.tree(text=True).branches[0].position == 3
        assert child.tree().position == 5
        reply, again = session.send(
            [{"type": "append", "text": "q"}, {"type": "generate", "max_tokens": 1, "seed": 2}]
        )
        assert isinstance(reply, SyncReply)
        assert isinstance(again, SyncGeneration)
        assert reply.result()[0].id
        assert again.result().text == "<4:2>"
        assert child.set(name="y").id
        assert child.name == "y"
        assert child.drop().id
        assert {branch.name for branch in session.root("r")} == {"r"}
        with pytest.raises(NoBranch):
            session.branch("nowhere").append("x")
        assert session.error is None


def test_no_server() -> None:
    with pytest.raises(ConnectionLost), connect_sync("ws://127.0.0.1:9"):
        pass


def test_a_session_without_a_block(url: str) -> None:
    session = connect_sync(url)
    assert session.connected
    assert session.main.append("abc").position == 3
    session.close()
    session.close()


def test_leaving_early_cancels(url: str) -> None:
    with connect_sync(url) as session:
        for _ in session.main.chat("abc", max_tokens=10**6):
            break
        with session.main.chat("d", max_tokens=10**6) as generation:
            next(generation)
        assert session.main.chat("e", max_tokens=1).result().reason == "length"


def test_an_unknown_setting_is_named_at_once() -> None:
    with pytest.raises(TypeError, match="no setting 'nope'"):
        connect_sync("ws://127.0.0.1:9", nope=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_a_result_is_waited_for_so_long(url: str) -> None:
    with connect_sync(url) as session:
        generation = session.main.chat("abc", max_tokens=10**6)
        with pytest.raises(TimeoutError):
            generation.result(timeout=0.01)
        assert generation.result().reason == "cancelled"
