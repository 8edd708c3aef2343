"""What the router hears of the sessions that go where it said."""

import numpy as np

from ramify.actors.cluster.placing import Placing
from ramify.actors.cluster.router import Policy
from ramify.actors.kit.clock import ManualClock
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams

SUBMIT = Submit(1, 2, 3, 4, SamplingParams())


def prompt(tokens: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.int32).tobytes()


def test_work_that_was_sent_counts_until_a_report_has_it() -> None:
    placing = Placing(ManualClock())
    assert placing.place(1, "", prompt(100, 1)) is None
    for replica in (0, 1):
        placing.joined(replica)
    first = placing.place(1, "", prompt(1000, 1))
    assert first is not None
    placing.submitted(1, first, SUBMIT)
    assert placing.router.work(first) == 1000
    other = placing.place(2, "", prompt(1000, 2))
    assert other == 1 - first
    placing.extended(1, 50)
    placing.submitted(1, first, SUBMIT)
    assert placing.router.work(first) == 1050
    placing.load(first, ReplicaLoad(heard=1, queued=700))
    assert placing.router.work(first) == 750
    placing.left(1)
    placing.extended(1, 50)  # it has gone
    placing.submitted(1, first, SUBMIT)
    placing.shut(first)
    assert placing.place(3, "", prompt(10, 3)) == other
    placing.gone(first)
    placing.left(2)


def test_a_session_is_hot_where_far_more_waits_than_elsewhere() -> None:
    clock = ManualClock()
    placing = Placing(clock, Policy(rest_s=20.0))
    for replica in (0, 1):
        placing.joined(replica)
    at = placing.place(1, "", prompt(10, 1))
    assert at is not None
    placing.submitted(1, at, SUBMIT)
    placing.load(at, ReplicaLoad(heard=1, queued=1_000_000))
    assert not placing.hot(1, at)  # it has just come
    clock.advance(21.0)
    assert placing.hot(1, at)
    placing.load(at, ReplicaLoad(heard=1, queued=0))
    assert not placing.hot(1, at)
    assert not placing.hot(7, at)


def test_a_long_session_stays_where_computing_it_elsewhere_takes_longer() -> None:
    """It would leave, and be placed at the same replica again, or compute for seconds to save one."""
    clock = ManualClock()
    placing = Placing(clock)
    for replica in (0, 1):
        placing.joined(replica)
    long, short = placing.place(1, "", prompt(10, 1)), placing.place(2, "", prompt(10, 2))
    assert long is not None
    assert short is not None
    placing.submitted(1, long, Submit(1, 2, 100_000, 4, SamplingParams()))
    placing.submitted(2, short, Submit(2, 2, 1_000, 4, SamplingParams()))
    for replica in (0, 1):
        placing.load(replica, ReplicaLoad(heard=1, prefill_rate=40_000.0))
    clock.advance(60.0)
    for session, replica in ((1, long), (2, short)):
        placing.load(replica, ReplicaLoad(heard=1, prefill_rate=40_000.0, queued=60_000))
        assert placing.hot(session, replica) == (session == 2)
        placing.load(replica, ReplicaLoad(heard=1, prefill_rate=40_000.0))


def test_missed_events_are_noticed() -> None:
    placing = Placing(ManualClock())
    placing.joined(0)
    assert placing.events(0, [KvEvents(3, listener=1, reset=True), KvEvents(4)])
    assert not placing.events(0, [KvEvents(6), KvEvents(7)])
    assert placing.events(0, [KvEvents(7, listener=1, reset=True)])
