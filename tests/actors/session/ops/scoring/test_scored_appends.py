"""`append` with `logprobs`: what it brings is scored, then it stands on the branch; one reply."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.ops.scoring import selects
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from tests.actors.session.ops.scoring.test_selects import at_rest, tokens


def entries(engine: Any, whole: list[int], at: int) -> list[tuple[int, float | None]]:
    """Of the tokens from position `at` on, by the fake model's own definition."""
    places = range(max(0, at - 1), len(whole) - 1)
    scores = engine.model.expected_scores(whole, places, [whole[place + 1] for place in places])
    return [*[(whole[0], None)][at:], *zip(whole[max(1, at) :], scores, strict=True)]


def told(ok: Any) -> list[tuple[int, float | None]]:
    return [(each["token"], each["logprob"]) for each in ok.result["logprobs"]]


@pytest.mark.parametrize("text", ["The capital of France", "x", ""])
def test_each_token_behind_those_before_it(sim: Callable[..., Any], text: str) -> None:
    client = (engine := sim()).session()
    client.send(w.Append(id=1, text=text, logprobs=2))
    engine.pump()
    (ok,) = client.replies[1]
    whole = tokens(engine)
    assert told(ok) == (entries(engine, whole, 0) if whole else [])
    assert ok.position == len(whole)
    client.send(w.Append(id=2, text=" is Paris.", logprobs=1), w.Generate(id=3, max_tokens=4))
    engine.pump()
    (ok,) = client.replies[2]
    now = tokens(engine)[: ok.position]
    assert told(ok) == entries(engine, now, len(whole))
    for each in ok.result["logprobs"]:
        assert (each["logprob"] is None) == ("top" not in each)
        assert len(each.get("top", "1")) == 1
    (done,) = client.replies[3]
    assert done.reason == "length"
    at_rest(engine)


def test_messages_take_the_prompt_before_them_back(sim: Callable[..., Any]) -> None:
    """The tokens stand where they are put, behind what stays."""
    client = (engine := sim()).session()
    client.send(w.Append(id=1, messages=[w.ChatMessage(role="user", content="Hello.")]))
    engine.pump()
    client.send(w.Append(id=2, messages=[w.ChatMessage(role="user", content="And?")], logprobs=1))
    engine.pump()
    (ok,) = client.replies[2]
    whole = tokens(engine)
    assert ok.result["rebased"] < client.replies[1][0].position
    assert told(ok) == entries(engine, whole, ok.result["rebased"])


@pytest.mark.parametrize("steps", range(0, 16, 2))
def test_cancelled_it_changes_nothing(sim: Callable[..., Any], steps: int) -> None:
    client = (engine := sim()).session()
    client.send(w.Append(id=1, text="a b c d"))
    engine.pump()
    before = tokens(engine)
    client.send(w.Append(id=2, text="e f g h i j", logprobs=1), w.Append(id=3, text="z"))
    engine.pump(steps)
    client.send(w.Cancel(id=4, ops=[2]))
    engine.pump()
    (end,) = client.replies[2]
    assert isinstance(end, w.Ok) or end.code == "cancelled"
    if not isinstance(end, w.Ok):
        assert tokens(engine)[: len(before)] == before
        assert "f g h" not in engine.tokenizer.decode(tokens(engine))
    at_rest(engine)


def test_more_than_one_reply_may_have(sim: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(selects, "MOST_SCORED", 12)
    client = (engine := sim()).session()
    client.send(w.Append(id=1, tokens=[5] * 7, logprobs=1))
    client.send(w.Append(id=2, tokens=[5] * 6, logprobs=1))
    engine.pump()
    (error,) = client.replies[1]
    assert error.details["field"] == "logprobs"
    assert "over 12 numbers" in error.message
    (ok,) = client.replies[2]
    assert len(ok.result["logprobs"]) == 6


def test_kv_that_is_not_finite(sim: Callable[..., Any]) -> None:
    client = (engine := sim()).session()
    engine.executor.faults = {engine.tokenizer.encode("Madrid")[0]: 99}
    client.send(w.Append(id=1, text="Madrid is large", logprobs=1))
    engine.pump()
    (error,) = client.replies[1]
    assert error.code == "internal"
    assert tokens(engine) == []
    at_rest(engine)


@pytest.mark.parametrize("change", ["pause", "core"])
def test_it_goes_on_after_an_interruption(sim: Callable[..., Any], change: str) -> None:
    client = (engine := sim(step_tokens=4)).session()
    client.send(w.Append(id=1, text="one two three four five six seven", logprobs=1))
    engine.pump(6)
    runner = engine.cores[1].runner
    assert runner.selects.busy
    if change == "pause":
        (frame_client,) = {each.task.frame.client for each in runner.selects.measured}
        runner.selects.pause(frame_client)
        engine.pump()
        assert 1 not in client.replies
        runner.selects.unpause(frame_client)
    else:  # what was asked of the other one is not answered any more
        engine.scheduler.handle(m.CancelSession(1), 0.0)
        runner.selects.change_core()
    engine.pump()
    (ok,) = client.replies[1]
    assert told(ok) == entries(engine, tokens(engine), 0)
    assert not runner.selects.busy
