"""A prefix is offered to those who wait for it once the step that computes it was sent."""

import pytest

from ramify.actors.cache.cache import RadixCache
from ramify.protocol.messages import CancelRequest, ExtendBranch, OpenBranch
from ramify.protocol.plan import pack, unpack
from tests.actors.cache.integrity import check

PREFIX = list(range(20))


class Cache:
    """The radix cache as the world wants it."""

    def __init__(self, pages, page_size):
        self.cache = RadixCache(pages, page_size)
        self.branches = {}
        self.runs = self.cache.runs
        self.renew = self.cache.renew

    def put(self, branch, tokens):
        self.branches[branch] = list(tokens)
        self.cache.open_branch(OpenBranch(branch))
        self.cache.extend_branch(ExtendBranch(branch, pack(tokens)))

    def moved(self, executor, now):
        """It has no disk."""
        return ()

    def settle(self, settle):
        settled = self.cache.settle(settle)
        check(self.cache)
        return settled

    def check_idle(self):
        assert not self.cache.runs
        assert self.cache.referenced == 0


def ident(request):
    return 1 << 32 | request


@pytest.fixture(params=[1, 4])
def w(request, world):
    """Three siblings; the first has its pages, and the step with their prefix is in flight."""
    pages = 400 // request.param
    made = world(
        rows=4, budget=64, pages=pages, page_size=request.param, cache=Cache(pages, request.param)
    )
    made.turn(*(made.submit(i, [*PREFIX, 50, i], seed=i) for i in (1, 2, 3)))
    made.settled()
    assert (len(made.sent), len(made.settles)) == (1, 2)
    return made


def right(w, expected, requests):
    for i in requests:
        assert w.output[ident(i)] == expected([*PREFIX, 50, i], i, 4)
    w.check_idle()


def test_siblings_run_in_the_next_step(w, expected):
    """They ask again with the Settle that offers the prefix; the first one's decode waits for them."""
    (commit,) = w.settles[1].commits
    assert (commit.request, commit.computed, commit.final, commit.finite) == (ident(1), 22, False, None)
    assert [a.request for a in w.settles[1].acquires] == [ident(2), ident(3)]
    w.settled()
    assert len(w.sent) == 2  # the first one's result is not here yet
    cached = 21 if w.info.page_size == 1 else 20
    assert [(e.start, len(unpack(e.tokens))) for e in w.sent[1].extends] == [(cached, 22 - cached)] * 2
    assert unpack(w.sent[1].decodes).tolist() == [w.sent[0].opens[0].row]
    w.run()
    right(w, expected, (1, 2, 3))


def test_a_cache_that_is_slow_holds_nobody_up(w):
    """Whatever happens before it answers, the next step goes on without them."""
    w.turn()
    assert len(w.sent) == 2
    assert not w.sent[1].extends


def test_nothing_is_said_where_nobody_waits(world):
    w = world(rows=4, budget=64)
    w.turn(w.submit(1, PREFIX))
    w.settled()
    assert (len(w.sent), len(w.settles)) == (2, 1)


@pytest.mark.parametrize("granted", [False, True])
def test_the_first_one_is_cancelled_while_its_step_is_under_way(w, expected, granted):
    if granted:
        w.settled()
    w.turn(CancelRequest(ident(1), 0))
    w.run()
    assert w.finished[ident(1)].output == 0
    right(w, expected, (2, 3))
    assert sum(work for work, _ in w.executor.ran) < 22 + 2 * 4  # the prefix ran once


@pytest.mark.parametrize("granted", [False, True])
def test_the_executor_dies_before_the_prefix_is_computed(w, expected, granted):
    if granted:
        w.settled()
    w.die()
    w.back()
    w.run()
    right(w, expected, (1, 2, 3))


def test_a_retraction_gives_nothing_up_that_was_offered(w, expected):
    """It goes on behind its prompt, which the step under way computes."""
    w.settled()
    w.core.lifecycle.retract(w.core.lifecycle.runs[ident(1)], "memory")
    w.run()
    right(w, expected, (1, 2, 3))
    assert w.core.lifecycle.computed_twice <= 1 + w.info.page_size  # a decode, and the prompt's end
    assert sum(work for work, _ in w.executor.ran) <= 22 + 3 * w.info.page_size


def test_who_comes_while_the_step_is_under_way_does_not_wait_for_it(world, expected):
    w = world(rows=4, budget=64, in_flight=1)
    w.turn(w.submit(1, [*PREFIX, 1], seed=1))
    w.settled()
    w.turn(w.submit(2, [*PREFIX, 2], seed=2))
    w.cache_settles()  # it was denied, and granted
    assert [a.request for s in w.settles for a in s.acquires] == [ident(1), ident(2), ident(2)]
    assert w.core.running == 2
    assert len(w.sent) == 1
    w.run()
    assert w.executor.ran[:2] == [(21, 0), (1, 1)]
    assert w.output[ident(2)] == expected([*PREFIX, 2], 2, 4)
    w.check_idle()
