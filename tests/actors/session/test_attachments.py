"""Viewers change nothing: not the sockets, the ids, the policies or the life of a session."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import Close


def view(engine: Any, name: str = "c", **opened: Any) -> Any:
    """Look at session 1 with its view key."""
    viewer = engine.session(name)
    engine.pump()
    viewer.number = 1
    opening = w.Open(client=name, session="s_1", **opened)
    engine.post_session(1, m.Attach(viewer.socket, opening, [], False))
    return viewer


def closes(engine: Any) -> list[tuple[int, int, str]]:
    """What session 1 wants closed; the simulation forgets it."""
    return list(engine.cores[1].state.out.closes)


def test_a_viewer_with_the_writers_name_leaves_the_writer_alone(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    writer = engine.session("c")
    writer.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=40))
    engine.pump(10)
    viewer = view(engine)
    engine.pump()
    assert sorted(engine.cores[1].sockets) == sorted([writer.socket, viewer.socket])
    assert writer.replies[2][0].reason == "length"
    writer.send(w.Append(id=3, text="y"))
    viewer.send(w.Tree(id=1))
    engine.pump()
    assert isinstance(writer.replies[3][0], w.Ok)
    assert isinstance(viewer.replies[1][0], w.State)
    assert viewer.replies[1][0].op == 1  # its own count


def test_its_ids_do_not_use_up_the_writers(sim: Callable[..., Any]) -> None:
    engine = sim()
    writer = engine.session("c")
    viewer = view(engine)
    engine.pump()
    viewer.send(w.Tree(id=1000))
    engine.pump()
    writer.send(w.Append(id=1, text="y"))
    engine.pump()
    assert isinstance(writer.replies[1][0], w.Ok)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_viewer_does_not_resume_what_its_writer_paused(sim: Callable[..., Any], leaves: bool) -> None:
    engine = sim(eos_every=0)
    writer = engine.session("c", detach="pause")
    writer.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=60))
    engine.pump(12)
    writer.drop()
    engine.pump()
    length = engine.cores[1].state.branches["main"].position
    viewer = view(engine)
    engine.pump()
    if leaves:
        viewer.drop()
        engine.pump()
    assert engine.cores[1].state.branches["main"].position == length
    writer.connect()
    engine.pump()
    assert writer.replies[2][0].reason == "length"


def test_a_viewers_leaving_pauses_nothing(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    writer = engine.session("c", detach="cancel")
    viewer = view(engine)
    writer.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=60))
    engine.pump(12)
    viewer.drop()
    engine.pump()
    assert writer.replies[2][0].reason == "length"


def test_a_viewer_does_not_lengthen_the_sessions_life(sim: Callable[..., Any]) -> None:
    engine = sim()
    writer = engine.session("c", ttl_s=100.0)
    engine.pump()
    writer.drop()
    engine.pump()
    gone = engine.now
    view(engine, "v", ttl_s=10_000.0)
    engine.pump()
    engine.cores[1].tick(gone + 99)
    assert engine.cores[1].ended is None
    engine.cores[1].tick(gone + 101)
    assert engine.cores[1].ended == "expired"


def test_viewers_keep_no_writer_out_and_no_ledger_is_forgotten_for_them(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(attachments=2))
    writer = engine.session("c", detach="pause")
    writer.send(w.Append(id=1, text="x"))
    engine.pump()
    writer.drop()
    engine.pump()
    for number in range(70):
        viewer = view(engine, f"v{number}")
        viewer.send(w.Tree(id=1))
        engine.pump()
        viewer.drop()
    first, second = view(engine, "a"), view(engine, "b")
    engine.pump()
    writer.connect()
    engine.pump()
    core = engine.cores[1]
    assert set(core.sockets) == {first.socket, second.socket, writer.socket}
    assert core.publisher.reply_logs["c"].last == 1
    third = view(engine, "d")
    core.attach(m.Attach(third.socket + 1, w.Open(client="e", session="s_1"), [], False), engine.now)
    assert closes(engine)[-1][1] == Close.FORBIDDEN


def test_a_viewer_takes_over_from_a_viewer_of_its_name(sim: Callable[..., Any]) -> None:
    engine = sim()
    engine.session("c")
    first = view(engine, "v")
    engine.pump()
    second = view(engine, "v")
    engine.pump()
    assert second.socket in engine.cores[1].sockets
    assert first.socket not in engine.cores[1].sockets
