"""Requests that have given tokens scored: over chunks, retractions and a warm cache, each score once."""

import math

import pytest

from ramify.actors.scheduler.targets import Targets, targets_of
from ramify.protocol.messages import CancelRequest
from ramify.protocol.plan import pack, pack_floats, unpack, unpack_floats

PROMPT = list(range(40))
PLACES = [3, 15, 16, 16, 31, 39, 39]
TARGETS = [4, 9, 17, 5, 96, 0, 1]
LONG = list(range(96))
EACH = {"places": list(range(95)), "targets": LONG[1:]}  # as `echo` asks


def scoring(w, request=1, tokens=PROMPT, places=PLACES, targets=TARGETS, **more):
    more = {"max_tokens": 0} | more
    return w.submit(request, tokens, places=pack(places), targets=pack(targets), **more)


def scores(w, event):
    return unpack_floats(w.finished[event.request].scores).tolist()


def test_over_chunks(world, expected_scores):
    """40 tokens in steps of 16; nothing is sampled, and the branch stays as it is."""
    w = world()
    event = scoring(w)
    w.run(event)
    finished = w.finished[event.request]
    assert (finished.reason, finished.output, finished.prompt) == ("length", 0, 40)
    assert scores(w, event) == expected_scores(PROMPT, PLACES, TARGETS)
    assert [len(plan.extends[0].targets) // 4 for plan in w.sent if plan.extends] == [2, 3, 2]
    assert w.cache.branches[event.branch] == PROMPT
    w.check_idle()


@pytest.mark.parametrize(("cost", "chunks"), [(0.0, [16, 16, 8]), (1.0, [8] * 5), (3.0, [4] * 10)])
def test_a_scored_position_takes_room_for_its_logits(world, expected_scores, cost, chunks):
    """Steps of 16: every position is scored, so each takes the room of `1 + cost` prompt tokens."""
    w = world(logits_cost=cost, max_waiting=8)
    places = list(range(40))
    event = scoring(w, places=[0, *places], targets=[3, *places])  # one position has two targets
    w.run(event)
    assert scores(w, event) == expected_scores(PROMPT, [0, *places], [3, *places])
    assert [len(extend.tokens) // 4 for plan in w.sent for extend in plan.extends] == chunks
    w.check_idle()


def test_only_scored_positions_take_more(world):
    w = world(logits_cost=2.0, budget=20)
    event = scoring(w, places=[38, 39], targets=[5, 6])
    w.run(event)
    sizes = [len(extend.tokens) // 4 for plan in w.sent for extend in plan.extends]
    assert sizes[0] == 20
    assert sum(sizes) == 40
    w.check_idle()


@pytest.mark.parametrize("first", [0, 7, 39])
def test_what_is_scored_runs_again_and_nothing_before_it(world, expected_scores, first):
    w = world()
    w.run(w.submit(1, PROMPT, max_tokens=1))
    places = [first, 39]
    event = scoring(w, 2, places=places, targets=[5, 6])
    w.run(event)
    assert scores(w, event) == expected_scores(PROMPT, places, [5, 6])
    assert (w.finished[event.request].cached, w.finished[event.request].computed) == (first, 40 - first)
    w.check_idle()


def test_siblings_in_one_go(world, expected_scores):
    """Ends of a shared prefix: the prefix is computed once, their own tokens by each."""
    w = world(rows=8, budget=64)
    w.run(w.submit(99, PROMPT, max_tokens=1))
    before, sent = w.executor.computed, len(w.sent)
    events = []
    for i in range(6):
        tokens = [*PROMPT, 50, 51, 60 + i]
        events.append(scoring(w, i + 1, tokens, [39, 40, 41, 42], [50, 51, 60 + i, 7]))
    w.run(*events)
    for i, event in enumerate(events):
        tokens = [*PROMPT, 50, 51, 60 + i]
        assert scores(w, event) == expected_scores(tokens, [39, 40, 41, 42], [50, 51, 60 + i, 7])
    assert w.executor.computed - before == 6 * 4
    assert (
        sum(bool(plan.extends) for plan in w.sent[sent:]) == 1
    )  # nobody waited for another one's tokens
    w.check_idle()


@pytest.mark.parametrize("results", [0, 1, 2])
def test_a_retraction_in_the_middle_loses_and_doubles_none(world, expected_scores, results):
    """A higher priority takes the only row when so many chunks have come back."""
    w = world(rows=1, pages=200)
    event = scoring(w, tokens=LONG, **EACH)
    w.turn(event)
    w.settled()
    for _ in range(results):
        w.result()
        w.cache_settles()
    urgent = w.submit(2, [90, 91], priority=3, max_tokens=2, session=2)
    w.run(urgent)
    assert w.core.lifecycle.retractions["priority"] == 1
    assert w.order == [urgent.request, event.request]
    assert scores(w, event) == expected_scores(LONG, **EACH)
    w.check_idle()


def test_the_pages_of_a_retracted_one_may_be_gone(world, expected_scores):
    w = world(rows=1, pages=104)
    event = scoring(w, tokens=LONG, **EACH)
    w.turn(event)
    w.settled()
    w.result()
    w.cache_settles()
    w.run(w.submit(2, [*LONG[1:], 0, 0, 0, 0], priority=3, max_tokens=2, session=2))
    assert w.core.lifecycle.computed_twice >= 16
    assert scores(w, event) == expected_scores(LONG, **EACH)
    w.check_idle()


def test_cancelled_in_the_middle(world):
    w = world()
    event = scoring(w)
    w.turn(event)
    w.settled()
    w.result()
    w.turn(CancelRequest(event.request))
    w.run()
    finished = w.finished[event.request]
    assert (finished.reason, finished.output) == ("cancelled", 0)
    assert len(finished.scores) < 4 * len(TARGETS)
    w.check_idle()


def test_somebody_waits_for_it(world):
    """It goes before what is computed ahead, and is no prefill to be put off."""
    w = world(rows=1)
    ahead = w.submit(1, range(20), max_tokens=0)
    event = scoring(w, 2)
    w.run(ahead, event)
    assert w.order[0] == event.request


@pytest.mark.parametrize(
    "wrong",
    [
        {"places": [40], "targets": [1]},
        {"places": [-1], "targets": [1]},
        {"places": [-1, 3], "targets": [1, 1]},
        {"places": [3, 40], "targets": [1, 1]},
        {"places": [3, 4], "targets": [-1, 1]},
        {"places": [3, 4], "targets": [1, 97]},
        {"places": [3, 2], "targets": [1, 1]},
        {"places": [3], "targets": [1, 1]},
        {"places": [3], "targets": []},
        {"places": [3], "targets": [97]},
        {"places": [3], "targets": [1], "max_tokens": 5},
    ],
)
def test_what_no_executor_can_run_fails_alone(world, wrong):
    w = world()
    event = scoring(w, **wrong)
    other = w.submit(2, [1, 2], max_tokens=2)
    w.run(event, other)
    assert w.finished[event.request].error == "internal"
    assert w.finished[other.request].reason == "length"
    w.check_idle()


def test_scores_that_are_not_finite(world):
    """The request ends with an error; what it computed is not kept."""
    w = world(cache=None)
    event = scoring(w)
    run = w.executor.run

    def spoiled():
        result = run()
        count = len(result.scores) // 4
        return type(result)(
            result.step, result.rows, result.tokens, result.computed, 1000, [],
            pack_floats([math.nan] * count),
        )  # fmt: skip

    w.executor.run = spoiled
    w.cache._commit = strict(w.cache)
    w.run(event)
    finished = w.finished[event.request]
    assert (finished.reason, finished.error) == ("error", "internal")
    assert not w.cache.resident
    w.check_idle()


def strict(cache):
    """The fake knows no `finite`: it publishes nothing of what is not."""
    commit = type(cache)._commit

    def wrapped(message):
        if message.finite is False:
            assert (message.computed, message.final) == (0, True)
        commit(cache, message)

    return wrapped


def test_targets():
    targets = Targets(unpack(pack([2, 2, 5])), unpack(pack([7, 8, 9])))
    assert (targets.rerun, targets.end) == (2, 6)
    assert targets.take(0, 2) == (b"", b"", 0)
    assert targets.take(0, 5) == (pack([2, 2]), pack([7, 8]), 2)
    assert targets.take(2, 6) == (pack([5]), pack([9]), 3)
    targets.scores.extend([-1.0, -2.0])
    assert targets.rerun == 5
    targets.scores.append(-3.0)
    assert targets.rerun is None


def test_a_request_without_targets(world):
    assert targets_of(world().submit(), 97) is None
