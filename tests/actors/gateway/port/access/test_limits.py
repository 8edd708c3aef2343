"""Token bucket against a model; the guard's counters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.gateway.port.access.buckets import DebtBucket, TokenBucket
from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded

STEPS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 30)), max_size=60)


@given(STEPS)
@settings(derandomize=True, deadline=None)
def test_bucket_never_gives_more_than_rate_and_burst(steps: list[tuple[int, int]]) -> None:
    rate, burst = 8, 16  # binary fractions of a second: the arithmetic is exact
    bucket = TokenBucket(rate, burst, 0.0)
    now, given_at = 0.0, [(0.0, 0.0)]
    for gap, tokens in steps:
        now += gap / 1024
        if bucket.take(tokens, now) == 0.0:
            given_at.append((now, min(tokens, burst)))
    for i, (start, _) in enumerate(given_at):
        taken = sum(tokens for when, tokens in given_at[i:])
        assert taken <= burst + rate * (now - start) + 1e-6


@given(st.integers(1, 100), st.integers(0, 100))
@settings(derandomize=True, deadline=None)
def test_waiting_as_told_is_enough(tokens: int, used: int) -> None:
    bucket = TokenBucket(8, 16, 0.0)
    bucket.take(used, 0.0)
    wait = bucket.take(tokens, 0.0)
    assert wait <= 2.0
    if wait:
        assert bucket.take(tokens, wait) == 0.0


def test_time_that_goes_back_is_ignored() -> None:
    bucket = TokenBucket(8, 16, 10.0)
    assert bucket.take(16, 5.0) == 0.0
    assert bucket.take(1, 5.0) > 0


def test_guard_refuses_whole_frames_and_turns_abusive() -> None:
    guard = SocketLimits(Limits(ops_per_frame=4, ops_per_second=10, ops_burst=20), 0.0)
    guard.admit(4, 0.0)
    with pytest.raises(LimitExceeded) as big:
        guard.admit(5, 0.0)
    assert big.value.details == {"max": 4, "ops": 5}
    for _ in range(4):
        guard.admit(4, 0.0)
    with pytest.raises(LimitExceeded) as fast:
        guard.admit(1, 0.0)
    assert fast.value.retry_ms == 101
    guard.admit(1, 0.101)
    assert not guard.abusive
    for _ in range(9):
        with pytest.raises(LimitExceeded):
            guard.admit(5, 0.101)
    assert guard.abusive


def test_violations_are_forgiven_with_time() -> None:
    guard = SocketLimits(Limits(ops_per_frame=1), 0.0)
    for second in range(0, 600, 6):
        with pytest.raises(LimitExceeded):
            guard.admit(2, float(second))
    assert not guard.abusive


def test_third_strike() -> None:
    guard = SocketLimits(Limits(), 0.0)
    assert [guard.strike() for _ in range(3)] == [False, False, True]


def test_pings_are_counted() -> None:
    guard = SocketLimits(Limits(ops_per_second=1, ops_burst=5), 0.0)
    for _ in range(15):
        guard.control(0.0)
        assert not guard.abusive
    guard.control(0.0)
    assert guard.abusive


def test_a_meter_counts_what_was_taken_already() -> None:
    meter = DebtBucket(rate=10, burst=20, now=0.0)
    meter.spend(20, 0.0)
    assert meter.wait(0.0) == 0.0
    meter.spend(5, 0.0)
    assert meter.wait(0.0) == 0.5
    meter.set_rate(5, 10, 0.0)
    assert meter.wait(0.0) == 1.0
    assert meter.wait(1.0) == 0.0
    assert meter.wait(0.5) == 0.0  # time that goes back is ignored
    meter.spend(11, 60.0)  # no more than a burst was saved up
    assert meter.wait(60.0) == pytest.approx(0.2)


def test_control_frames_cost_ops_and_too_many_are_abuse() -> None:
    guard = SocketLimits(Limits(ops_per_second=10, ops_burst=20), 0.0)
    for _ in range(30):
        guard.control(0.0)
    assert not guard.abusive
    guard.control(0.0)
    assert guard.abusive


def test_frames_are_read_as_fast_as_ops_allow() -> None:
    guard = SocketLimits(Limits(ops_per_second=10, ops_burst=20), 0.0)
    guard.received(0, 80, 0.0)
    assert guard.wait(0.0) == 0.0
    guard.received(0, 40, 0.0)
    assert guard.wait(0.0) == 1.0
