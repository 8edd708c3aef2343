"""Who runs when there is not room for all: order, fairness, sharing, memory, retraction."""

import pytest

from ramify.actors.scheduler.pace import FIRST_ON_CPU
from ramify.protocol.messages import SPARE, CancelRequest
from ramify.protocol.sampling import SamplingParams


def ident(request, session=1):
    return session << 32 | request


def test_priority_decides_when_rows_are_short(world):
    w = world(rows=1)
    w.run(*(w.submit(i, [i], priority=p) for i, p in ((1, -1), (2, 3), (3, 0))))
    assert w.order == [ident(2), ident(3), ident(1)]


def test_a_session_with_many_branches_does_not_starve_another(world):
    w = world(rows=4, pages=400)
    w.turn(*(w.submit(i, [i, 1], max_tokens=8) for i in range(1, 101)))
    w.cache_settles()
    w.result()
    w.run(w.submit(1, [7, 7], session=2, max_tokens=8))
    assert w.order.index(ident(1, 2)) < 10
    w.check_idle()


def test_nobody_starves_behind_a_popular_prefix(world):
    """A cold request against a stream of requests with a long cached prefix, same session."""
    prefix = list(range(40))
    w = world(rows=1, pages=200, budget=64, ageing=0.5)
    w.run(w.submit(1, [*prefix, 1], max_tokens=2))
    w.turn(w.submit(2, [9] * 30, max_tokens=2))
    following = 10
    w.turn(*(w.submit(i, [*prefix, i], max_tokens=2) for i in range(3, following)))
    for _ in range(400):
        if ident(2) in w.finished:
            break
        event = w.replies.popleft() if w.replies else w.executor.run()
        w.turn(event, w.submit(following, [*prefix, following], max_tokens=2))
        following += 1
    assert ident(2) in w.finished
    w.run()
    w.check_idle()


def test_children_of_a_fork_wait_for_their_prefix_and_run_together(world, expected):
    prefix = list(range(20))
    w = world(rows=8, pages=400, budget=64)
    w.run(*(w.submit(i, [*prefix, 100], max_tokens=5, seed=i) for i in range(1, 9)))
    for i in range(1, 9):
        assert w.output[ident(i)] == expected([*prefix, 100], i, 5)
    # Prefix once, and the last prompt token of each sibling (to get its logits).
    assert sum(work for work, _ in w.executor.ran) == 21 + 7
    assert w.executor.ran[:2] == [(21, 0), (7, 1)]  # all siblings in the step behind their prefix
    w.check_idle()


def test_a_group_is_admitted_before_another_sessions_turn(world):
    w = world(rows=4, pages=400)
    w.turn(
        *(w.submit(i, [i] * 5, max_tokens=6) for i in range(1, 5)),
        *(w.submit(i, [i] * 5, max_tokens=6, session=2) for i in range(1, 5)),
    )
    assert len({a.request >> 32 for a in w.settles[0].acquires}) == 1
    w.run()
    w.check_idle()


def test_a_generation_hurries_what_was_computed_ahead_of_it(world, expected):
    """20 tokens a step while nobody waits, then all that a first step takes."""
    w = world(rows=4, pages=400, budget=200, ahead_tokens=20)
    other, own = list(range(50, 97)), list(range(90))
    w.turn(w.submit(1, other, max_tokens=0), w.submit(2, own, max_tokens=0))
    w.cache_settles()
    w.result()
    w.turn(w.submit(3, branch=ident(2), max_tokens=4))
    w.cache_settles()
    w.run()
    assert [work for work, _ in w.executor.ran[:4]] == [20, 20, 7 + 13, FIRST_ON_CPU]
    assert w.output[ident(3)] == expected(own, 0, 4)
    w.check_idle()


def test_generations_are_admitted_past_what_is_computed_ahead(world):
    w = world(rows=8, pages=900, budget=64, ahead_tokens=16)
    w.turn(*(w.submit(i, [i] * 40, max_tokens=0, priority=-8) for i in range(1, 6)))
    w.cache_settles()
    w.turn(w.submit(9, [9] * 10, max_tokens=2))
    w.cache_settles()
    w.result()
    w.result()
    w.result()
    assert [work for work, _ in w.executor.ran] == [16, 16, 16]
    assert len(w.output[ident(9)]) == 1
    w.run()
    w.check_idle()


def test_input_that_finds_no_memory_holds_no_generation_up(world):
    w = world(pages=40, rows=8, lookahead=1)
    w.turn(w.submit(1, [1] * 20, max_tokens=12))
    w.cache_settles()
    w.turn(w.submit(2, [2] * 35, max_tokens=0))
    w.cache_settles()
    w.turn(w.submit(3, [3] * 3, max_tokens=2))
    w.run()
    assert w.order == [ident(3), ident(1), ident(2)]
    tries = sum(a.request == ident(2) for s in w.settles for a in s.acquires)
    assert tries <= 3
    w.check_idle()


def test_input_computed_ahead_gives_its_pages_to_a_generation(world, expected):
    w = world(pages=400, context=400, rows=4, budget=64, ahead_tokens=16)
    w.turn(w.submit(1, list(range(90)) * 4, max_tokens=0))
    w.cache_settles()
    w.result()
    w.turn(w.submit(2, [2] * 60, max_tokens=2))
    w.run()
    assert w.order == [ident(2), ident(1)]
    assert w.output[ident(2)] == expected([2] * 60, 0, 2)
    assert sum(work for work, _ in w.executor.ran) <= 60 + 360 + 2 * 16  # what was computed stays
    w.check_idle()


def test_input_that_a_generation_waits_for_keeps_its_pages(world, expected):
    own = list(range(90)) * 4
    w = world(pages=400, context=400, rows=4, budget=64, ahead_tokens=16)
    w.turn(w.submit(1, own, max_tokens=0))
    w.cache_settles()
    w.turn(w.submit(2, branch=ident(1), max_tokens=2))
    w.cache_settles()
    w.turn(w.submit(3, [2] * 60, max_tokens=2))
    w.run()
    finals = [c.request for s in w.settles for c in s.commits if c.final]
    assert finals.count(ident(1)) == 1
    assert w.output[ident(2)] == expected(own, 0, 2)
    w.check_idle()


def test_input_computed_ahead_is_retracted_before_any_generation(world):
    w = world(pages=400, context=400, rows=4, budget=64, ahead_tokens=16)
    w.turn(w.submit(1, [1] * 380, max_tokens=0, priority=-8))
    w.cache_settles()
    w.run(w.submit(2, [2] * 8, max_tokens=20, priority=-8))
    assert [c.request for s in w.settles for c in s.commits if c.final] == [
        ident(1),
        ident(2),
        ident(1),
    ]
    w.check_idle()


def test_parked_requests_come_back_when_the_owner_is_cancelled(world, expected):
    w = world(budget=16, pages=200)
    prompt = list(range(80))
    w.turn(w.submit(1, prompt), w.submit(2, prompt, seed=3))
    w.settled()
    w.turn(CancelRequest(ident(1)))
    w.run()
    assert w.output[ident(2)] == expected(prompt, 3, 4)
    w.check_idle()


def test_parked_requests_can_be_cancelled(world):
    w = world(budget=16, pages=200)
    prompt = list(range(80))
    w.turn(w.submit(1, prompt), w.submit(2, prompt))
    w.settled()
    w.turn(CancelRequest(ident(2)))
    assert w.finished[ident(2)].reason == "cancelled"
    w.run()
    w.check_idle()


def test_parked_requests_are_not_polled(world):
    w = world(budget=16, pages=400)
    prompt = list(range(160))
    w.run(w.submit(1, prompt, max_tokens=1), w.submit(2, prompt, max_tokens=1))
    tries = sum(a.request == ident(2) for s in w.settles for a in s.acquires)
    assert tries <= 11  # the first, and one for each commit
    w.check_idle()


def test_who_finds_no_memory_waits_without_spinning(world, expected):
    w = world(pages=24, rows=4)
    w.run(w.submit(1, [1] * 10, max_tokens=12), w.submit(2, [2] * 14, max_tokens=4))
    assert w.output[ident(2)] == expected([2] * 14, 0, 4)
    tries = sum(a.request == ident(2) for s in w.settles for a in s.acquires)
    assert tries <= 3
    w.check_idle()


def test_a_big_request_is_not_overtaken_for_ever(world):
    w = world(pages=64, rows=8)
    w.turn(*(w.submit(i, [i] * 4, max_tokens=12, session=i) for i in range(2, 8)))
    w.cache_settles()
    w.turn(w.submit(1, [1] * 50, max_tokens=2))
    following = 8
    for _ in range(300):
        if ident(1) in w.finished:
            break
        event = w.replies.popleft() if w.replies else w.executor.run()
        w.turn(event, w.submit(following, [following] * 4, max_tokens=12, session=following))
        following += 1
    assert ident(1) in w.finished
    w.run()
    w.check_idle()


@pytest.mark.parametrize("pages", [16, 20, 24, 31])
def test_retraction_continues_exactly(world, expected, pages):
    w = world(pages=pages, rows=4)
    w.run(*(w.submit(i, [i, i + 1], max_tokens=13, seed=i) for i in range(1, 5)))
    retracted = sum(c.final and c.request not in w.cache.runs for s in w.settles for c in s.commits) - 4
    assert retracted > 0
    for i in range(1, 5):
        want = expected([i, i + 1], i, 13)
        assert w.output[ident(i)] == want  # nothing sent twice, nothing left out
        assert w.cache.branches[ident(i)] == [i, i + 1, *want]
        finished = w.finished[ident(i)]
        assert (finished.prompt, finished.output, finished.reason) == (2, 13, "length")
        assert finished.cached + finished.computed == 2
    w.check_idle()


def test_the_youngest_of_the_lowest_priority_is_retracted(world):
    w = world(pages=20, rows=4)
    w.turn(w.submit(1, [1], max_tokens=19, priority=1), w.submit(2, [2], max_tokens=19, session=2))
    w.cache_settles()
    w.run(w.submit(3, [3], max_tokens=19, priority=1, session=3))
    retracted = [c.request for s in w.settles for c in s.commits if c.final]
    assert retracted[0] == ident(2, 2)
    assert w.order[-1] == ident(2, 2)
    w.check_idle()


def test_cancel_after_a_retraction_counts_what_was_committed(world, expected):
    w = world(pages=20, rows=2)
    w.turn(w.submit(1, [1, 1], max_tokens=16), w.submit(2, [2, 2], max_tokens=16))
    while w.core.running == 2 or not w.sent:
        w.settled() if w.replies else w.result()
    assert w.core.waiting == 1
    done = len(w.output[ident(2)])
    assert done > 0
    w.turn(CancelRequest(ident(2), keep=1))
    assert w.finished[ident(2)].output == done  # committed already: the session moves its branch
    w.run()
    w.check_idle()


def test_retraction_keeps_penalties(world):
    w = world(pages=20, rows=2)
    sampling = SamplingParams(presence_penalty=1.0)
    w.run(*(w.submit(i, [i, i], max_tokens=14, sampling=sampling) for i in (1, 2)))
    again = [o for plan in w.sent for o in plan.opens if o.sampled]
    assert again
    for opened in again:
        history = opened.history
        output = w.output[opened.request][: opened.sampled]
        assert len(history) == 4 * (2 + opened.sampled)
        assert list(memoryview(history).cast("i"))[-opened.sampled :] == output


def test_a_request_alone_ends_at_the_pools_size(world, expected):
    w = world(pages=12)
    w.run(w.submit(1, [1, 2, 3, 4], max_tokens=100))
    assert w.output[ident(1)] == expected([1, 2, 3, 4], 0, 9)  # the last token needs no slot
    assert w.finished[ident(1)].reason == "length"
    w.check_idle()


def test_everybody_needs_the_whole_pool(world, expected):
    w = world(pages=12, rows=4)
    w.run(*(w.submit(i, [i, 2, 3, 4], max_tokens=100) for i in range(1, 7)))
    for i in range(1, 7):
        assert w.output[ident(i)] == expected([i, 2, 3, 4], 0, 9)
    w.check_idle()


def test_a_commit_on_its_way_wakes_who_is_parked_too_late(world, expected):
    """The owner's last chunk lands while the sibling's denial travels."""
    prompt = list(range(12))
    w = world(rows=4, pages=200)
    w.turn(w.submit(1, prompt, max_tokens=60))
    w.settled()
    w.turn(w.submit(2, prompt, seed=1))
    w.result()  # computes the prompt; its commit waits behind the outstanding Settle
    w.settled()
    assert [a.request for a in w.settles[-1].acquires] == [ident(2)]
    w.run()
    assert w.output[ident(2)] == expected(prompt, 1, 4)
    assert w.order == [ident(2), ident(1)]
    w.check_idle()


def test_ends_wait_for_their_settle_when_the_cache_lags(world):
    w = world(rows=8, pages=400)
    w.turn(*(w.submit(i, [i], max_tokens=50, session=i) for i in range(1, 9)))
    w.settled()
    w.result()
    w.cache_settles()
    for i in range(1, 9):
        w.turn(CancelRequest(ident(i, i)))
    assert len(w.replies) == 4  # no more Settles than that are outstanding
    assert len(w.finished) == 4
    w.cache_settles()
    assert len(w.finished) == 8
    w.run()
    w.check_idle()


def test_a_retracted_request_waits_until_somebody_ends(world):
    w = world(pages=30, rows=3, lookahead=2)
    w.run(*(w.submit(i, [i] * 4, max_tokens=20) for i in range(1, 4)))
    retractions = sum(c.final for s in w.settles for c in s.commits) - 3
    assert 1 <= retractions <= 3
    w.check_idle()


def test_after_a_denial_one_at_a_time_is_tried(world):
    w = world(pages=40, rows=8, lookahead=1)
    w.turn(w.submit(1, [1] * 20, max_tokens=6))
    w.cache_settles()
    w.turn(w.submit(2, [2] * 35, max_tokens=1))
    w.cache_settles()
    w.turn(*(w.submit(i, [i] * 3, max_tokens=30) for i in range(3, 8)))
    w.run()
    assert w.order.index(ident(2)) <= 2
    tried = [len(s.acquires) for s in w.settles if any(a.request == ident(2) for a in s.acquires)]
    assert set(tried) == {1}
    w.check_idle()
    w.turn(*(w.submit(i, [i] * 3, max_tokens=1) for i in range(10, 14)))
    assert len(w.settles[-1].acquires) == 4  # it was granted: that is over
    w.run()
    w.check_idle()


@pytest.mark.parametrize("done", [False, True])
def test_who_finds_no_memory_though_nobody_holds_any_is_ended(world, done):
    """A cache that contradicts the pool's size must not let a request wait for ever."""
    w = world(pages=24, rows=4)
    first = w.submit(1, [1] * 6, max_tokens=40)
    second = w.submit(2, [2] * 6, max_tokens=40)
    if done:
        w.turn(first, second)
        while not w.core.lifecycle.retractions:
            w.turn(w.replies.popleft() if w.replies else w.executor.run())
    w.cache._take = lambda count: None
    w.run(CancelRequest(ident(1)) if done else second)
    finished = w.finished[ident(2)]
    if done:
        assert (finished.reason, finished.error) == ("length", None)
        assert finished.output == len(w.output[ident(2)]) > 0
    else:
        assert (finished.reason, finished.error, finished.output) == ("error", "too_long", 0)
    w.check_idle()


def test_what_a_run_did_not_use_moves_its_session_forward(world):
    """Its other requests wait already: the queue must hear that the session has had less service."""
    w = world(rows=1, lookahead=30)
    w.run(w.submit(1, range(20, 30), session=2, max_tokens=1))  # a service of 10
    w.turn(w.submit(1, max_tokens=40))  # is charged 3 + 30
    w.cache_settles()
    w.turn(w.submit(2, [4, 5], max_tokens=1), w.submit(2, [6, 7], session=2, max_tokens=1))
    w.run(CancelRequest(ident(1)))
    assert w.order[-2:] == [ident(2), ident(2, 2)]


def test_what_a_parked_request_was_charged_moves_its_session_forward(world):
    """It waits for another's prompt, and meanwhile its session has had no service."""
    prefix = list(range(40))
    w = world(rows=2, pages=400, budget=16)
    w.run(w.submit(1, range(50, 60), session=2, max_tokens=1))  # a service of 10
    w.turn(w.submit(1, prefix, session=3, max_tokens=1))
    w.turn(w.submit(1, [*prefix, 1], max_tokens=1))  # is charged 41
    w.turn(w.submit(2, [4, 5], max_tokens=1), w.submit(2, [6, 7], session=2, max_tokens=1))
    w.run()
    assert w.order.index(ident(2)) < w.order.index(ident(2, 2))


def test_what_nobody_waits_for_ends_where_pages_are_short(world):
    """Evictable pages are not taken for it."""
    spare = {"max_tokens": 0, "priority": SPARE, "spare": True}
    w = world(pages=40)
    w.run(w.submit(1, [3] * 30, max_tokens=2))
    w.run(w.submit(1, [2] * 20, session=5, **spare))
    assert w.finished[ident(1, 5)].reason == "cancelled"
    w.run(w.submit(1, [2] * 5, session=6, **spare))
    assert w.finished[ident(1, 6)].reason == "length"
    assert w.finished[ident(1, 6)].spare
    w.check_idle()


def test_what_nobody_waits_for_goes_on_when_the_others_have_ended(world, expected):
    w = world(pages=200, rows=2)
    w.turn(
        w.submit(1, [2] * 50, session=5, max_tokens=0, priority=SPARE, spare=True),
        w.submit(1, [1] * 20, max_tokens=30),
        w.submit(2, [4] * 20, max_tokens=30),
    )
    w.run()
    assert w.order[-1] == ident(1, 5)
    assert w.finished[ident(1, 5)].reason == "length"
    assert w.output[ident(1)] == expected([1] * 20, 0, 30)
    w.check_idle()
