"""What ends, pauses or leaves a run in its midst, with drafts: as without them, token by token.

Every policy here drafts by chance, and nine of ten drafts are right, so steps give several tokens.
"""

import pytest

from ramify.protocol.messages import CancelRequest
from ramify.protocol.plan import unpack
from ramify.protocol.sampling import SamplingParams

R1, R2 = 1 << 32 | 1, 1 << 32 | 2


@pytest.fixture
def drafting(world):
    """drafting(**settings of the world) -> a world whose rows are drafted."""

    def make(**settings):
        settings = {"rows": 16, "pages": 512, "budget": 64, **settings}
        return world(drafts=4, acceptance=0.9, policy="dice", **settings)

    return make


def largest(w):
    """Tokens that the request got most at once."""
    return max(len(unpack(progress.tokens)) for _, told in w.messages for progress in told.progress)


@pytest.mark.parametrize("limit", range(1, 12))
def test_the_limit_falls_into_an_accepted_run(drafting, expected, limit):
    w = drafting()
    w.run(w.submit(1, max_tokens=limit))
    assert w.output[R1] == expected([1, 2, 3], 0, limit)
    finished = w.finished[R1]
    assert (finished.reason, finished.output) == ("length", limit)
    assert finished.accepted < limit
    w.check_drafts()
    w.check_idle()


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_falls_into_an_accepted_run(drafting, expected, place):
    plain = expected([1, 2, 3], 0, 40)
    stop = plain[place]
    first = plain.index(stop)
    w = drafting()
    w.run(w.submit(1, max_tokens=40, stop_token_ids=[stop]))
    assert w.output[R1] == plain[: first + 1]
    assert w.finished[R1].reason == "stop"
    assert w.cache.branches[R1] == [1, 2, 3, *plain[: first + 1]]
    w.check_idle()


@pytest.mark.parametrize("keep", [0, 1, 5, 30])
def test_a_cancel_keeps_what_it_says_and_ends_within_its_step(drafting, expected, keep):
    """A session that finds a stop string in the midst of an accepted run keeps the tokens before it."""
    w = drafting()
    w.turn(w.submit(1, max_tokens=200))
    w.cache_settles()
    while len(w.output.get(R1, ())) < 20:
        w.result()
        w.cache_settles()
    had = len(w.output[R1])
    steps = len(w.executor.plans)
    w.turn(CancelRequest(R1, keep=keep))
    assert len(w.executor.plans) <= steps + 1  # the one that closes its row
    w.run()
    kept = min(keep, had)
    assert (w.finished[R1].reason, w.finished[R1].output) == ("cancelled", kept)
    assert w.finished[R1].accepted <= kept
    assert w.cache.branches[R1] == [1, 2, 3, *expected([1, 2, 3], 0, 200)[:kept]]
    w.check_drafts()
    w.check_idle()


def test_a_deadline_in_mid_run(drafting, expected):
    w = drafting()
    w.run(w.submit(1, max_tokens=400, deadline=w.now + 0.05))
    finished = w.finished[R1]
    assert finished.reason == "deadline"
    assert 0 < finished.output < 400
    assert w.output[R1] == expected([1, 2, 3], 0, 400)[: finished.output]
    w.check_idle()


def test_several_outputs_of_one_branch(drafting, expected):
    """As `n` and forks are: requests on branches that share a prompt, each with its own numbers."""
    w = drafting()
    w.run(*(w.submit(number, seed=number, max_tokens=30) for number in range(1, 6)))
    for number in range(1, 6):
        assert w.output[1 << 32 | number] == expected([1, 2, 3], number, 30)
    assert largest(w) > 1
    w.check_drafts()
    w.check_idle()


def test_a_retracted_run_goes_on_where_it_was(drafting, expected):
    """The pool holds less than both: the one that gives way continues with its own numbers."""
    w = drafting(pages=48, rows=4)
    w.run(w.submit(1, max_tokens=30, seed=1), w.submit(2, [4, 5, 6], max_tokens=30, seed=2))
    assert sum(w.core.lifecycle.retractions.values()) > 0
    assert w.output[R1] == expected([1, 2, 3], 1, 30)
    assert w.output[R2] == expected([4, 5, 6], 2, 30)
    for finished in w.finished.values():
        assert finished.accepted <= finished.output == 30
    w.check_drafts()
    w.check_idle()


def test_each_token_has_its_log_probabilities(drafting, expected):
    w = drafting()
    w.run(w.submit(1, max_tokens=25, sampling=SamplingParams(logprobs=1)))
    assert w.output[R1] == expected([1, 2, 3], 0, 25)
    assert len(w.logprobs[R1]) in (0, 25)
    assert largest(w) > 1
    w.check_idle()


def test_what_is_served_counts_tokens_and_not_steps(drafting):
    """Fairness: an account is charged the same with drafts as without."""
    with_drafts, without = drafting(), drafting()
    without.core.planner.drafts.speculation = None
    for w in (with_drafts, without):
        w.run(w.submit(1, max_tokens=30))
    accounts = [w.core.accounts[1] for w in (with_drafts, without)]
    assert accounts[0].served == accounts[1].served
    assert with_drafts.finished[R1].accepted > 0 == without.finished[R1].accepted
