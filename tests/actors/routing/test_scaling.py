"""More replicas when first tokens are late, fewer when nothing is."""

from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.routing.scaling import DOWN_S, UP_S, Scaling
from ramify.protocol.cluster import ReplicaLoad

IDLE = ReplicaLoad(slots=1000, free=1000, prefill_rate=1000.0)
LATE = ReplicaLoad(slots=1000, free=500, queued=3000, prefill_rate=1000.0)  # 3 s


def look(scaling: Scaling, loads: list[ReplicaLoad], seconds: float, now: float, coming: int = 0) -> int:
    """After so many seconds in which it was like this."""
    found = 0
    for tick in range(int(seconds * 4) + 1):
        found = scaling.wanted(loads, coming, now + tick / 4)
        if found != max(scaling.least, len(loads) + coming):
            return found
    return found


def test_a_queue_that_lasts_brings_more() -> None:
    scaling = Scaling(1, 4, target_s=1.0)
    assert look(scaling, [LATE], UP_S / 2, 0.0) == 1
    assert scaling.wanted([IDLE], 0, UP_S) == 1  # it was short
    assert look(scaling, [LATE], UP_S / 2, UP_S) == 1
    assert look(scaling, [LATE, LATE], UP_S, 100.0) == 3
    assert look(scaling, [LATE, LATE], 10 * UP_S, 200.0, coming=1) == 3  # that one comes first
    assert look(scaling, [LATE] * 4, UP_S, 300.0) == 4


def test_late_first_tokens_bring_more_whatever_queues() -> None:
    scaling = Scaling(1, 4, target_s=1.0)
    for number in range(20):
        scaling.first_token(1.5 if number % 4 == 0 else 0.1, 100.0)
    assert scaling.ttft(100.0) == 1.5
    assert look(scaling, [IDLE], UP_S, 100.0) == 2
    assert scaling.ttft(200.0) == 0.0  # of late there were none
    scaling.first_token(9.0, 200.0)
    assert scaling.ttft(200.0) == 0.0  # one is not enough


def test_a_full_pool_brings_more() -> None:
    full = ReplicaLoad(slots=1000, waiting=3, prefill_rate=1000.0)
    assert look(Scaling(1, 4, 1.0), [full, full], UP_S, 0.0) == 3
    assert look(Scaling(1, 4, 1.0), [full, IDLE], UP_S, 0.0) == 2


def test_a_long_calm_takes_one_away() -> None:
    scaling = Scaling(1, 4, target_s=1.0)
    assert look(scaling, [IDLE, IDLE, IDLE], DOWN_S / 2, 0.0) == 3
    assert look(scaling, [IDLE, IDLE, IDLE], DOWN_S, DOWN_S / 2) == 2
    assert look(scaling, [IDLE], 2 * DOWN_S, 1000.0) == 1
    held = ReplicaLoad(slots=1000, free=600, prefill_rate=1000.0)  # 80 % of one that is left
    assert look(scaling, [held, held], 2 * DOWN_S, 2000.0) == 2


@given(
    st.lists(
        st.builds(
            ReplicaLoad,
            queued=st.integers(0, 10**9),
            waiting=st.integers(0, 100),
            free=st.integers(0, 500),
            evictable=st.integers(0, 500),
            slots=st.just(1000),
            prefill_rate=st.floats(0, 1e6),
        ),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_it_stays_within_its_bounds(loads: list[ReplicaLoad], coming: int) -> None:
    scaling = Scaling(2, 8, 0.5)
    for tick in range(2000):
        wanted = scaling.wanted(loads, coming, tick / 4)
        assert wanted >= 2 or not loads
        assert wanted <= max(8, coming)
