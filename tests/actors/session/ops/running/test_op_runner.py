"""Which op runs when, and how each ends, in a session without an engine."""

from collections.abc import Callable
from typing import Any

from ramify.actors.session.ops import op_bytes
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.errors import RamifyError
from tests.actors.session.alone import Alone


def ends(session: Alone, *idents: int) -> list[str]:
    """How each op ended: the error's code, the reason, or the type of its reply."""
    found = []
    for ident in idents:
        for reply in session.replies(ident) or [None]:
            shown = "waits" if reply is None else getattr(reply, "code", getattr(reply, "reason", "ok"))
            found.append(shown)
    return found


def running(session: Alone, **fields: Any) -> m.Submit:
    """A generation as op 2, on `main`, which holds three tokens."""
    *_, submit = session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Generate(id=2, **fields))
    assert isinstance(submit, m.Submit)
    return submit


def test_ops_on_a_branch_wait_for_each_other(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = running(session)
    runner = session.core.runner
    session.send(w.Append(id=3, tokens=[8]), w.Fork(id=4, branch=None, as_=["a"]))
    assert ends(session, 1, 2, 3, 4) == ["ok", "waits", "waits", "ok"]
    assert (len(runner), runner.busy) == (2, True)
    (ahead,) = session.over(submit.request, 0)
    assert (ahead.max_tokens, ahead.prompt) == (0, 4)  # nobody waits for it: computed ahead
    assert ends(session, 2, 3) == ["length", "ok"]
    assert (len(runner), runner.busy, runner.queued) == (0, False, 0)


def test_what_ops_hold_is_counted_until_the_last_branch_is_done(alone: Callable[..., Alone]) -> None:
    session = alone()
    runner, meter = session.core.runner, session.state.meter
    op = w.Generate(id=2, n=2, max_tokens=9)
    first, second = session.send(w.Append(id=1, tokens=[5]), op)
    assert runner.queued == op_bytes(op)
    session.over(first.request, 0)
    assert runner.queued == op_bytes(op)
    session.replies(2)
    held = meter.held
    session.over(second.request, 0)
    assert runner.queued == 0
    assert meter.held < held


def test_what_is_expected_falls_as_ops_end(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = running(session, max_tokens=9)
    session.send(w.Append(id=3, tokens=[8, 9]))
    assert session.state.expects == 11
    session.over(submit.request, 0)
    assert session.state.expects == 0


def test_nothing_is_computed_ahead_of_ops_that_wait(alone: Callable[..., Alone]) -> None:
    session = alone()
    asked = session.send(w.Append(id=1, tokens=[5]), w.Append(id=2, tokens=[6]), w.Fork(id=3, as_=["a"]))
    assert asked == []
    (ahead,) = session.send(w.Append(id=4, tokens=[6]))
    assert ahead.prompt == 3


def test_a_failed_op_skips_those_behind_it_in_its_frame(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(
        w.Append(id=1, branch="none", tokens=[5]),
        w.Append(id=2, branch="none", tokens=[5]),
        w.Append(id=3, tokens=[5]),
    )
    assert ends(session, 1, 2, 3) == ["no_branch", "skipped", "ok"]
    skipped = session.reply(2)
    assert (skipped.branch, skipped.details) == ("none", {"branch": "none"})
    session.send(w.Append(id=4, branch="none", tokens=[5]))
    assert ends(session, 4) == ["no_branch"]


def test_a_spawn_that_fails_is_told_by_its_generations(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(w.Fork(id=1, branch=None, as_=["a"]))
    session.send(w.Append(id=2, tokens=[5]), w.Generate(id=3, as_=["a", "b"], n=2))
    assert ends(session, 3) == ["exists", "exists"]
    assert {reply.branch for reply in session.replies(3)} == {"a", "b"}
    session.send(w.Generate(id=4, as_=["x", "y"], n=2), w.Append(id=5, branch="x", tokens=[5]))
    assert session.asked() == []


def test_a_generation_that_fails_skips_what_builds_on_it(alone: Callable[..., Alone]) -> None:
    session = alone()
    *_, submit = session.send(
        w.Append(id=1, tokens=[5, 6, 7]), w.Generate(id=2), w.Append(id=3, tokens=[5])
    )
    session.send(w.Append(id=4, tokens=[6]))
    session.said(submit.request, 10)
    session.over(submit.request, 1, "error", error="internal", message="broken")
    assert ends(session, 2, 3, 4) == ["error", "skipped", "ok"]


# --- ahead of their turn ------------------------------------------------------------------------


def test_ops_are_cancelled_by_id_and_only_ones_own(alone: Callable[..., Alone]) -> None:
    session = alone()
    other = session.attach("d")
    submit = running(session)
    session.send(w.Append(id=3, tokens=[8]), w.Append(id=4, tokens=[9]))
    session.send(w.Append(id=1, tokens=[9]), w.Cancel(id=2, ops=[2, 3, 4]), socket=other)
    assert session.replies(3) == []
    assert session.send(w.Cancel(id=5, ops=[2, 3, 77])) == [m.CancelRequest(submit.request)]
    assert session.reply(5).result == {"cancelled": [2, 3]}
    cancelled = session.reply(3)
    assert (cancelled.code, cancelled.branch) == ("cancelled", "main")
    session.over(submit.request, 0, "cancelled")
    assert session.replies(4)[0].position == 4


def test_generations_of_some_branches_are_cancelled(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(w.Append(id=1, tokens=[5]), w.Fork(id=2, as_=["a"]))
    main, a = session.send(w.Generate(id=3), w.Generate(id=4, branch="a"), w.Append(id=5, tokens=[6]))
    assert session.send(w.Cancel(id=6, branch="a")) == [m.CancelRequest(a.request)]
    assert session.reply(6).result == {"cancelled": [4]}
    assert session.send(w.Cancel(id=7)) == [m.CancelRequest(main.request)]
    assert session.reply(7).result == {"cancelled": [3]}
    assert session.replies(5) == []


def test_a_spawn_that_waits_is_cancelled_with_its_generations(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = running(session)
    session.send(w.Generate(id=3, n=2), w.Fork(id=4, as_=["b"]))
    session.send(w.Fork(id=5, branch=None, as_=["z"]))
    session.send(w.Append(id=6, branch="z", tokens=[5]))
    session.asked()
    session.send(w.Cancel(id=7, branch="z"))
    assert session.reply(7).result == {"cancelled": []}
    assert session.send(w.Cancel(id=8, branch="main")) == [m.CancelRequest(submit.request)]
    assert session.reply(8).result == {"cancelled": [2, 3]}
    assert ends(session, 3, 4) == ["cancelled", "cancelled", "waits"]
    assert {reply.branch for reply in session.replies(3)} == {"main.3.1", "main.3.2"}
    session.over(submit.request, 0, "cancelled")
    assert ends(session, 2, 4) == ["cancelled", "ok"]
    assert set(session.state.branches) == {"main", "b", "z"}


def test_a_subtree_is_cancelled_with_all_that_waits_there(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(
        w.Append(id=1, tokens=[5]), w.Fork(id=2, as_=["a", "b"]), w.Fork(id=3, branch="a", as_=["c"])
    )
    session.asked()
    a, b, c = session.send(
        w.Generate(id=4, branch="a"), w.Generate(id=5, branch="b"), w.Generate(id=6, branch="c")
    )
    session.send(w.Fork(id=7, branch="c", as_=["d"]), w.Append(id=8, branch="d", tokens=[5]))
    session.send(w.Drop(id=9, branch="c"), w.Append(id=10, branch="b", tokens=[5]))
    asked = session.send(w.Cancel(id=11, branch="a", subtree=True))
    assert asked == [m.CancelRequest(a.request), m.CancelRequest(c.request)]
    assert session.reply(11).result == {"cancelled": [4, 6, 7, 8]}
    assert ends(session, 7, 8, 9) == ["cancelled", "cancelled", "waits"]
    session.over(a.request, 0, "cancelled")
    session.over(c.request, 0, "cancelled")
    session.over(b.request, 0)
    assert ends(session, 4, 5, 6, 9, 10) == ["cancelled", "length", "cancelled", "ok", "ok"]


def test_a_subtree_that_is_cancelled_is_not_computed_ahead(alone: Callable[..., Alone]) -> None:
    session = alone()
    (main,) = session.send(w.Append(id=1, tokens=[5]))
    (a,) = session.send(w.Fork(id=2, branch=None, as_=["a"]), w.Append(id=3, branch="a", tokens=[5]))
    assert session.send(w.Cancel(id=4, branch="a", subtree=True)) == [m.CancelRequest(a.request)]
    assert session.send(w.Cancel(id=5, subtree=True)) == [m.CancelRequest(main.request)]


def test_who_goes_may_have_its_generations_cancelled(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"detach": "cancel"})
    other = session.attach("d")
    submit = running(session)
    session.send(w.Append(id=3, tokens=[8]))
    theirs, *_ = session.send(
        w.Fork(id=1, branch=None, as_=["b"]),
        w.Append(id=2, branch="b", tokens=[5]),
        w.Generate(id=3, branch="b"),
        socket=other,
    )
    session.detach()
    assert session.asked() == [m.CancelRequest(submit.request)]
    session.over(submit.request, 0, "cancelled")
    assert session.branch().position == 4  # input that waited is appended
    session.detach(other)
    assert session.asked()[-1] == m.CancelRequest(theirs.request)


# --- deadlines ----------------------------------------------------------------------------------


def test_the_timer_is_set_for_the_next_deadline(alone: Callable[..., Alone]) -> None:
    session = alone()
    out = session.state.out
    submit = running(session)
    session.send(w.Generate(id=3, deadline_ms=3000), w.Generate(id=4, deadline_ms=2000))
    assert out.wake_at == 12.0
    for now, ended, later in ((11.9, ["waits"] * 2, 12.0), (12.0, ["waits", "deadline"], 13.0)):
        out.wake_at, session.now = None, now
        session.core.tick(now)
        assert (ends(session, 3, 4), out.wake_at) == (ended, later)
    out.wake_at = None
    session.core.tick(13.0)
    assert (ends(session, 3), out.wake_at) == (["deadline"], None)
    session.over(submit.request, 0)
    assert len(session.core.runner) == 0


def test_a_spawn_whose_deadline_passes_makes_no_branches(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = running(session)
    session.send(w.Generate(id=3, n=2, deadline_ms=1000), w.Fork(id=4, as_=["b"]))
    session.now = 11.0
    session.core.tick(11.0)
    assert ends(session, 3, 4) == ["deadline", "deadline", "waits"]
    session.over(submit.request, 0)
    assert set(session.state.branches) == {"main", "b"}


def test_deadlines_of_ops_that_ended_take_no_memory(alone: Callable[..., Alone]) -> None:
    session = alone(context=4096)
    session.send(w.Append(id=1, tokens=[5]))
    session.asked()
    for ident in range(2, 400):
        (submit,) = session.send(w.Generate(id=ident, max_tokens=1, deadline_ms=60_000))
        session.over(submit.request, 0)
        session.replies(ident)
    assert len(session.core.runner.deadlines) <= 64 + 2
    session.state.out.wake_at = None
    session.core.tick(session.now)
    assert session.state.out.wake_at is None


# --- a broken engine ----------------------------------------------------------------------------


def test_nothing_begins_when_the_engine_is_broken(alone: Callable[..., Alone]) -> None:
    session = alone()
    running(session)
    session.send(w.Append(id=3, tokens=[5]))
    session.core.fail(RamifyError("broken"), 11.0)
    assert ends(session, 2, 3) == ["internal", "internal"]
    assert session.core.ended == "the engine failed"
    session.send(w.Append(id=4, tokens=[5]))
    assert ends(session, 4) == ["internal"]


def test_text_that_is_being_tokenized_fails_with_the_engine(alone: Callable[..., Alone]) -> None:
    session = alone(context=100_000)
    session.send(w.Append(id=1, text="word " * 2000), w.Append(id=2, branch="main", text="b"))
    assert ends(session, 1, 2) == ["waits", "waits"]
    (job,) = session.state.out.encode
    assert job.size == 10_000
    session.core.fail(RamifyError("broken"), 11.0)
    assert ends(session, 1, 2) == ["internal", "skipped"]


def test_a_name_is_expected_while_an_op_may_make_it(alone: Callable[..., Alone]) -> None:
    session = alone()
    runner = session.core.runner
    submit = running(session)
    session.send(w.Fork(id=3, as_=["a"]))
    assert [runner.expects(name) for name in ("main", "a", "b")] == [True, True, False]
    session.over(submit.request, 0)
    assert (runner.expects("a"), "a" in session.state.branches) == (True, True)
