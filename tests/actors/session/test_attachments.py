"""Viewers change nothing: not the sockets, the ids, the policies or the life of a session."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.attachments import LOOK_SECONDS
from ramify.actors.session.ops import op_bytes
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
    assert isinstance(viewer.replies[1][0], w.StateReply)
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


def coming(engine: Any, socket: int, name: str, *, write: bool = True, **opened: Any) -> None:
    """A socket of session 1 whose `state` waits for the cache."""
    opening = w.Open(client=name, session="s_1", **opened)
    engine.cores[1].attach(m.Attach(socket, opening, [], write), engine.now)


@pytest.mark.parametrize(("write", "who"), [(True, "clients"), (False, "viewers")])
def test_so_many_clients_and_so_many_viewers(sim: Callable[..., Any], write: bool, who: str) -> None:
    """One that comes again takes its own place."""
    engine = sim(limits=Limits(attachments=2))
    engine.session("other")
    engine.pump()
    core = engine.cores[1]
    if not write:
        coming(engine, 70, "first", write=False)
    core.state.out.notes.clear()
    coming(engine, 71, "second", write=write)
    assert core.state.out.notes == []
    coming(engine, 72, "third", write=write)
    (note,) = core.state.out.notes
    assert (note[0], note[1].code, note[1].details) == (72, "limit", {"max": 2})
    assert note[1].message.startswith(f"2 {who} are attached")
    assert closes(engine) == [(72, Close.FORBIDDEN, "too many attachments")]
    assert 72 not in core.sockets
    coming(engine, 73, "second", write=write)
    assert closes(engine)[1:] == [(71, Close.REPLACED, "the same client attached again")]
    assert 73 in core.sockets
    assert 71 not in core.sockets


def test_frames_wait_for_the_state_up_to_the_limit(sim: Callable[..., Any]) -> None:
    """To the byte; one frame always fits; what a socket sent goes with it."""
    op = w.Append(id=1, text="x" * 100)
    size = op_bytes(op)
    engine = sim(limits=Limits(queued_op_bytes=2 * size))
    engine.session("other")
    engine.pump()
    core = engine.cores[1]
    core.state.out.notes.clear()
    coming(engine, 71, "c")
    meter = core.state.meter
    before = meter.held
    for ident in (1, 2, 3):
        core.frame(71, [w.Append(id=ident, text="x" * 100)], engine.now)
    assert [(socket, note.id, note.code) for socket, note in core.state.out.notes] == [(71, 3, "limit")]
    assert meter.held == before + 2 * size
    core.detached(71, engine.now)
    assert meter.held == before
    coming(engine, 72, "d")
    core.frame(72, [w.Append(id=1, text="x" * 1000)], engine.now)
    assert len(core.state.out.notes) == 1
    core.frame(99, [op], engine.now)  # a socket that nobody knows
    assert meter.held == before + size + 900


def test_a_frame_too_many_before_the_state_gives_no_op_a_second_end(sim: Callable[..., Any]) -> None:
    """What was seen before gets its replies again, behind the `state`; what is new is refused."""
    ident = op_bytes(w.Rollback(id=1, to=0))
    engine = sim(limits=Limits(queued_op_bytes=4 * ident))
    client = engine.session()
    client.send(w.Append(id=1, text="x"))
    engine.pump()
    core = engine.cores[1]
    meter = core.state.meter
    core.state.out.notes.clear()
    coming(engine, 71, "c")
    before = meter.held
    long = "y" * 3 * ident
    core.frame(71, [w.Append(id=2, tokens=[5] * 75)], engine.now)
    core.frame(71, [w.Append(id=1, text="x"), w.Append(id=3, text=long)], engine.now)
    core.frame(71, [w.Append(id=4, text=long)], engine.now)  # nothing of it was seen before
    assert [(socket, note.id, note.code) for socket, note in core.state.out.notes] == [(71, 4, "limit")]
    assert meter.held == before + 4 * ident + 2 * ident
    for _ in range(3):
        core.frame(71, [w.Append(id=1, text="x")], engine.now)
    assert meter.held == before + 8 * ident  # and no more
    assert [note.id for _, note in core.state.out.notes] == [4, 1]
    (question,) = [each for each in core.state.out.cache if isinstance(each, m.Inspect)]
    core.inspected(m.Inspected(question.id, [0] * len(question.branches)), engine.now)
    out = core.subscribers[71].out
    assert isinstance(out[0], w.StateReply)
    assert [(each.id, getattr(each, "code", "ok")) for each in out[1:]] == [
        (2, "ok"),
        (1, "ok"),
        (3, "limit"),
        *[(1, "ok"), (None, "limit")] * 2,  # nothing in it was new
    ]


def test_a_session_ends_when_nobody_came_back_in_time(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session(ttl_s=100.0)
    client.send(w.Append(id=1, text="x"))
    engine.pump()
    core = engine.cores[1]
    core.detached(client.socket, 50.0)
    core.tick(149.0)
    assert (core.ended, core.state.out.wake_at) == (None, 150.0)
    coming(engine, 71, "c", ttl_s=100.0)
    core.tick(1000.0)
    assert core.ended is None
    core.detached(71, 1000.0)
    core.tick(1100.0)
    assert core.ended == "expired"


def test_one_that_is_due_and_generates_is_looked_at_again_after_a_second() -> None:
    assert LOOK_SECONDS == 1.0
