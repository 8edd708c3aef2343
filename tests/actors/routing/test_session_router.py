"""What the router hears of the sessions that go where it said."""

import numpy as np

from ramify.actors.routing.policy import RoutingPolicy
from ramify.actors.routing.session_router import SessionRouter
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams
from tests.manual_clock import ManualClock

SUBMIT = Submit(1, 2, 3, 4, SamplingParams())


def prompt(tokens: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.int32).tobytes()


def test_work_that_was_sent_counts_until_a_report_has_it() -> None:
    router = SessionRouter(ManualClock().now)
    assert router.place(1, "", prompt(100, 1)) is None
    for replica in (0, 1):
        router.joined(replica)
    first = router.place(1, "", prompt(1000, 1))
    assert first is not None
    router.submitted(1, first, SUBMIT)
    assert router.router.work(first) == 1000
    other = router.place(2, "", prompt(1000, 2))
    assert other == 1 - first
    router.extended(1, 50)
    router.submitted(1, first, SUBMIT)
    assert router.router.work(first) == 1050
    router.load(first, ReplicaLoad(heard=1, queued=700))
    assert router.router.work(first) == 750
    router.left(1)
    router.extended(1, 50)  # it has gone
    router.submitted(1, first, SUBMIT)
    router.shut(first)
    assert router.place(3, "", prompt(10, 3)) == other
    router.gone(first)
    router.left(2)


def test_a_session_is_hot_where_far_more_waits_than_elsewhere() -> None:
    clock = ManualClock()
    router = SessionRouter(clock.now, RoutingPolicy(rest_s=20.0))
    for replica in (0, 1):
        router.joined(replica)
    at = router.place(1, "", prompt(10, 1))
    assert at is not None
    router.submitted(1, at, SUBMIT)
    router.load(at, ReplicaLoad(heard=1, queued=1_000_000))
    assert not router.hot(1, at)  # it has just come
    clock.advance(21.0)
    assert router.hot(1, at)
    router.load(at, ReplicaLoad(heard=1, queued=0))
    assert not router.hot(1, at)
    assert not router.hot(7, at)


def test_a_long_session_stays_where_computing_it_elsewhere_takes_longer() -> None:
    """It would leave, and be placed at the same replica again, or compute for seconds to save one."""
    clock = ManualClock()
    router = SessionRouter(clock.now)
    for replica in (0, 1):
        router.joined(replica)
    long, short = router.place(1, "", prompt(10, 1)), router.place(2, "", prompt(10, 2))
    assert long is not None
    assert short is not None
    router.submitted(1, long, Submit(1, 2, 100_000, 4, SamplingParams()))
    router.submitted(2, short, Submit(2, 2, 1_000, 4, SamplingParams()))
    for replica in (0, 1):
        router.load(replica, ReplicaLoad(heard=1, prefill_rate=40_000.0))
    clock.advance(60.0)
    for session, replica in ((1, long), (2, short)):
        router.load(replica, ReplicaLoad(heard=1, prefill_rate=40_000.0, queued=60_000))
        assert router.hot(session, replica) == (session == 2)
        router.load(replica, ReplicaLoad(heard=1, prefill_rate=40_000.0))


def test_missed_events_are_noticed() -> None:
    router = SessionRouter(ManualClock().now)
    router.joined(0)
    assert router.events(0, [KvEvents(3, listener=1, reset=True), KvEvents(4)])
    assert not router.events(0, [KvEvents(6), KvEvents(7)])
    assert router.events(0, [KvEvents(7, listener=1, reset=True)])


def test_long_prompts_go_to_replicas_for_them_and_come_back_once() -> None:
    router = SessionRouter(ManualClock().now, prefill=1)
    long, short = prompt(5000, 1), prompt(3000, 2)
    router.joined(0)
    assert router.place(1, "", short) == 0  # there is no other
    assert not router.goes_on(0)
    router.joined(1)
    assert router.goes_on(0)
    assert not router.goes_on(1)
    assert router.place(2, "", short) == 1
    assert router.place(3, "", long) == 0
    assert router.router.work(1) == 3000  # none is kept for it there
    assert not router.hot(3, 0)
    router.left(3)
    assert router.place(3, "", long) == 1  # its KV comes along
    router.submitted(3, 1, SUBMIT)
    assert router.router.work(1) == 3000
    assert not router.hot(3, 1)
    router.extended(3, 6000)
    assert router.hot(3, 1)
    router.left(3)
    router.over(3)
    router.gone(0)
    assert router.place(4, "", long) == 1


def test_prompts_stay_where_kv_moves_too_slowly_or_they_take_no_time() -> None:
    router = SessionRouter(ManualClock().now, prefill=1)
    for replica in (0, 1):
        router.joined(replica)
    router.token_s = lambda: 1 / 30_000  # of 20,000 tokens a second, as long as none were told
    assert router.place(1, "", prompt(5000, 1)) == 1
    router.token_s = lambda: 1 / 50_000
    assert router.place(2, "", prompt(5000, 2)) == 0
    router.load(0, ReplicaLoad(prefill_rate=100_000.0))
    router.token_s = lambda: 0.0
    assert router.place(3, "", prompt(9000, 3)) == 1
    assert router.place(4, "", prompt(11_000, 4)) == 0


def test_a_prompt_is_computed_anew_if_who_computed_it_is_gone() -> None:
    router = SessionRouter(ManualClock().now, prefill=2)
    for replica in (0, 1, 2):
        router.joined(replica)
    first = router.place(1, "", prompt(5000, 1))
    assert first in (0, 1)
    router.gone(first)
    router.left(1)
    assert router.place(1, "", prompt(5000, 1)) == 1 - first
