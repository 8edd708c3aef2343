"""What is owed to the cache, by itself: commits, grows, acquires, and the answers to them."""

import msgspec
import pytest

from ramify.actors.scheduler.request import Account, Request, RequestRun, SchedulerError
from ramify.actors.scheduler.settlements import Settlements
from ramify.protocol.messages import Acquire, Commit, Denied, Grow, Grown, Settle, Settled, Submit
from ramify.protocol.sampling import SamplingParams


@pytest.fixture
def settlements(world):
    """Ten pages of four slots; six slots are asked for ahead."""
    return make(world)


def make(world, lookahead=6, **info):
    info = msgspec.structs.replace(world(pages=10, page_size=4).info, **info)
    return Settlements(info, lookahead)


def asked(number, *, limit=30, **sampling):
    submit = Submit(number, 100 + number, 10, limit, SamplingParams(**sampling))
    return Request(submit, Account(number), number, number, 0, limit)


def running(number, *, limit=30, pages=3):
    """A run whose prompt of ten tokens is computed."""
    run = RequestRun(asked(number, limit=limit), 0, 0, b"", bytes(4 * pages), b"", True, 4)
    run.computed = 10
    return run


def denied(*numbers, free=0, evictable=0, grown=()):
    return Settled(
        [Denied(n, "gone") for n in numbers], [Grown(n, b"") for n in grown], free, evictable, 0
    )


def test_nothing_to_say(settlements):
    assert settlements.take([], []) is None
    assert (settlements.outstanding, settlements.ready, settlements.available) == (0, True, 10)


def test_everything_goes_out_at_once(settlements):
    request = asked(3)
    request.leave = 5
    settlements.commit(running(1))
    settlements.final(Commit(2, 7, final=True))
    assert settlements.finals == 1
    assert settlements.take([request], [running(4)]) == Settle(
        [Commit(1, 10, finite=True), Commit(2, 7, final=True)],
        [Grow(4, 8)],
        [Acquire(3, 103, 6, False, 10, None, 5)],
    )
    assert (settlements.finals, settlements.commits, settlements.outstanding) == (0, {}, 1)


def test_each_alone_is_something_to_say(settlements):
    assert settlements.take([asked(1)], []) is not None
    assert settlements.take([], [running(2)]) is not None
    settlements.commit(running(3))
    assert settlements.take([], []) is not None


def test_a_commit_of_what_nobody_saw(settlements):
    run = running(1, limit=0)
    settlements.commit(run)
    assert settlements.commits == {1: Commit(1, 10)}
    half = running(2)
    half.computed = 8
    settlements.commit(half)
    assert settlements.commits[2] == Commit(2, 8)


def test_the_last_commit_replaces_the_one_before(settlements):
    settlements.commit(running(1))
    settlements.final(Commit(1, 12, final=True))
    assert settlements.commits == {1: Commit(1, 12, final=True)}


@pytest.mark.parametrize(("limit", "history"), [(30, True), (1, True), (0, False)])
def test_penalties_want_the_history(settlements, limit, history):
    settle = settlements.take([asked(1, limit=limit, frequency_penalty=0.5)], [])
    assert settle.acquires[0].history == history


def test_one_is_outstanding_unless_ends_wait(settlements):
    settlements.take([asked(1)], [])
    assert not settlements.ready
    for number in range(2, 5):
        settlements.final(Commit(number, 0, final=True))
        assert settlements.ready
        settlements.take([], [])
        assert not settlements.ready
    settlements.final(Commit(9, 0, final=True))
    assert (settlements.outstanding, settlements.ready) == (4, False)
    settlements.settled(denied(1))
    assert settlements.ready


def test_a_commit_is_owed_until_it_is_answered(settlements):
    assert not settlements.owes(1)
    settlements.commit(running(1))
    assert settlements.owes(1)
    settlements.take([], [])
    settlements.take([asked(5)], [])
    assert settlements.owes(1)
    assert not settlements.owes(5)
    settlements.settled(denied())
    assert not settlements.owes(1)


def test_answers_come_in_order(settlements):
    first, second, run = asked(1), asked(2), running(3)
    settlements.take([first], [run])
    settlements.take([second], [])
    assert settlements.settled(denied(1, grown=[3], free=2, evictable=5)) == ([first], [run])
    assert settlements.available == 7
    assert settlements.settled(denied(2)) == ([second], [])
    with pytest.raises(SchedulerError, match="Settled without a Settle"):
        settlements.settled(denied())


@pytest.mark.parametrize("wrong", [denied(2, grown=[3]), denied(1, grown=[4]), denied(1)])
def test_an_answer_that_does_not_fit(settlements, wrong):
    settlements.take([asked(1)], [running(3)])
    with pytest.raises(SchedulerError, match=r"asked were \(\[1\], \[3\]\)"):
        settlements.settled(wrong)
    assert settlements.available == 10


@pytest.mark.parametrize(("limit", "slots"), [(30, 8), (7, 4), (8, 8), (3, 0)])
def test_whole_pages_and_no_more_than_can_be_used(settlements, limit, slots):
    """It has 12 slots and could use 10 + limit - 1."""
    assert settlements.growth(running(1, limit=limit)) == slots


def test_whether_there_are_pages_to_grow_by(settlements):
    settlements.available = 2
    assert settlements.could_grow(running(1))
    settlements.available = 1
    assert not settlements.could_grow(running(1))
    assert settlements.could_grow(running(1, limit=7))


def test_with_drafts_a_run_gets_slots_for_some_steps(world):
    settlements = make(world, drafter="any", max_drafts=3)
    assert settlements.growth(running(1, limit=100)) == 12  # three steps of four tokens
    assert settlements.growth(running(1, limit=5)) == 4
    assert make(world, 40, drafter="any", max_drafts=3).growth(running(1, limit=100)) == 40


def test_a_drafter_that_reads_the_past_is_given_it(world):
    for reads in (False, True):
        settlements = make(world, drafter="any", max_drafts=3, drafts_from_history=reads)
        settle = settlements.take([asked(1), asked(2, limit=0)], [])
        assert [acquire.history for acquire in settle.acquires] == [reads, False]
