"""Generations of a session without an engine: what the scheduler is asked, and what its answers do."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.kit.memory import SEGMENT, json_bytes
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.ops import op_bytes
from ramify.actors.session.output.endings import FULL, RETRY_MS, refusal
from ramify.actors.session.output.generation import PREFILL_PRIORITY
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.errors import LimitExceeded, Overloaded, RamifyError, TooLong
from ramify.protocol.sampling import SamplingParams, TokenLogprobs
from tests.actors.session.alone import Alone


def begin(session: Alone, **fields: Any) -> m.Submit:
    """Three tokens on `main`, and a generation behind them as op 2."""
    fields = {"max_tokens": 20} | fields
    (submit,) = session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Generate(id=2, **fields))
    assert isinstance(submit, m.Submit)
    return submit


def test_a_generation_asks_for_what_its_op_says(
    alone: Callable[..., Alone], tokenizer: Tokenizer
) -> None:
    session = alone()
    submit = begin(
        session,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        seed=3,
        logprobs=2,
        priority=1,
        stop_token_ids=[9],
        deadline_ms=1500,
    )
    assert submit == m.Submit(
        request=submit.request,
        branch=session.branch().handle,
        prompt=3,
        max_tokens=20,
        sampling=SamplingParams(0.5, 4, 0.75, 0.25, 0.5, -0.5, 1.5, 3, 2),
        stop_token_ids=sorted({9, *tokenizer.eos_ids}),
        priority=1,
        deadline=11.5,
        arrived=10.0,
        sampled=0,
        owner="who",
        expects=20,
    )
    assert session.state.out.wake_at == 11.5


def test_what_an_op_does_not_say_is_the_models(
    alone: Callable[..., Alone], tokenizer: Tokenizer
) -> None:
    submit = begin(alone())
    given = tokenizer.generation_defaults
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        given.temperature,
        given.top_k,
        given.top_p,
        given.min_p,
    )
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (
        given.repetition_penalty,
        7,
        0,
    )
    assert (submit.deadline, submit.priority) == (None, 0)
    assert begin(alone(), ignore_eos=True, stop_token_ids=[9]).stop_token_ids == [9]
    assert begin(alone(), temperature=0.0).sampling.temperature == 0.0


def test_output_ends_with_the_context(alone: Callable[..., Alone]) -> None:
    assert begin(alone(context=10)).max_tokens == 7
    assert begin(alone(context=23)).max_tokens == 20
    session = alone(context=3)
    session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Generate(id=2))
    error = session.reply(2)
    assert (error.code, error.details) == ("too_long", {"max": 3, "position": 3})
    session.send(w.Fork(id=3, branch=None, as_=["empty"]), w.Generate(id=4, branch="empty"))
    assert session.reply(4).code == "bad_request"


def test_branches_of_one_op_have_seeds_of_their_own(alone: Callable[..., Alone]) -> None:
    session = alone()
    submits = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, n=3))
    assert [submit.sampling.seed for submit in submits] == [7, 8, 9]
    session = alone()
    submits = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, n=3, seed=2**63 - 2))
    assert [submit.sampling.seed for submit in submits] == [2**63 - 2, 2**63 - 1, 0]


def test_as_many_run_as_the_session_may_have(alone: Callable[..., Alone]) -> None:
    session = alone(running=2)
    first, second = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, n=4, max_tokens=3))
    assert session.core.generations.busy
    (third,) = session.over(first.request, 0)
    assert third.branch == session.branch("main.2.3").handle
    (fourth,) = session.over(second.request, 0)
    assert session.over(third.request, 0) == []
    assert session.core.generations.busy
    assert session.over(fourth.request, 0) == []
    assert not session.core.generations.busy
    assert session.over(fourth.request, 0) == []  # nobody knows it any more
    assert len(session.replies(2)) == 4


# --- computing ahead ----------------------------------------------------------------------------


def test_input_that_nobody_waits_for_is_computed_ahead(alone: Callable[..., Alone]) -> None:
    session = alone()
    (first,) = session.send(w.Append(id=1, tokens=[5, 6, 7]))
    assert first == m.Submit(
        request=first.request,
        branch=session.branch().handle,
        prompt=3,
        max_tokens=0,
        sampling=SamplingParams(),
        priority=PREFILL_PRIORITY,
        arrived=10.0,
        owner="who",
    )
    assert PREFILL_PRIORITY == -8
    assert not session.core.generations.busy
    cancel, second = session.send(w.Append(id=2, tokens=[8]))
    assert cancel == m.CancelRequest(first.request)
    assert second.prompt == 4
    session.over(first.request, 0, "cancelled")
    assert session.branch().prefill == second.request
    session.over(second.request, 0)
    assert session.branch().prefill is None
    (submit,) = session.send(w.Generate(id=3))
    assert submit.max_tokens > 0


def test_what_an_append_brought_counts_as_found_where_it_was(alone: Callable[..., Alone]) -> None:
    """Once: the next answer finds it on the device."""
    session = alone()
    (ahead,) = session.send(w.Append(id=1, tokens=list(range(5, 25))))
    session.over(ahead.request, 0, cached=18, host=12, disk=6)
    hits = []
    for turn in (2, 3):
        (submit,) = session.send(w.Generate(id=turn))
        session.over(submit.request, 0, prompt=20, cached=19, computed=1, disk=2)
        usage = next(each.usage for each in session.replies(turn) if isinstance(each, w.Done))
        hits.append((usage.hit.gpu, usage.hit.host, usage.hit.disk))
    assert hits == [(0, 11, 8), (17, 0, 2)]


def test_nothing_is_computed_ahead_of_a_full_or_empty_branch(alone: Callable[..., Alone]) -> None:
    session = alone(context=3)
    assert len(session.send(w.Append(id=1, tokens=[5, 6]))) == 1
    assert session.send(w.Append(id=2, tokens=[7])) == []
    assert session.send(w.Fork(id=3, branch=None, as_=["e"]), w.Append(id=4, branch="e", text="")) == []


# --- while it runs ------------------------------------------------------------------------------


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of one letter each."""
    return [token for letter in text for token in tokenizer.encode(letter)]


def test_a_stop_string_cuts_the_request_before_it(
    alone: Callable[..., Alone], tokenizer: Tokenizer
) -> None:
    session = alone()
    submit = begin(session, stop=["cd"])
    assert session.said(submit.request, *letters(tokenizer, "abc")) == []
    assert session.said(submit.request, *letters(tokenizer, "de")) == [
        m.CancelRequest(submit.request, keep=2, reason="stop")
    ]
    assert session.said(submit.request, *letters(tokenizer, "fg")) == []
    assert session.said(99, 5) == []  # nobody's
    session.state.out.cache.clear()
    session.over(submit.request, 2, "stop")
    done = session.reply(2)
    assert (done.reason, done.stop, done.position, done.usage.output) == ("stop", "cd", 5, 2)
    assert session.branch().text().endswith("ab")
    assert session.state.out.cache == []


def test_a_request_that_ended_before_it_was_cut_is_cut_here(
    alone: Callable[..., Alone], tokenizer: Tokenizer
) -> None:
    session = alone()
    submit = begin(session, stop=["cd"])
    session.said(submit.request, *letters(tokenizer, "abcd"))
    session.state.out.cache.clear()
    session.over(submit.request, 4)
    assert session.state.out.cache == [m.MoveBranch(session.branch().handle, 5)]
    assert (session.reply(2).reason, session.branch().position) == ("stop", 5)


def test_a_stop_token_is_cut_off_where_no_template_ends_a_turn_with_it(
    alone: Callable[..., Alone],
) -> None:
    session = alone()
    submit = begin(session, stop_token_ids=[9])
    session.said(submit.request, 10, 9)
    session.state.out.cache.clear()
    session.over(submit.request, 2, "stop")
    done = session.reply(2)
    assert (done.reason, done.stop, done.position, done.usage.output) == ("stop", 9, 4, 2)
    assert session.state.out.cache == [m.MoveBranch(session.branch().handle, 4)]


def test_a_cancel_is_asked_for_once(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = begin(session)
    session.said(submit.request, 10, 11)
    assert session.send(w.Cancel(id=3)) == [m.CancelRequest(submit.request)]
    assert session.send(w.Cancel(id=4)) == []
    assert session.replies(2) == []
    session.over(submit.request, 2, "cancelled")
    done = session.reply(2)
    assert (done.reason, done.position, done.usage.output, done.error) == ("cancelled", 5, 2, None)


def test_one_that_was_not_submitted_ends_at_once(alone: Callable[..., Alone]) -> None:
    session = alone(running=1)
    session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Fork(id=2, as_=["a"]))
    session.send(w.Generate(id=3), w.Generate(id=4, branch="a"))
    session.now = 12.0
    assert session.send(w.Cancel(id=5, branch=["a"])) == []
    done = session.reply(4)
    usage = done.usage
    assert (done.reason, done.position, done.error, done.message) == ("cancelled", 3, None, None)
    assert (usage.prompt, usage.cached, usage.computed, usage.output) == (3, 0, 0, 0)
    assert (usage.queue_ms, usage.ttft_ms, usage.total_ms) == (2000.0, None, 2000.0)


def test_a_deadline_ends_what_the_scheduler_does_not_have(alone: Callable[..., Alone]) -> None:
    session = alone(running=1)
    session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Fork(id=2, as_=["a"]))
    first, *_ = session.send(
        w.Generate(id=3, deadline_ms=1000), w.Generate(id=4, branch="a", deadline_ms=1000)
    )
    session.now = 11.0
    session.core.tick(session.now)
    assert (session.replies(3), session.reply(4).reason) == ([], "deadline")
    session.over(first.request, 0, "cancelled")  # it met a pause: its deadline has passed
    assert session.reply(3).reason == "deadline"


def test_a_full_session_ends_its_generations(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = begin(session)
    session.said(submit.request, 10)
    session.state.meter.most = 0
    assert session.said(submit.request, 11) == [m.CancelRequest(submit.request)]
    assert session.said(submit.request, 12) == []
    session.over(submit.request, 3, "cancelled")
    done = session.reply(2)
    assert (done.reason, done.error, done.message, done.position) == ("error", "limit", FULL, 6)


def test_who_cancels_a_full_session_has_cancelled_it(alone: Callable[..., Alone]) -> None:
    session = alone()
    submit = begin(session)
    session.state.meter.most = 0
    session.said(submit.request, 10)
    assert session.send(w.Cancel(id=3)) == [m.CancelRequest(submit.request)]
    session.over(submit.request, 1, "cancelled")
    assert (session.reply(2).reason, session.reply(2).error) == ("cancelled", None)


def test_a_failed_request_without_output_leaves_the_branch_as_it_was(
    alone: Callable[..., Alone],
) -> None:
    session = alone()
    submit = begin(session)
    session.over(submit.request, 0, "error", error="overloaded", message="later")
    error = session.reply(2)
    assert (error.code, error.message, error.retry_ms) == ("overloaded", "later", RETRY_MS)
    assert (session.branch().position, len(session.branch().segments)) == (3, 1)
    (again,) = session.send(w.Generate(id=3))
    session.said(again.request, 10)
    session.over(again.request, 1, "error", error="internal", message="broken")
    done = session.reply(3)
    assert (done.reason, done.error, done.message, done.position) == ("error", "internal", "broken", 4)


def test_what_a_failed_request_tells_its_client() -> None:
    def told(error: Any, message: str = "why") -> RamifyError:
        return refusal(
            m.Finished(1, "error", 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, error=error, message=message)
        )

    kinds = [type(told(error)) for error in ("overloaded", "too_long", "limit", "internal")]
    assert kinds == [Overloaded, TooLong, LimitExceeded, RamifyError]
    assert {told(error).message for error in ("overloaded", "too_long", "limit", "internal")} == {"why"}
    assert told("internal", "").message == "the engine failed"
    assert (told("overloaded").retry_ms, RETRY_MS) == (1000, 1000)


def test_log_probabilities_are_shown_and_their_mean(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"tokens": True})
    submit = begin(session, logprobs=1)
    entries = [TokenLogprobs(-1.0, [10], [-1.0]), TokenLogprobs(-2.0, [10], [-1.5])]
    session.said(submit.request, 10, 11, logprobs=entries)
    session.over(submit.request, 2)
    assert session.reply(2).mean_logprob == -1.5
    segment: Any = session.branch().segments[-1]
    assert [(each.token, each.logprob, each.top) for each in segment.logprobs] == [
        (10, -1.0, [(10, -1.0)]),
        (11, -2.0, [(10, -1.5)]),
    ]
    session = alone()
    session.over(begin(session).request, 0)
    assert session.reply(2).mean_logprob is None


# --- a client that is away ----------------------------------------------------------------------


def test_a_pause_goes_on_where_it_was(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"detach": "pause"}, running=1)
    first, *_ = session.send(
        w.Append(id=1, tokens=[5, 6, 7]),
        w.Fork(id=2, as_=["a"]),
        w.Generate(id=3, max_tokens=20, deadline_ms=60_000),
        w.Generate(id=4, branch="a", max_tokens=20),
    )
    session.said(first.request, 10, 11)
    session.detach()
    assert session.asked() == [m.CancelRequest(first.request)]
    assert session.over(first.request, 2, "cancelled") == []  # the other one waits too
    assert not session.core.generations.busy
    session.now = 20.0
    socket = session.attach()
    (second,) = session.asked()
    # the one that never ran was put aside first
    assert second.branch == session.branch("a").handle
    (third,) = session.over(second.request, 0)
    assert (third.branch, third.prompt, third.max_tokens, third.sampled) == (first.branch, 5, 18, 2)
    assert (third.arrived, third.deadline, third.sampling) == (10.0, 70.0, first.sampling)
    assert third.request != first.request
    session.said(third.request, 12)
    session.over(third.request, 1)
    done = next(each for each in session.replies(3) if isinstance(each, w.Done))
    assert (done.position, done.usage.output, done.usage.prompt) == (6, 3, 3)
    assert socket == 2


def test_who_is_back_before_the_pause_goes_on_at_once(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"detach": "pause"})
    first = begin(session)
    session.said(first.request, 10)
    session.detach()
    session.attach()
    session.asked()
    (second,) = session.over(first.request, 1, "cancelled")
    assert (second.prompt, second.max_tokens, second.sampled) == (4, 19, 1)


def test_a_pause_leaves_others_and_what_is_decided_alone(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"detach": "pause"})
    other = session.attach("d")
    mine = begin(session, stop_token_ids=[9])
    (theirs,) = session.send(
        w.Fork(id=1, branch=None, as_=["b"]),
        w.Append(id=2, branch="b", tokens=[5]),
        w.Generate(id=3, branch="b"),
        socket=other,
    )
    session.said(mine.request, 10, 9)
    session.detach()
    assert session.asked() == []
    session.over(mine.request, 2, "stop")
    session.detach(other)
    assert session.asked() == [m.CancelRequest(theirs.request)]


def test_a_pause_at_the_last_token_ends_it(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"detach": "pause"})
    first = begin(session, max_tokens=2)
    session.said(first.request, 10, 11)
    session.detach()
    session.over(first.request, 2, "cancelled")
    assert not session.core.generations.busy
    session.attach()
    assert session.asked() == []


def test_a_paused_generation_is_cancelled_where_it_waits(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"detach": "pause"})
    first = begin(session)
    session.said(first.request, 10)
    session.detach()
    session.over(first.request, 1, "cancelled")
    other = session.attach("d")
    session.asked()
    assert session.send(w.Cancel(id=1, branch=["main"]), socket=other) == []
    segment: Any = session.branch().segments[-1]
    assert segment.ended
    session.attach()
    assert session.asked() == []


def test_all_ends_with_the_engine(alone: Callable[..., Alone]) -> None:
    session = alone(running=1)
    first, *_ = session.send(
        w.Append(id=1, tokens=[5, 6, 7]),
        w.Fork(id=2, as_=["a"]),
        w.Generate(id=3),
        w.Generate(id=4, branch="a"),
    )
    session.said(first.request, 10)
    session.now = 12.0
    session.core.fail(RamifyError("broken"), session.now)
    done, refused = session.reply(3), session.reply(4)
    assert (done.reason, done.error, done.message, done.usage.output) == (
        "error",
        "internal",
        "broken",
        1,
    )
    assert done.usage.total_ms == 2000.0
    assert (refused.code, refused.message) == ("internal", "broken")
    assert not session.core.generations.busy


def test_a_generation_is_metered_from_its_begin(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(w.Append(id=1, tokens=[5, 6, 7]))
    op = w.Generate(id=3, max_tokens=5)
    before = session.state.meter.held
    session.send(op)
    assert session.state.meter.held - before == SEGMENT + op_bytes(op)


def test_what_waits_longest_is_submitted_first(alone: Callable[..., Alone]) -> None:
    session = alone(running=1)
    (first,) = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, n=4, max_tokens=3))
    order = [first.branch]
    for _ in range(3):
        (first,) = session.over(first.request, 0)
        order.append(first.branch)
    assert order == [session.branch(f"main.2.{i}").handle for i in (1, 2, 3, 4)]


def test_a_stop_string_after_a_pause_is_cut_in_the_new_request(
    alone: Callable[..., Alone], tokenizer: Tokenizer
) -> None:
    """What a request is cut to is counted from where it began."""
    session = alone(opened={"detach": "pause"})
    first = begin(session, stop=["de"])
    session.said(first.request, *letters(tokenizer, "abc"))
    session.detach()
    session.over(first.request, 3, "cancelled")
    session.attach()
    (second,) = session.asked()
    assert second.sampled == 3
    session.said(second.request, *letters(tokenizer, "xd"))
    assert session.said(second.request, *letters(tokenizer, "ef")) == [
        m.CancelRequest(second.request, keep=1, reason="stop")
    ]
    session.over(second.request, 1, "stop")
    done = next(each for each in session.replies(2) if isinstance(each, w.Done))
    assert (done.position, done.usage.output) == (7, 4)


def asked_as_chat(session: Alone, **fields: Any) -> m.Submit:
    (submit,) = session.send(
        w.Append(id=1, messages=[w.ChatMessage(role="user", content="Hi")]),
        w.Generate(id=2, max_tokens=20, **fields),
    )
    assert isinstance(submit, m.Submit)
    return submit


@pytest.mark.parametrize("keep_open", [False, True])
def test_a_turn_that_a_stop_string_ends_is_closed_unless_it_is_to_go_on(
    alone: Callable[..., Alone], tokenizer: Tokenizer, keep_open: bool
) -> None:
    session = alone(context=500)
    submit = asked_as_chat(session, stop=["c"], keep_open=keep_open)
    session.said(submit.request, *letters(tokenizer, "abc"))
    session.over(submit.request, 2, "stop")
    assert session.branch().tail is (Tail.OPEN if keep_open else Tail.CLOSED)
    assert session.branch().reason == "stop"


@pytest.mark.parametrize("reason", ["length", "cancelled", "deadline"])
def test_a_turn_that_was_cut_short_stays_open(
    alone: Callable[..., Alone], tokenizer: Tokenizer, reason: str
) -> None:
    session = alone(context=500)
    submit = asked_as_chat(session)
    session.said(submit.request, *letters(tokenizer, "ab"))
    if reason == "cancelled":
        session.send(w.Cancel(id=3))
    session.over(submit.request, 2, reason)
    assert (session.branch().tail, session.branch().reason) == (Tail.OPEN, reason)
    assert session.reply(2).reason == reason


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_who_wants_the_text_gets_it_in_done(
    alone: Callable[..., Alone], tokenizer: Tokenizer, quiet: bool, hidden: bool
) -> None:
    session = alone(opened={"parts": True})
    submit = begin(session, quiet=quiet, hidden=hidden)
    session.said(submit.request, *letters(tokenizer, " ab"))
    session.over(submit.request, 3)
    done = session.reply(2)
    assert done.text == (" ab" if quiet and not hidden else None)
    assert done.content == (None if hidden else "ab")
    assert (done.reasoning, done.tool_calls, done.stop) == (None, None, None)
    deltas = [each for each in session.sent if isinstance(each, w.Delta)]
    assert "".join(each.text for each in deltas) == ("" if quiet or hidden else " ab")
    assert done.revision == session.state.revision


@pytest.mark.parametrize("reasoning", [None, "de"])
def test_what_a_strict_template_is_told_of_a_turn_is_metered(
    alone: Callable[..., Alone],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    reasoning: str | None,
) -> None:
    session = alone(opened={"template": "strict", "tools": [{"name": "add"}]})
    calls: Any = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    said = w.ChatMessage(role="assistant", content="abc", reasoning=reasoning, tool_calls=calls)
    held = []
    for ident, spoken in ((1, None), (3, said)):
        monkeypatch.setattr(session.core.writer.speech, "spoken", lambda *_, told=spoken: told)
        (submit,) = session.send(w.Append(id=ident, tokens=[5]), w.Generate(id=ident + 1, max_tokens=9))
        session.said(submit.request, *letters(tokenizer, "ab"))
        session.over(submit.request, 2, "stop")
        segment: Any = session.branch().segments[-1]
        assert segment.spoken is spoken
        held.append(segment._bytes)
    assert held[1] - held[0] == 3 + len(reasoning or "") + json_bytes(calls)
