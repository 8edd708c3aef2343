"""Handles of ops that are on their way: what they wait for, tell, and cancel. Without sockets."""

import asyncio
from typing import Any

import pytest

from ramify.clients.errors import ConnectionLost, Internal
from ramify.clients.stream import TextDelta
from ramify.protocol.errors import Cancelled, Conflict
from ramify.protocol.wire import (
    Append,
    Cancel,
    Delta,
    Done,
    Error,
    Generate,
    Ok,
    Part,
    TokenLogprob,
)
from tests.messages import usage


def done(ident: int, position: int, **more: Any) -> Done:
    used = usage(prompt=9, cached=8, output=position - 9)
    fields = {"branch": "main", "reason": "stop"} | more
    return Done(id=ident, position=position, usage=used, **fields)


def delta(position: int, text: str, **more: Any) -> Delta:
    return Delta(branch="main", position=position, text=text, **more)


async def test_a_result_has_all_that_was_told(offline: Any) -> None:
    logprobs = [TokenLogprob(token=4, logprob=-0.5)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answers = [
        delta(10, "a", tokens=[4], logprobs=logprobs),
        delta(11, "b", tokens=[5]),
        done(
            1,
            11,
            reason="tool",
            tool_calls=[call],
            stop="x",
            choice=2,
            scores=[-1.0],
            mean_logprob=-0.5,
            notes=["narrower"],
            content="b",
            reasoning="a",
        ),
    ]
    session, _ = offline(*answers)
    result = await session.main.generate()
    assert (result.branch, result.text, result.reason, result.position) == ("main", "ab", "tool", 11)
    assert (result.tokens, result.logprobs, result.tool_calls) == ([4, 5], logprobs, [call])
    assert (result.stop, result.choice, result.scores) == ("x", 2, [-1.0])
    assert (result.mean_logprob, result.content, result.reasoning) == (-0.5, "b", "a")
    assert result.notes == ["narrower"]
    assert result.usage.output == 2


async def test_what_was_not_asked_for_is_none(offline: Any) -> None:
    session, _ = offline(delta(10, "a"), done(1, 10))
    result = await session.main.generate()
    assert (result.tokens, result.logprobs, result.choice, result.scores) == (None, None, None, None)


async def test_deltas_without_text_are_told_only_if_they_tell_something(offline: Any) -> None:
    session, _ = offline(
        delta(10, ""), delta(11, "", tokens=[4]), delta(12, "a"), delta(11, "", truncate=9), done(1, 11)
    )
    seen = [each async for each in session.main.generate()]
    assert [(each.text, each.tokens, each.cut) for each in seen] == [
        ("", [4], 0),
        ("a", None, 0),
        ("", None, 1),
    ]


async def test_parts_come_with_their_text(offline: Any) -> None:
    parts = [Part(kind="reasoning", text="a")]
    session, _ = offline(delta(10, "a", parts=parts), done(1, 10))
    (only,) = [each async for each in session.main.generate()]
    assert only == TextDelta("main", 10, "a", parts=parts)


async def test_a_failure_is_raised_by_every_way_to_wait(offline: Any) -> None:
    session, _ = offline(delta(10, "a"), Error(code="internal", message="broke", id=1, branch="main"))
    generation = session.main.generate()
    assert (await anext(generation)).text == "a"
    assert not generation.ended
    assert (await anext(generation)).cut == 1  # a generation that fails has no text
    with pytest.raises(Internal, match="broke"):
        await anext(generation)
    assert generation.ended
    with pytest.raises(Internal, match="broke"):
        await generation


async def test_a_skipped_generation_raises_what_went_wrong(offline: Any) -> None:
    session, _ = offline(
        Error(code="conflict", message="why", id=1, branch="main"),
        Error(code="skipped", message="skipped", id=2, branch="main"),
    )
    with pytest.raises(Conflict, match="why"):
        await session.main.chat("x")


async def test_progress_waits_for_more_and_not_after_the_end(offline: Any) -> None:
    session, _ = offline(delta(10, "a"), done(1, 10))
    generation = session.main.generate()
    await generation.progress()
    assert (generation.text, generation.ended) == ("a", False)
    await generation.progress()
    assert generation.ended
    await generation.progress()  # no answer is left: it would fail


async def test_a_cancel_names_the_op(offline: Any) -> None:
    session, link = offline(done(1, 9, reason="cancelled"))
    generation = session.main.generate()
    link.send()
    generation.cancel()
    assert link.frames[1:] == [[Cancel(id=0, ops=[1])]]
    await generation
    generation.cancel()  # it has ended
    assert len(link.frames) == 2


async def test_a_cancel_of_one_child_names_its_branch(offline: Any) -> None:
    session, link = offline()
    _, second = session.main.generate(n=2, names=["a", "b"])
    link.send()
    second.cancel()
    assert link.frames[1:] == [[Cancel(id=0, branch="b")]]


async def test_what_was_not_sent_is_taken_back(offline: Any) -> None:
    session, link = offline()
    generation = session.main.generate()
    generation.cancel()
    with pytest.raises(Cancelled, match="before it was sent"):
        await generation
    assert len(link.frames) == 1


async def test_nothing_is_cancelled_after_the_session(offline: Any) -> None:
    session, link = offline()
    generation = session.main.generate()
    link.send()
    session.core.end(ConnectionLost("gone"))
    generation.cancel()
    assert len(link.frames) == 1
    with pytest.raises(ConnectionLost):
        await generation


async def test_a_task_that_will_not_run_cancels_its_generation(offline: Any) -> None:
    """The loop closes the coroutine of a task that it drops, and with it what ran in it."""
    session, link = offline()
    generation = session.main.generate()
    link.send()
    waiting = asyncio.Event()

    async def changed(key: object) -> None:
        await waiting.wait()

    link.changed = changed
    task = asyncio.create_task(generation)
    await asyncio.sleep(0)
    generation.close()
    assert link.frames[1:] == [[Cancel(id=0, ops=[1])]]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_reply_has_an_answer_for_each_branch(offline: Any) -> None:
    session, link = offline(Ok(id=1, branch="a"), Ok(id=1, branch="b"))
    (reply,) = await session.send([Append(id=0, branch=["a", "b"], text="x")])
    assert [each.branch for each in await reply] == ["a", "b"]
    assert [each.branch for each in await reply] == ["a", "b"]  # again, without waiting
    assert link.frames == [[Append(id=0, branch=["a", "b"], text="x")]]


async def test_leaving_a_loop_after_the_end_cancels_nothing(offline: Any) -> None:
    session, link = offline(delta(10, "a"), done(1, 10))
    async for _ in session.main.generate():
        pass
    await asyncio.sleep(0)
    assert link.frames == [[Generate(id=0)]]


async def test_a_handle_does_not_hold_on_to_the_tasks_that_ran_it(offline: Any) -> None:
    session, _ = offline(delta(10, "a"), done(1, 10))
    generation = session.main.generate()
    await asyncio.create_task(generation)
    assert generation._driven == {}
    assert generation.text == "a"
