"""Where requests of a model with fixed states begin, step by step."""

import pytest

from ramify.actors.cache import snapshots
from ramify.actors.cache.cache import RadixCache
from ramify.protocol import messages as m
from ramify.protocol.cluster import ListenKv
from ramify.protocol.plan import pack, unpack
from tests.actors.cache.integrity import check


class States:
    """A cache whose requests need two slots, checked after each message."""

    def __init__(self, pages: int = 400, slots: int = 12) -> None:
        self.cache = RadixCache(pages, block=4, state_slots=slots)
        self.count = 0
        self.own: dict[int, list[int]] = {}

    def open(self, tokens: int | list[int], branch: int = 1) -> None:
        self.cache.open_branch(m.OpenBranch(branch))
        self.extend(tokens, branch)

    def extend(self, tokens: int | list[int], branch: int = 1) -> None:
        given = list(range(tokens)) if isinstance(tokens, int) else tokens
        self.cache.extend_branch(m.ExtendBranch(branch, pack(given)))
        check(self.cache)

    def acquire(self, branch: int = 1, extra: int = 0) -> m.Granted | m.Denied:
        self.count += 1
        verdict = self.cache.acquire(m.Acquire(self.count, branch, extra, slots=2))
        check(self.cache)
        if isinstance(verdict, m.Granted):
            self.own[self.count] = unpack(verdict.slots).tolist()
        return verdict

    def grant(self, branch: int = 1, extra: int = 0) -> m.Granted:
        verdict = self.acquire(branch, extra)
        assert isinstance(verdict, m.Granted), verdict
        return verdict

    def commit(self, computed: int, *states: int, tokens: int = 0, **more: bool) -> None:
        """The newest request has computed so much; states stand at these positions."""
        told = [part for at in states for part in (at, self.own[self.count].pop())]
        output = pack(range(900, 900 + tokens))
        self.cache.commit(m.Commit(self.count, computed, output, states=pack(told), **more))
        check(self.cache)

    def run(self, *states: int, branch: int = 1, tokens: int = 0) -> m.Granted:
        granted = self.grant(branch, tokens)
        prompt = granted.cached + len(granted.tokens) // 4
        self.commit(max(prompt, prompt + tokens - 1), *states, tokens=tokens, final=True, finite=True)
        return granted

    def resident(self, branch: int = 1) -> int:
        return self.cache.inspect(m.Inspect(1, 1, [branch])).resident[0]


def test_a_request_begins_at_the_deepest_snapshot_and_replays_what_has_kv_behind() -> None:
    states = States()
    states.open(300)
    first = states.run(100, 200)
    assert (first.cached, first.state, first.replayed) == (0, 0, 0)
    assert states.resident() == 200
    again = states.run()
    assert (again.cached, again.replayed, len(again.tokens) // 4) == (200, 99, 100)
    assert again.state != 0


def test_the_end_of_a_turn_is_where_the_next_one_begins() -> None:
    states = States()
    states.open(100)
    states.run(100 + 9, tokens=10)
    states.extend([1, 2, 3])
    granted = states.grant()
    assert (granted.cached, granted.replayed) == (109, 0)


def test_siblings_read_one_snapshot() -> None:
    states = States()
    states.open(100)
    states.run(99)
    granted = [states.grant(), states.grant()]
    assert {(each.cached, each.state) for each in granted} == {(99, granted[0].state)}


def test_a_snapshot_that_runs_read_is_not_evicted() -> None:
    states = States(slots=4)
    states.open(100)
    states.run(99)
    granted = states.grant()
    states.open([5] * 50, branch=2)
    denied = states.acquire(2)  # one slot is read, two are written
    assert isinstance(denied, m.Denied)
    assert (denied.reason, denied.slots > 0, denied.short) == ("memory", True, 0)
    states.cache.commit(m.Commit(2, 100, final=True))
    assert isinstance(states.acquire(2), m.Granted)
    assert granted.state


def test_kv_that_is_evicted_takes_its_snapshots_along() -> None:
    states = States(pages=120)
    states.open(100)
    states.run(50, 99)
    assert len(states.cache.residency.snapshots or ()) == 2
    states.open([7] * 60, branch=2)
    states.run(branch=2)
    assert states.resident() == 50
    assert states.grant().cached == 50


def test_states_behind_bad_logits_are_dropped_and_proven_ones_stay() -> None:
    states = States()
    states.open(100)
    states.run(50)
    states.grant()
    states.commit(90, 80)
    assert states.resident() == 80
    states.cache.commit(m.Commit(states.count, 0, final=True, finite=False))
    check(states.cache)
    assert states.resident() == 50
    assert states.grant().proven


def test_a_state_that_nobody_has_sampled_over_is_not_proven() -> None:
    states = States()
    states.open(100)
    states.grant()
    states.commit(100, 60, final=True)
    states.extend([1])
    assert not states.grant().proven


def test_a_state_behind_proven_kv_is_proven_on_its_own() -> None:
    states = States()
    states.open(100)
    states.run(50)
    states.grant()
    states.commit(100, 80, final=True)
    granted = states.grant()
    assert (granted.cached, granted.proven) == (80, False)
    states.commit(100, final=True, finite=True)
    assert states.grant().proven


def test_a_sibling_waits_for_a_snapshot_that_saves_it_a_replay() -> None:
    states = States(pages=1500, slots=20)
    states.open(400)
    states.run(50)
    states.cache.fork_branch(m.ForkBranch(1, [2, 3], 300))
    states.extend([1] * 80, branch=2)
    states.extend([2] * 80, branch=3)
    granted = states.grant(2)
    assert (granted.cached, granted.replayed) == (50, 250)
    assert 300 in unpack(granted.marks)
    denied = states.cache.acquire(m.Acquire(99, 3, 0, slots=2))
    assert isinstance(denied, m.Denied)
    assert (denied.reason, denied.on) == ("shared", states.count)
    states.commit(300, 300)
    granted = states.grant(3)
    assert (granted.cached, granted.replayed) == (300, 0)


def test_a_sibling_does_not_wait_for_a_run_that_has_ended() -> None:
    states = States(pages=1500, slots=20)
    states.open(400)
    states.run(50)
    states.cache.fork_branch(m.ForkBranch(1, [2], 300))
    states.extend([1] * 80, branch=2)
    states.grant(2)
    states.commit(60, final=True)
    states.cache.fork_branch(m.ForkBranch(1, [3], 300))
    states.extend([2] * 80, branch=3)
    assert states.grant(3).cached == 50


def test_an_op_that_ended_inside_of_a_merged_node_is_where_a_snapshot_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "NEAR", 5)
    states = States()
    states.open(30)
    states.extend([1] * 40)
    states.extend([2] * 3)
    assert states.cache.tree.nodes == 2
    assert unpack(states.grant().marks).tolist() == [30, 70]


def test_a_snapshot_at_a_position_that_has_one_is_given_back() -> None:
    states = States()
    states.open(100)
    states.run(60)
    states.grant()
    states.commit(100, 60 + 30, final=True)
    states.grant()
    states.commit(100, 95, final=True)
    assert len(states.cache.residency.snapshots or ()) == 3


@pytest.mark.parametrize("at", [0, 61, 200])
def test_a_state_must_be_of_what_is_computed(at: int) -> None:
    states = States()
    states.open(100)
    states.grant()
    with pytest.raises(ValueError, match="state"):
        states.commit(60, at)


def test_pages_hold_one_token() -> None:
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(10, 4, state_slots=4)


def test_routers_hear_of_what_can_be_resumed() -> None:
    states = States(slots=6)
    states.cache.listen_kv(ListenKv(1))
    states.open(40)
    states.run(20)
    (stored,) = states.cache.news()
    assert len(stored.stored) // 8 == 5  # blocks of four tokens, up to the snapshot
    states.open([7] * 40, branch=2)
    states.run(39, branch=2)
    told = states.cache.news()
    assert [(len(each.stored) // 8, len(each.removed) // 8) for each in told] == [(9, 0)]
    node = states.cache.branches.head(1)
    while not node.snapshot:
        assert node.parent is not None
        node = node.parent
    assert states.cache.residency.snapshots is not None
    states.cache.residency.snapshots.drop(node)
    check(states.cache)
    told = states.cache.news()
    assert [(len(each.stored) // 8, len(each.removed) // 8) for each in told] == [(0, 5)]
