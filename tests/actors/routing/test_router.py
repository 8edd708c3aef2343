"""Where sessions go: rules that always hold, by random programs; then one story for each rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.kit.blocks import BlockHasher, seed
from ramify.actors.routing.policy import RoutingPolicy
from ramify.actors.routing.router import MOST_UNHEARD, RESERVED_S, ReplicaRouter
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.plan import pack

BLOCK = 4
RATE = 1000.0


def hashes(tokens: list[int], namespace: str = "") -> bytes:
    return BlockHasher(BLOCK).chain(seed(namespace), np.array(tokens, dtype=np.int32)).tobytes()


def load(queued: int = 0, heard: int = 0, **more: float) -> ReplicaLoad:
    return ReplicaLoad(queued=queued, heard=heard, prefill_rate=RATE, **more)  # type: ignore[arg-type]


def make(count: int, **policy: float) -> ReplicaRouter:
    policy = {"away_s": 0.0, "near_s": 0.0, "near_share": 0.01, **policy}
    router = ReplicaRouter(RoutingPolicy(**policy), block=BLOCK)
    for replica in range(1, count + 1):
        router.joined(replica)
        router.events(replica, KvEvents(0, listener=1, reset=True))
        router.update(replica, load(), 0.0)
    return router


def place(router: ReplicaRouter, tokens: list[int], now: float = 0.0, namespace: str = "") -> int:
    placement = router.place(namespace, pack(tokens), now)
    assert placement is not None
    return placement.replica


PROMPT = list(range(400))

actions = st.one_of(
    st.tuples(st.just("joined"), st.integers(1, 6)),
    st.tuples(st.just("gone"), st.integers(1, 6)),
    st.tuples(st.just("drain"), st.integers(1, 6)),
    st.tuples(st.just("load"), st.integers(1, 6), st.integers(0, 5000)),
    st.tuples(st.just("events"), st.integers(1, 6), st.integers(0, 100)),
    st.tuples(st.just("snapshot"), st.integers(1, 6), st.integers(0, 100)),
    st.tuples(st.just("place"), st.integers(1, 400)),
    st.tuples(st.just("place"), st.integers(1, 400)),
    st.tuples(st.just("move"), st.integers(1, 6), st.integers(1, 400)),
    st.tuples(st.just("sent"), st.integers(1, 6), st.integers(0, 400)),
)


@given(st.lists(actions, max_size=60))
@settings(deadline=None)
def test_rules_that_always_hold(program: list[tuple[str, int] | tuple[str, int, int]]) -> None:
    """Only live replicas are chosen, none whose queue is beyond the bound; work is not negative."""
    router = ReplicaRouter(block=BLOCK)
    live: set[int] = set()
    known: set[int] = set()
    seqs: dict[int, int] = {}
    now = 0.0
    for what, number, *rest in program:
        now += 0.3
        if what == "joined":
            router.joined(number)
            live.add(number)
            known.add(number)
            seqs[number] = -1
        elif what in ("gone", "drain"):
            getattr(router, what)(number)
            live.discard(number)
            if what == "gone":
                known.discard(number)
        elif what == "load":
            router.update(number, load(rest[0], heard=rest[0] // 100), now)
        elif what == "events" and number in known:
            event = KvEvents(seqs[number] + 1, stored=hashes(PROMPT[: 4 * rest[0]]))
            assert router.events(number, event) is (seqs[number] >= 0)
            seqs[number] += seqs[number] >= 0
        elif what == "snapshot" and number in known:
            seqs[number] = rest[0]
            event = KvEvents(rest[0], hashes(PROMPT[: 4 * rest[0]]), listener=1, reset=True)
            assert router.events(number, event)
        elif what == "sent":
            router.sent(number, rest[0], now)
        elif what in ("place", "move"):
            work = {replica: router.work(replica) for replica in known}
            if what == "place":
                made = router.place("", pack(PROMPT[:number]), now)
                assert (made is None) == (not live)
            else:
                hot = router.hot(number, rest[0], now, since=now - 100.0)
                assert not hot or number in live
                made = None
            if made is not None:
                assert made.replica in live
                mean = sum(work[each] for each in live) / len(live)
                slack = router.policy.slack_s * router._rates()
                assert work[made.replica] <= router.policy.imbalance * mean + slack + 1e-6
                assert made.computes + made.cached == number
        assert {each for each in range(1, 7) if each in router} == known
        assert all(router.work(each) >= 0 for each in known)


def test_nobody_there() -> None:
    router = ReplicaRouter()
    assert router.place("", pack([1]), 0.0) is None
    router.joined(1)
    router.drain(1)
    assert router.place("", pack([1]), 0.0) is None
    router.resume(1)
    made = router.place("", pack([1]), 0.0)
    assert made is not None
    assert made.replica == 1
    router.gone(1)
    router.gone(1)
    router.resume(1)
    router.update(1, load(), 0.0)
    assert router.sent(1, 5, 0.0) == 0
    assert router.events(1, KvEvents(1))


def test_goes_where_its_prefix_is() -> None:
    router = make(4)
    router.events(3, KvEvents(1, stored=hashes(PROMPT)))
    made = router.place("", pack([*PROMPT[:100], 7, 7]), 0.0)
    assert made is not None
    assert (made.replica, made.cached, made.computes) == (3, 100, 2)
    router.events(3, KvEvents(2, removed=hashes(PROMPT)))
    assert {place(router, [i] * 100) for i in range(4)} == {1, 2, 3, 4}


def test_namespaces_share_nothing() -> None:
    router = make(2)
    router.events(2, KvEvents(1, stored=hashes(PROMPT, "a")))
    found = [router.place(name, pack(PROMPT), 0.0) for name in ("b", "", "a")]
    assert [each.cached for each in found if each is not None] == [0, 0, 400]


def test_a_burst_with_one_new_prefix_goes_where_that_is_being_computed() -> None:
    """Before any event: what was placed lately counts, as long as waiting there is sooner."""
    router = make(4, slack_s=5.0)
    first = place(router, PROMPT)
    assert [place(router, [*PROMPT, i]) for i in range(10)] == [first] * 10


def test_misses_go_to_the_least_loaded_and_not_to_the_smallest_tree() -> None:
    """The replica with the smallest cache is the busiest here."""
    router = make(3)
    for replica in (1, 2):
        router.events(replica, KvEvents(1, stored=hashes([replica] * 4000)))
    router.update(3, load(200), 0.0)
    router.update(2, load(100), 0.0)
    assert place(router, [9] * 40) == 1


def test_what_was_sent_counts_until_it_is_heard_of() -> None:
    """Slow prefills do not pile up: reports that do not know of them change nothing."""
    router = make(2)
    counts: dict[int, int] = {}
    for i in range(6):
        made = router.place("", pack([100 + i] * 300), 0.1)
        assert made is not None
        counts[made.replica] = router.sent(made.replica, made.computes, 0.1, made.ticket)
        router.update(1, load(0, heard=0), 0.2)
        router.update(2, load(0, heard=0), 0.2)
    assert counts == {1: 3, 2: 3}
    assert router.work(1) == router.work(2) == 900.0
    router.update(1, load(300, heard=2), 0.3)
    assert router.work(1) == 600.0
    router.update(1, load(100, heard=3), 0.4)
    assert router.work(1) == 100.0


def test_a_place_whose_request_does_not_come_is_given_up() -> None:
    router = make(1)
    router.place("", pack([1] * 100), 0.0)
    assert router.work(1) == 100.0
    router.update(1, load(), RESERVED_S + 0.1)
    assert router.work(1) == 0.0


def test_a_hot_prefix_spreads_before_its_replica_is_the_busiest_by_far() -> None:
    router = make(4)
    router.events(1, KvEvents(1, stored=hashes(PROMPT)))
    places = [place(router, [*PROMPT, *[500 + i] * 400]) for i in range(40)]
    counts = [places.count(replica) for replica in range(1, 5)]
    assert min(counts) >= 5
    works = [router.work(replica) for replica in range(1, 5)]
    assert max(works) <= 2 * sum(works) / 4 + RATE + 800


def test_the_bound_holds_whatever_is_cached() -> None:
    router = make(4)
    router.events(1, KvEvents(1, stored=hashes(PROMPT)))
    long = [*PROMPT, *range(1000, 6000)]
    router.events(1, KvEvents(2, stored=hashes(long)))
    router.update(1, load(1900), 0.0)  # computing would take longer; 1000 + 2 * 1900 / 4 is the bound
    assert place(router, long) == 1
    router.update(1, load(2100), 0.0)
    assert place(router, long) != 1


def test_a_replica_without_room_is_avoided() -> None:
    router = make(2)
    router.update(1, load(free=10, evictable=10, slots=1000, hold_s=20.0), 0.0)
    router.update(2, load(500, free=900, evictable=0, slots=1000), 0.0)
    assert place(router, [5] * 100) == 2


def test_a_gap_asks_for_a_snapshot_and_a_repeat_is_nothing() -> None:
    router = make(1)
    assert router.events(1, KvEvents(1, stored=hashes(PROMPT)))
    assert router.events(1, KvEvents(1, removed=hashes(PROMPT)))  # it came already
    made = router.place("", pack(PROMPT), 0.0)
    assert made is not None
    assert made.cached == 400
    assert not router.events(1, KvEvents(3))
    assert not router.events(1, KvEvents(4))
    assert router.events(1, KvEvents(9, hashes([1] * 8), listener=5, reset=True))
    assert router.events(1, KvEvents(9, hashes([2] * 8), listener=5))
    found = [router.place("", pack(tokens), 0.0) for tokens in ([3] * 8, [1] * 8, [2] * 8)]
    assert [each.cached for each in found if each is not None] == [0, 8, 8]
    assert router.events(1, KvEvents(10))


def test_tenants_stay_at_few_replicas_unless_those_are_busy() -> None:
    router = make(20, away_s=0.1)

    def where(name: str, now: float) -> int:
        return place(router, [hash((name, now)) & 0xFFFF] * 8, now, name)

    times = (100.0 * i for i in range(120))
    homes = {name: {where(name, next(times)) for _ in range(20)} for name in "abcdef"}
    assert all(len(home) <= 2 for home in homes.values())
    assert len(set().union(*homes.values())) > 5
    for replica in homes["a"]:
        router.update(replica, load(200), 12000.0)
    assert where("a", 12000.0) not in homes["a"]


def test_a_session_leaves_a_hot_replica_only() -> None:
    router = make(3)

    def hot(tokens: int = 400, now: float = 30.0) -> bool:
        return router.hot(1, tokens, now, since=0.0)

    router.update(1, load(800), 30.0)  # there in 0.8 s, elsewhere in 0.4
    assert not hot()
    router.update(1, load(2000), 30.0)
    assert hot()
    assert not hot(now=10.0)  # it has come lately
    assert not hot(2000)  # it would have to be computed there
    for replica in (2, 3):
        router.update(replica, load(1500), 30.0)
    assert not hot()  # it is no better there
    for replica in (2, 3):
        router.update(replica, load(0), 30.0)
    router.drain(1)
    assert not hot()  # all leave it
    router.gone(1)
    assert not hot()


def test_the_bound_is_a_reason_to_leave_soon() -> None:
    """A burst of sessions that came just now, and whose turns follow fast."""
    router = make(8)
    router.update(1, load(1500), 1.0)
    assert router.bound < 1500
    assert router.hot(1, 100, 1.0, since=0.5)
    router.update(1, load(1300), 1.0)
    assert router.bound > 1300
    assert not router.hot(1, 100, 1.0, since=0.5)


def test_nowhere_to_go() -> None:
    router = make(1)
    router.update(1, load(5000), 0.0)
    assert not router.hot(1, 10, 100.0, since=0.0)


def test_sessions_do_not_go_to_and_fro() -> None:
    """Two replicas whose loads change places each second: who has moved stays for a while."""
    router = make(2)
    at, since, moves = 1, 0.0, 0
    for second in range(1, 101):
        router.update(1 + second % 2, load(3000), second)
        router.update(2 - second % 2, load(0), second)
        if router.hot(at, 400, second, since=since):
            at, since, moves = place(router, PROMPT, second), float(second), moves + 1
    assert 0 < moves <= 5


def test_what_nobody_tells_of_is_bounded() -> None:
    router = make(1)
    for _ in range(MOST_UNHEARD + 10):
        router.sent(1, 1, 0.0)
    assert router.work(1) == MOST_UNHEARD


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_many_replicas_come_and_go(count: int) -> None:
    router = make(count)
    assert {place(router, [i] * 40) for i in range(count)} == set(range(1, count + 1))
    for replica in range(1, count + 1, 2):
        router.gone(replica)
        router.joined(1000 + replica)
    places = {place(router, [7000 + i] * 400) for i in range(2 * count)}
    assert len(router) == count
    assert all(each in router for each in places)


def test_long_contexts_make_steps_longer() -> None:
    """Of two replicas without queues, the one whose steps read less; what was sent counts at once."""
    router = make(2)
    busy = {"step_s": 0.02, "slots": 10_000_000, "evictable": 9_000_000}
    router.update(1, load(context=200_000, **busy), 0.0)
    router.update(2, load(context=100_000, **busy), 0.0)
    assert place(router, [1] * 8) == 2
    router.sent(2, 0, 0.0, holds=500_000)
    assert place(router, [2] * 8) == 1


def test_the_only_one_that_has_most_of_a_prompt_is_left_for_much_only() -> None:
    """Else the turns of a conversation would be computed by all."""
    router = make(3)
    router.events(1, KvEvents(1, stored=hashes(PROMPT)))
    router.update(1, load(700), 0.0)
    assert place(router, PROMPT) == 1  # in 0.7 s, elsewhere in 0.4
    router.update(1, load(950), 0.0)
    assert place(router, [*PROMPT, 1]) == 2


def test_a_short_prompt_waits_for_a_lot_of_a_long_one_only() -> None:
    """Replica 1 has one long prompt, 2 many short ones, which are less work."""
    router = make(2, lot=20.0, slack_s=10.0)
    router.update(1, load(queued=1000, excess=980, long=1), 0.0)
    router.update(2, load(queued=500), 0.0)
    assert place(router, [1] * 16) == 1
    assert place(router, [2] * 600) == 2  # as much of the long one goes first


def test_what_was_sent_counts_in_lots_too() -> None:
    router = make(2, lot=20.0, slack_s=10.0)
    router.sent(1, 1000, 0.0)
    router.sent(2, 500, 0.0)
    assert place(router, [1] * 16, now=RESERVED_S) in (1, 2)  # a lot ahead of it at either
    for _ in range(20):
        router.sent(2, 20, 0.0)
    assert place(router, [2] * 16, now=2 * RESERVED_S) == 1
    router.update(1, load(heard=1), 0.0)
    router.update(2, load(heard=21), 0.0)
    assert router.work(1) + router.work(2) == pytest.approx(16)  # the last place
    assert place(router, [3] * 400, now=4 * RESERVED_S) in (1, 2)
    assert float(abs(router._excess).sum()) == pytest.approx(380)


def test_scores_that_are_nearly_equal_take_turns() -> None:
    """In an order that is each router's own."""
    orders = []
    for number in (1, 2):
        router = ReplicaRouter(RoutingPolicy(slack_s=10.0), block=BLOCK, seed=number)
        for replica in range(50):
            router.joined(replica)
            router.update(replica, load(queued=replica % 5), 0.0)
        orders.append([place(router, [i] * 8) for i in range(50)])
        assert sorted(orders[-1]) == list(range(50))
        router.update(7, load(queued=100, heard=1), 0.0)
        assert 7 not in [place(router, [100 + i] * 8) for i in range(60)]
    assert orders[0] != orders[1]
