"""The life of a request: overlap, ends, cancels, deadlines. Step by step, with checked fakes."""

from types import SimpleNamespace

import msgspec
import pytest

from ramify.actors.scheduler import accounts
from ramify.actors.scheduler.request import SchedulerError, note_forced
from ramify.actors.scheduler.suspects import MOST
from ramify.protocol.cluster import LOT
from ramify.protocol.messages import CancelRequest, CancelSession, Submit
from ramify.protocol.plan import NO_TOKEN, STUCK, StepResult, pack, unpack
from ramify.protocol.sampling import SamplingParams


def ident(request, session=1):
    return session << 32 | request


R1 = ident(1)


def test_tokens_equal_the_reference_and_the_branch_holds_them(world, expected):
    w = world()
    w.run(w.submit(max_tokens=5))
    want = expected([1, 2, 3], 0, 5)
    assert w.output[R1] == want
    assert w.cache.branches[R1] == [1, 2, 3, *want]
    finished = w.finished[R1]
    assert (finished.reason, finished.output, finished.prompt) == ("length", 5, 3)
    assert (finished.cached, finished.computed) == (0, 3)
    w.check_idle()


def test_first_plan_follows_submit_without_a_step_between(world):
    w = world()
    w.turn(w.submit())
    assert len(w.settles) == 1
    assert not w.sent
    w.settled()
    assert [len(plan.extends) for plan in w.sent] == [1, 0]
    assert len(unpack(w.sent[1].decodes)) == 1  # planned before the first token is known


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_surplus_step_when_the_end_is_known(world, expected, in_flight, max_tokens):
    w = world(in_flight=in_flight)
    w.run(w.submit(max_tokens=max_tokens))
    assert w.output[R1] == expected([1, 2, 3], 0, max_tokens)
    assert w.executor.computed == 3 + max_tokens - 1
    w.check_idle()


@pytest.mark.parametrize(("in_flight", "surplus"), [(1, 0), (2, 1)])
def test_a_stop_token_is_found_one_step_late_and_the_surplus_is_dropped(
    world, expected, in_flight, surplus
):
    free = expected([1, 2, 3], 0, 10)
    stop = free[4]
    want = free[: free.index(stop) + 1]
    w = world(in_flight=in_flight)
    w.run(w.submit(max_tokens=10, stop_token_ids=[stop]))
    assert w.output[R1] == want
    assert w.cache.branches[R1] == [1, 2, 3, *want]
    assert w.finished[R1].reason == "stop"
    assert w.executor.computed == 3 + len(want) - 1 + surplus
    w.check_idle()


def test_a_stop_token_at_the_last_place_is_a_stop(world, expected):
    last = expected([1, 2, 3], 0, 1)[0]
    w = world()
    w.run(w.submit(max_tokens=1, stop_token_ids=[last]))
    assert w.finished[R1].reason == "stop"


def test_context_length_ends_a_request(world, expected):
    w = world(context=8)
    w.run(w.submit(max_tokens=100))
    assert w.output[R1] == expected([1, 2, 3], 0, 5)
    assert w.finished[R1].reason == "length"
    assert w.executor.computed == 3 + 4


def test_a_prompt_that_fills_the_context_generates_nothing(world):
    w = world(context=3)
    w.run(w.submit())
    assert (w.finished[R1].reason, w.finished[R1].output) == ("length", 0)
    w.check_idle()


def test_too_long(world):
    w = world(context=10, pages=6)
    w.run(
        w.submit(1, range(11)),
        w.submit(2, range(7)),
        w.submit(3, range(6), max_tokens=1),
        w.submit(4, [], max_tokens=1),
    )
    assert [w.finished[ident(i)].error for i in (1, 2, 3, 4)] == [
        "too_long",
        "too_long",
        None,
        "bad_request",
    ]
    w.check_idle()


def test_prefill_only(world):
    w = world(budget=16)
    w.run(w.submit(tokens=range(40), max_tokens=0))
    finished = w.finished[R1]
    assert (finished.reason, finished.output, finished.first_token) == ("length", 0, 0.0)
    assert len(w.cache.resident) == 40
    assert R1 not in w.output
    assert all(not extend.sample for plan in w.sent for extend in plan.extends)
    w.check_idle()
    w.run(w.submit(2, None, branch=R1, max_tokens=1))
    assert w.finished[ident(2)].cached == 39
    assert w.finished[ident(2)].computed == 1


def test_long_prompts_are_chunked_beside_decodes(world, expected):
    w = world(budget=16, pages=200)
    w.turn(w.submit(1, [1, 2, 3], max_tokens=12))
    w.cache_settles()
    w.result()
    w.run(w.submit(2, range(50), max_tokens=2))
    assert w.output[R1] == expected([1, 2, 3], 0, 12)
    assert w.output[ident(2)] == expected(range(50), 0, 2)
    assert (15, 1) in w.executor.ran  # a decode first, the rest of the budget is prefill
    assert max(work + decodes for work, decodes in w.executor.ran) == 16


def test_chunks_are_committed_as_they_complete(world):
    w = world(budget=16, pages=200)
    w.run(w.submit(1, range(50), max_tokens=1))
    computed = [commit.computed for settle in w.settles for commit in settle.commits]
    assert computed == [16, 32, 48, 50]


def test_a_reused_row_gets_no_stale_tokens(world, expected):
    stop = expected([1, 2, 3], 0, 1)[0]
    w = world(rows=1)
    w.run(
        w.submit(1, [1, 2, 3], max_tokens=9, stop_token_ids=[stop]),
        w.submit(2, [4, 5], max_tokens=3),
        w.submit(3, [6], max_tokens=3),
    )
    assert w.output[R1] == [stop]
    assert w.output[ident(2)] == expected([4, 5], 0, 3)
    assert w.output[ident(3)] == expected([6], 0, 3)
    assert {plan.opens[0].row for plan in w.sent if plan.opens} == {0}
    w.check_idle()


def test_growth_is_asked_ahead_and_never_beyond_the_end(world, expected):
    w = world(lookahead=4, pages=100)
    w.run(w.submit(max_tokens=23))
    assert w.output[R1] == expected([1, 2, 3], 0, 23)
    acquire = w.settles[0].acquires[0]
    grown = [grow.tokens for settle in w.settles for grow in settle.grows]
    assert acquire.extra + sum(grown) == 22
    assert max(grown) == 4
    steps = [decodes for _, decodes in w.executor.ran]
    assert steps == [0, *[1] * 22, 0]  # the last one only closes the row


def test_one_message_per_session_per_step(world):
    w = world()
    w.turn(w.submit(1, [1]), w.submit(2, [2]), w.submit(3, [3], session=2))
    w.cache_settles()
    w.result()
    assert [(s, [p.request for p in t.progress]) for s, t in w.messages] == [
        (1, [ident(1), ident(2)]),
        (2, [ident(3, 2)]),
    ]


def test_settle_precedes_the_end(world):
    w = world()
    w.turn(w.submit(max_tokens=1))
    w.settled()
    before = len(w.settles)
    w.result()
    assert w.settles[before].commits[0].final
    assert R1 in w.finished  # and `World.turn` checked that the cache knew


def test_logits_that_are_not_finite_end_their_request_only(world, expected):
    w = world()
    good = ident(2)
    w.turn(w.submit(max_tokens=6), w.submit(request=2, tokens=(7, 8), max_tokens=6))
    w.cache_settles()
    w.result()
    result = w.executor.run()
    tokens = unpack(result.tokens)
    assert len(tokens) == 2
    tokens[0] = NO_TOKEN
    w.turn(StepResult(result.step, result.rows, pack(tokens), result.computed, result.elapsed_us))
    w.run()
    bad = w.finished[R1]
    assert (bad.reason, bad.error, bad.output) == ("error", "internal", 1)
    assert w.finished[good].reason == "length"
    assert len(w.output[good]) == 6
    w.check_idle()


def test_logprobs_pass_through(world):
    w = world()
    w.run(
        w.submit(1, [1], max_tokens=3, sampling=SamplingParams(logprobs=2)),
        w.submit(2, [2], max_tokens=3),
    )
    assert len(w.logprobs[R1]) == 3
    assert w.logprobs[ident(2)] == []


def test_penalties_get_the_history_once(world):
    w = world()
    w.run(w.submit(max_tokens=2, sampling=SamplingParams(frequency_penalty=0.5), sampled=1))
    opened = w.sent[0].opens[0]
    assert (unpack(opened.history).tolist(), opened.sampled) == ([1, 2, 3], 1)


def test_a_pause_continues_the_random_stream(world, expected):
    w = world()
    w.run(w.submit(1, max_tokens=3))
    w.run(w.submit(2, None, branch=R1, max_tokens=3, sampled=3))
    assert w.output[R1] + w.output[ident(2)] == expected([1, 2, 3], 0, 6)
    assert w.finished[ident(2)].computed == 1


def test_times_and_queue(world):
    w = world(rows=1)
    w.run(w.submit(1, [1], max_tokens=3), w.submit(2, [2], max_tokens=1))
    first, second = w.finished[R1], w.finished[ident(2)]
    assert first.arrived <= first.started < first.first_token < first.ended
    assert second.started >= first.ended


# --- cancel -----------------------------------------------------------------------------------


def test_cancel_waiting(world):
    w = world(rows=1)
    w.turn(w.submit(1, [1], max_tokens=9), w.submit(2, [2]))
    w.settled()
    w.turn(CancelRequest(ident(2)))
    assert w.finished[ident(2)].reason == "cancelled"
    assert w.finished[ident(2)].output == 0
    w.run()
    assert w.finished[R1].output == 9
    w.check_idle()


def test_cancel_before_anything_was_done(world):
    w = world()
    w.turn(w.submit(1), CancelRequest(R1))
    assert w.finished[R1].reason == "cancelled"
    assert not w.settles
    w.check_idle()


def test_cancel_while_acquiring_gives_the_pages_back(world):
    w = world()
    w.turn(w.submit(1))
    w.turn(CancelRequest(R1))
    w.turn(CancelRequest(R1, reason="stop"))
    assert R1 not in w.finished
    w.run()
    assert w.finished[R1].reason == "cancelled"
    assert not w.sent
    w.check_idle()


def test_cancel_while_prefilling_keeps_what_was_computed(world):
    w = world(budget=16, pages=100)
    w.turn(w.submit(1, range(60)))
    w.settled()
    w.result()
    w.cache_settles()
    w.turn(CancelRequest(R1))
    assert w.finished[R1].output == 0
    assert len(w.cache.resident) == 16
    w.run()
    assert len(w.executor.ran) == 4  # three were sent, then the close
    w.check_idle()


@pytest.mark.parametrize(("keep", "kept"), [(None, 3), (0, 0), (2, 2), (3, 3), (8, 3)])
def test_cancel_while_decoding_cuts(world, expected, keep, kept):
    w = world()
    w.turn(w.submit(1, max_tokens=20))
    w.cache_settles()
    for _ in range(3):
        w.result()
        w.cache_settles()
    w.turn(CancelRequest(R1, keep=keep, reason="stop"))
    assert w.finished[R1].output == kept
    assert w.finished[R1].reason == "stop"
    sent = len(w.sent)
    w.run()
    assert w.cache.branches[R1] == [1, 2, 3, *expected([1, 2, 3], 0, kept)]
    assert all(not plan.decodes for plan in w.sent[sent:])
    assert len(w.output[R1]) == 3  # in flight: dropped
    w.check_idle()


def test_cancel_with_the_last_token_in_flight(world):
    w = world()
    w.turn(w.submit(1, max_tokens=2))
    w.cache_settles()
    assert len(w.executor.plans) == 2
    w.turn(CancelRequest(R1))
    assert w.finished[R1].output == 0
    w.run()
    w.check_idle()


def test_cancel_of_the_finished_and_the_unknown_is_nothing(world):
    w = world()
    w.run(w.submit(1))
    w.run(CancelRequest(R1, keep=1), CancelRequest(99))
    assert w.finished[R1].output == 4


def test_a_branch_can_go_on_right_after_a_cancel(world, expected):
    w = world()
    w.turn(w.submit(1, max_tokens=20))
    w.cache_settles()
    w.result()
    w.turn(CancelRequest(R1))
    head = list(w.cache.branches[R1])
    assert len(head) == 4
    w.run(w.submit(2, None, branch=R1, max_tokens=3))
    assert w.output[ident(2)] == expected(head, 0, 3)
    w.check_idle()


def test_cancel_session_is_silent(world, expected):
    w = world(rows=2)
    w.turn(*(w.submit(i, [i, 5], max_tokens=9) for i in range(1, 6)), w.submit(1, [7], session=2))
    w.turn(CancelSession(1))  # some are acquiring
    w.run(w.submit(9, [9], session=3))
    w.turn(w.submit(10, [9, 9], session=4, max_tokens=20))
    w.cache_settles()
    w.result()
    w.run(CancelSession(4), CancelSession(77))
    assert set(w.finished) == {ident(1, 2), ident(9, 3)}
    assert w.output[ident(1, 2)] == expected([7], 0, 4)
    w.check_idle()


# --- deadlines, overload, failure ---------------------------------------------------------------


def test_deadline_running_waiting_and_acquiring(world):
    w = world(rows=1)
    w.turn(w.submit(1, [1], max_tokens=50, deadline=5.0), w.submit(2, [2], deadline=4.0))
    w.settled()
    assert w.core.next_deadline() == 4.0
    w.now = 4.0
    w.turn()
    assert w.finished[ident(2)].reason == "deadline"
    w.now = 5.5
    w.result()
    assert w.finished[R1].reason == "deadline"
    assert w.finished[R1].output == len(w.output[R1]) == 1
    assert w.core.next_deadline() is None
    w.run()
    w.turn(w.submit(3, [3], deadline=7.0))
    w.now = 7.0
    w.turn()
    w.run()
    assert w.finished[ident(3)].reason == "deadline"
    w.check_idle()


def test_input_computed_ahead_leaves_places_for_generations(world):
    w = world(rows=1, max_waiting=4)
    w.turn(*(w.submit(i, [i], max_tokens=0) for i in range(1, 6)))
    assert [i for i in range(1, 6) if ident(i) in w.finished] == [3, 4, 5]
    assert w.finished[ident(3)].error == "overloaded"
    w.turn(*(w.submit(i, [i]) for i in (6, 7, 8)))
    assert [i for i in (6, 7, 8) if ident(i) in w.finished] == [8]
    w.run()
    w.check_idle()


def test_overloaded(world):
    w = world(rows=1, max_waiting=2)
    w.run(*(w.submit(i, [i]) for i in range(1, 5)))
    assert [w.finished[ident(i)].error for i in (1, 2, 3, 4)] == [None, None, "overloaded", "overloaded"]
    w.check_idle()


def test_a_tenant_that_fills_the_queue_leaves_places_for_others(world):
    """Its sessions are one tenant; who has few requests finds room as long as anybody does."""
    w = world(rows=1, max_waiting=90)
    flood = [w.submit(i, [i], session=1 + i % 5, owner="flood") for i in range(1, 101)]
    w.turn(*flood)
    refused = [e.request for e in flood if e.request in w.finished]
    assert len(refused) == 100 - 81
    assert {w.finished[request].error for request in refused} == {"overloaded"}
    other = [w.submit(i, [i], session=9, owner="other") for i in range(201, 206)]
    w.turn(*other)
    assert not any(e.request in w.finished for e in other)
    w.run(steps=5000)
    assert {w.finished[e.request].reason for e in other} <= {"stop", "length"}
    w.check_idle()
    more = [w.submit(i, [i], session=1, owner="flood") for i in range(301, 311)]
    w.run(*more, steps=5000)
    assert {w.finished[e.request].error for e in more} == {None}


def test_a_branch_that_is_gone(world):
    w = world()
    w.run(Submit(R1, 5, 3, 1, SamplingParams()))
    assert w.finished[R1].error == "no_branch"
    w.check_idle()


def test_what_ran_goes_on_with_another_executor(world, expected):
    """Prompts and decodes, with an Acquire under way; who comes and who leaves meanwhile."""
    w = world(rows=2, budget=16)
    w.turn(w.submit(1, [1], max_tokens=9), w.submit(2, range(40), max_tokens=3))
    w.settled()
    w.result()
    w.turn(w.submit(3, [3], session=2, priority=1))
    w.result()
    assert w.replies
    w.die()
    assert w.core.lifecycle.down == "it died"
    w.turn(w.submit(4, [4]), w.submit(5, [5]), CancelRequest(R1 + 4))
    w.cache_settles()
    assert not w.executor.plans
    assert not w.cache.runs
    assert set(w.finished) == {R1 + 4}
    w.back()
    w.run()
    assert w.core.lifecycle.down is None
    for request, prompt, limit in ((1, [1], 9), (2, [*range(40)], 3), (4, [4], 4)):
        assert w.output[R1 - 1 + request] == expected(prompt, 0, limit)
    assert w.core.lifecycle.retractions["executor"] >= 2
    w.check_idle()


def test_a_request_that_dies_twice_alone_is_refused(world):
    w = world()
    w.turn(w.submit(1, max_tokens=9))
    w.cache_settles()
    for _ in range(3):
        w.result()
    w.die()
    w.cache_settles()
    w.back()
    w.cache_settles()
    assert not w.finished
    w.die()
    w.cache_settles()
    assert w.finished[R1].error == "internal"
    assert "died twice while it ran this request" in w.finished[R1].message
    assert len(w.output[R1]) == w.finished[R1].output == 3
    w.back()
    w.run(w.submit(2))
    assert w.finished[R1 + 1].reason == "length"
    w.check_idle()


def test_executors_that_die_while_a_request_makes_progress(world, expected):
    """Whoever kills executors from outside ends no request, unless it is hit very often."""
    w = world()
    w.turn(w.submit(1, max_tokens=40))
    w.cache_settles()
    for death in range(MOST):
        w.result()
        w.die()
        w.cache_settles()
        assert bool(w.finished) == (death == MOST - 1)
        w.back()
        w.cache_settles()
    assert "died 8 times" in w.finished[R1].message
    assert w.output[R1] == expected([1, 2, 3], 0, 8)


def test_only_the_request_that_kills_executors_is_refused(world, expected):
    """Whatever it runs beside: behind its second death, suspects run alone."""
    w = world(rows=4)
    killer = R1 + 2
    w.turn(*(w.submit(i, [i], max_tokens=9, session=i) for i in (1, 2)), w.submit(3, [3], max_tokens=9))
    deaths = 0
    while w.replies or w.executor.plans or w.core.lifecycle.down is not None:
        if w.replies:
            w.settled()
        elif w.core.lifecycle.down is not None:
            w.back()
        elif killer in {opened.request for plan in w.executor.plans for opened in plan.opens}:
            deaths += 1
            w.die()
            if deaths == 1:
                w.turn(w.submit(4, [4]))
        else:
            w.result()
    assert deaths == 3
    assert w.finished[killer].error == "internal"
    done = {r: f.output for r, f in w.finished.items() if r != killer}
    assert sorted(done.values()) == [4, 9, 9]
    for request, output in w.output.items():
        assert output == expected([request & 255], 0, len(output))
    w.check_idle()


def test_another_executor_may_have_a_smaller_pool(world):
    w = world(pages=64)
    w.turn(w.submit(1, range(30), max_tokens=30), w.submit(2, range(50), session=2))
    w.settled()
    w.die()
    w.cache_settles()
    w.back(pages=40)
    w.run()
    assert w.finished[R1].reason == "length"
    assert w.finished[R1].output <= 11
    assert w.finished[2 << 32 | 2].error == "too_long"
    w.check_idle()


@pytest.mark.parametrize("wrong", ["step", "rows", "tokens", "logprobs"])
def test_a_contradicting_result_raises(world, wrong):
    w = world()
    w.turn(w.submit(1))
    w.settled()
    good = w.executor.run()
    bad = {
        "step": (7, good.rows, good.tokens, []),
        "rows": (good.step, pack([3]), good.tokens, []),
        "tokens": (good.step, good.rows, b"", []),
        "logprobs": (good.step, good.rows, good.tokens, [None, None]),
    }[wrong]
    step, rows, tokens, logprobs = bad
    with pytest.raises(SchedulerError):
        w.turn(StepResult(step, rows, tokens, 1, 1, logprobs))


def test_a_request_twice_raises(world):
    w = world()
    w.turn(w.submit(1))
    with pytest.raises(SchedulerError):
        w.turn(w.submit(1))


def test_a_request_that_never_ran_started_when_it_ended(world):
    w = world(rows=1)
    w.turn(w.submit(1))
    w.cache_settles()
    w.turn(w.submit(2))
    w.now = 7.5
    w.turn(CancelRequest(ident(2)))
    w.run()
    assert (w.finished[ident(2)].started, w.finished[ident(2)].first_token) == (7.5, 0.0)


def test_deadlines_of_requests_that_ended_do_not_pile_up(world):
    w = world()
    for number in range(1, 67):
        w.run(w.submit(number, [number], deadline=1e9), CancelRequest(ident(number)))
    assert len(w.core.lifecycle.deadlines) == 66
    w.turn(w.submit(67, [67], deadline=1e9))
    assert [number for _, number in w.core.lifecycle.deadlines] == [ident(67)]
    w.run()
    w.check_idle()


def test_what_lacks_for_first_tokens(world):
    """Input ahead of its generation has none."""
    w = world()
    pace = w.core.planner.pace
    w.turn(w.submit(1, [1, 2, 3], max_tokens=0))
    assert pace.waiting == 0
    w.turn(w.submit(2, [4, 5, 6], max_tokens=2))
    assert pace.waiting == 3
    w.run()
    assert pace.waiting == 0
    w.check_idle()


def test_which_idle_sessions_are_forgotten(world):
    """Those that would start at the current virtual time anyway, and tenants without a session."""
    w = world()
    w.run(w.submit(1, [1], session=1, owner="one", max_tokens=1))
    w.run(w.submit(1, [2], session=2, owner="two", max_tokens=1))
    w.turn(w.submit(1, [3], session=3, owner="three", max_tokens=9))
    core = w.core
    virtual = core.lifecycle.admission.queue.virtual
    for session, served, own in ((1, virtual, 0), (2, virtual + 1, 0)):
        account = core.accounts[session]
        account.tenant.served, account.tenant.virtual, account.served = served, 5, 5 + own
    core.lifecycle.accounts.sweep()
    assert sorted(core.accounts) == [2, 3]
    assert sorted(core.tenants) == ["three", "two"]
    assert core.lifecycle.accounts._sweep_at == 1024
    core.accounts[2].tenant.served = virtual
    core.accounts[2].served = 6
    core.lifecycle.accounts.sweep()
    assert sorted(core.accounts) == [2, 3]  # its tenant's other sessions have had less
    core.accounts[2].served = 5
    core.lifecycle.accounts.sweep()
    assert (sorted(core.accounts), sorted(core.tenants)) == ([3], ["three"])
    w.run()
    w.check_idle()


@pytest.mark.parametrize(("tail", "reason"), [([NO_TOKEN], "error"), ([9, NO_TOKEN], "stop"), ([8], "")])
def test_what_an_accepted_run_may_end_in(world, tail, reason):
    """A token that is missing is the end of its request, but not behind a stop token; what was sampled
    before it is told."""
    w = world(drafts=3, policy="dice", rows=8, budget=64)
    w.turn(w.submit(1, [1, 2, 3], max_tokens=50, stop_token_ids=[9]))
    w.cache_settles()
    w.result()
    w.cache_settles()
    planner = w.core.planner
    while (step := planner.in_flight[0]).asked is None or step.asked[0] < 2:
        w.result()
        w.cache_settles()
    ident = 1 << 32 | 1
    before = len(w.output[ident])
    w.executor.plans.popleft()
    tokens = [7, *tail]
    w.turn(
        StepResult(
            step.step, step.rows, pack(tokens), 3, 1000, counts=pack([len(tokens)]),
            drafted=pack([step.asked[0]]),
        )
    )  # fmt: skip
    told = w.output[ident][before:]
    assert told == [7, *tail[: 1 if reason != "error" else 0]]
    if reason:
        w.cache_settles()
        assert w.finished[ident].reason == reason
        assert w.cache.branches[ident] == [1, 2, 3, *w.output[ident]]
        assert w.finished[ident].accepted >= 1


def test_forced_tokens_are_counted_where_they_stand():
    """A result in which nothing was forced says nothing: the flags of the next one come behind it."""
    run = SimpleNamespace(
        live=True, request=SimpleNamespace(constrained=True), out=[1, 2], forced=bytearray()
    )
    note_forced(SimpleNamespace(bound=[run]), StepResult(1, pack([0]), pack([7]), 0, 0, forced=b"\1"))
    assert run.forced == b"\0\0\1"
    assert run.forced.count(1, 0, 2) == 0  # of the two that are kept


def test_the_first_token_of_one_that_sat_steps_out(world, expected):
    """It comes with the step that brings it, and the output is the same."""
    w = world()
    w.executor.absence = 1.0
    w.turn(w.submit(max_tokens=3))
    w.settled()
    for _ in range(4):
        w.now += 1.0
        w.result()
    request = w.core.requests[R1]
    assert (request.first_token, w.output) == (0.0, {})
    w.executor.absence = 0.0
    w.now += 1.0
    while not w.output:
        w.result()
    assert request.first_token == w.now
    w.run()
    assert w.output[R1] == expected([1, 2, 3], 0, 3)
    w.check_idle()


@pytest.mark.parametrize("several", [False, True])
def test_a_constraint_that_is_stuck_ends_its_request_with_the_reason(world, expected, several):
    w = world()
    w.turn(w.submit(1), w.submit(2, (4, 5)))
    w.settled()
    w.result()
    result = w.executor.run()
    counts = pack([1, 1]) if several else b""
    tokens = unpack(result.tokens)
    tokens[0] = STUCK
    w.turn(msgspec.structs.replace(result, tokens=pack(tokens), counts=counts, reasons=["no way on"]))
    w.run()
    finished = w.finished[ident(1)]
    assert (finished.reason, finished.error, finished.output) == ("error", "bad_constraint", 1)
    assert "no way on" in finished.message
    assert w.output[ident(2)] == expected([4, 5], 0, 4)
    w.check_idle()


def test_load_says_what_is_not_computed_yet(world):
    """For routers: prompt tokens of all requests, minus what is computed or was found; page counts."""
    w = world()
    w.turn(w.submit())
    before = w.core.load(heard=7)
    assert (before.heard, before.queued, before.waiting, before.decoding) == (7, 3, 1, 0)
    assert (before.wanted, before.hold_s) == (3, 0.0)
    w.settled()
    assert w.core.load().queued == 3
    w.result()
    during = w.core.load()
    assert (during.queued, during.decoding, during.context) == (0, 1, 4)
    w.run()
    after = w.core.load()
    assert (after.queued, after.waiting, after.decoding, after.wanted) == (0, 0, 0, 0)
    finished = w.finished[R1]
    assert after.hold_s == finished.ended - finished.started
    assert after.free + after.evictable == after.slots > 0


def test_load_says_how_much_is_beyond_a_lot_of_each_prompt(world):
    w = world(pages=2 * LOT, context=2 * LOT, budget=1024)
    w.turn(w.submit(tokens=list(range(LOT + 500))), w.submit(session=2, tokens=[1, 2, 3]))
    before = w.core.load()
    assert (before.queued, before.excess, before.long) == (LOT + 503, 500, 1)
    w.run()
    after = w.core.load()
    assert (after.queued, after.excess, after.long) == (0, 0, 0)


def test_who_goes_on_from_a_history_has_had_the_service_of_those_before(world):
    """A stateless request has a session of its own: it would start as if it had had nothing."""
    w = world()
    w.run(w.submit(1, [1] * 9, session=1, max_tokens=3, history=b"one"))
    w.run(w.submit(1, [2], session=9, owner="other", max_tokens=1))
    accounts = w.core.accounts
    first = accounts[1].served
    assert first > 0
    w.run(w.submit(1, [3] * 5, session=2, max_tokens=1, history=b"two", follows=b"one"))
    assert accounts[2].served == accounts[2].tenant.served > first
    w.run(w.submit(1, [4], session=3, max_tokens=1, history=b"three", follows=b"never seen"))
    assert accounts[3].served < first
    w.run(w.submit(2, [5], session=9, owner="other", max_tokens=1, history=b"four", follows=b"three"))
    assert accounts[9].served > accounts[3].served  # nobody has had less for it
    assert accounts[9].tenant is w.core.tenants["other"]


def test_so_many_histories_are_remembered(world, monkeypatch):
    monkeypatch.setattr(accounts, "PROGRAMS", 64)
    w = world()
    numbers = range(2, 64 + 3)
    w.run(w.submit(1, [1] * 50, session=1, max_tokens=1, history=b"first"))
    for number in numbers:
        w.run(w.submit(1, [1], session=number, max_tokens=1, history=b"%d" % number))
    last = numbers[-1]
    w.run(w.submit(1, [1], session=last + 1, max_tokens=1, follows=b"first", history=b"late"))
    w.run(w.submit(1, [1], session=last + 2, max_tokens=1, follows=b"%d" % last, history=b"later"))
    assert w.core.accounts[last + 1].served < 50
    assert w.core.accounts[last + 2].served > w.core.accounts[last].served
