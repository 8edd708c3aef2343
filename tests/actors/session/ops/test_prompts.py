"""What a strict template renders anew for an answer, or for an append, is never too much for one turn of
the loop."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.kit.turns import TURN, Work
from ramify.actors.session.branches.segments import Tail
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.errors import BadRequest, RamifyError
from tests.actors.session.alone import Alone
from tests.actors.session.test_linear import lines_of

TURNS = 2000
MOST = 25 * TURN  # lines in a turn


@pytest.fixture
def strict(alone: Callable[..., Alone]) -> Alone:
    """A client with a strict template, behind turns that are not the template's, as files bring them."""
    made = alone(context=1 << 20, opened={"template": "strict"})
    say(made, TURNS)
    return made


def say(made: Alone, turns: int) -> None:
    message = w.ChatMessage(role="user", content="x")
    for _ in range(turns):
        made.state.extend(
            made.state.branches["main"], [5], "x",
            tail=Tail.CLOSED, role="user", chat=True, messages=[message], turn=1,
        )  # fmt: skip


def render(made: Alone, error: BaseException | None = None) -> list[Any]:
    """Do what is to be done in a thread; what the scheduler was asked then."""
    jobs, made.state.out.encode = made.state.out.encode, []
    for job in jobs:
        made.core.encoded(job.ticket, None if error else job.run(), error, made.now)
        made.core.finish(made.now)
    return made.asked()


def ends(made: Alone) -> list[Any]:
    out = made.core.subscribers[1].out
    return [each for each in out if isinstance(each, w.Ok | w.Done | w.Error)]


def test_a_long_prompt_is_rendered_in_a_thread(strict: Alone) -> None:
    """85 ms of one turn of the loop, behind 9,000 turns."""
    strict.core.work = Work(TURN)
    frame = m.Frame(1, [w.Generate(id=1, max_tokens=1)])
    lines = [lines_of(lambda: strict.core.framed(frame, strict.now))]
    while strict.core.unfinished:
        lines.append(lines_of(lambda: strict.core.go_on(strict.now)))
    assert max(lines) < 4000
    assert not [each for each in strict.asked() if isinstance(each, m.Submit)]
    assert strict.core.busy  # a session without sockets goes on
    (job,) = strict.state.out.encode
    prompt = job.run()
    lines = [lines_of(lambda: strict.core.encoded(job.ticket, prompt, None, strict.now))]
    while strict.core.unfinished:
        lines.append(lines_of(lambda: strict.core.go_on(strict.now)))
    assert max(lines) < 4000
    (submit,) = [each for each in strict.asked() if isinstance(each, m.Submit)]
    assert submit.prompt > TURNS
    assert strict.state.branches["main"].text().endswith("<|im_start|>assistant\n")


def test_branches_that_are_alike_have_it_rendered_once(strict: Alone) -> None:
    assert strict.send(w.Generate(id=1, n=3, max_tokens=1)) == []
    assert len(strict.state.out.encode) == 1
    assert len(render(strict)) == 3
    texts = {branch.text() for branch in strict.state.branches.values() if branch.name != "main"}
    assert len(texts) == 1


def test_a_short_one_is_rendered_at_once(alone: Callable[..., Alone]) -> None:
    made = alone(opened={"template": "strict"})
    say(made, 3)
    assert [type(each) for each in made.send(w.Generate(id=1, max_tokens=1))] == [m.Submit]
    assert not made.state.out.encode


def test_selections_wait_for_it_too(strict: Alone) -> None:
    assert strict.send(w.Select(id=1, choices=["a", "b"])) == []
    assert render(strict)
    assert strict.state.branches["main"].text().endswith("<|im_start|>assistant\n")


def test_who_waits_for_it_can_be_cancelled(strict: Alone) -> None:
    strict.send(w.Generate(id=1, max_tokens=1), w.Append(id=2, text="more"))
    strict.send(w.Cancel(id=3, ops=[1]))
    assert {each.id: type(each) for each in ends(strict)} == {1: w.Error, 2: w.Ok, 3: w.Ok}
    assert not any(each.max_tokens for each in render(strict) if isinstance(each, m.Submit))  # too late
    assert strict.state.branches["main"].text().endswith("xmore")
    assert not strict.core.busy


def test_a_deadline_ends_the_wait(strict: Alone) -> None:
    strict.send(w.Generate(id=1, max_tokens=1, deadline_ms=1000))
    strict.core.tick(strict.now + 2.0)
    strict.core.finish(strict.now + 2.0)
    assert [(each.id, type(each)) for each in ends(strict)] == [(1, w.Error)]
    assert render(strict) == []


@pytest.mark.parametrize("error", [BadRequest("no such turn"), ValueError("no such turn")])
def test_what_cannot_be_rendered_is_refused(strict: Alone, error: Exception) -> None:
    strict.send(w.Fork(id=1, as_=["a", "b"]), w.Generate(id=2, branch=["a", "b"], max_tokens=1))
    assert render(strict, error) == []
    refused = [each for each in ends(strict) if isinstance(each, w.Error)]
    assert [(each.id, each.branch, each.code) for each in refused] == [
        (2, "a", "bad_request"),
        (2, "b", "bad_request"),
    ]
    assert all("no such turn" in each.message for each in refused)


def test_a_broken_engine_ends_the_wait(strict: Alone) -> None:
    strict.send(w.Generate(id=1, max_tokens=1), w.Append(id=2, text="more"))
    strict.core.fail(RamifyError("broken"), strict.now)
    assert sorted((each.id, type(each).__name__) for each in ends(strict)) == [
        (1, "Error"),
        (2, "Error"),
    ]


def test_turns_that_are_rendered_anew_are_appended_in_parts(strict: Alone) -> None:
    """All 9,000 of a branch: 37 ms of one turn of the loop."""
    branch = strict.state.branches["main"]
    strict.core.work = Work(TURN)
    strict.send(w.Append(id=1, messages=[w.ChatMessage(role="user", content="more")]))
    (job,) = strict.state.out.encode
    prepared = job.run()
    turns = [lines_of(lambda: strict.core.encoded(job.ticket, prepared, None, strict.now))]
    while strict.core.unfinished:
        if not ends(strict):  # nothing half done is shown or saved
            assert strict.core.inside == (len(branch.segments) != TURNS)
        turns.append(lines_of(lambda: strict.core.go_on(strict.now)))
    assert len(branch.segments) > TURNS
    assert max(turns) < MOST, f"{max(turns)} lines in one of {len(turns)} turns"
    assert [(each.id, type(each)) for each in ends(strict)] == [(1, w.Ok)]
