"""What sessions are told: one message each, tokens first, ends when the cache has heard of them."""

import pytest

from ramify.actors.scheduler.deliveries import Deliveries
from ramify.actors.scheduler.request import Account, Request, RequestRun
from ramify.protocol.messages import Progress, Submit
from ramify.protocol.plan import StepResult, pack
from ramify.protocol.sampling import SamplingParams, TokenLogprobs


@pytest.fixture
def deliveries():
    return Deliveries()


def run_of(account, number):
    submit = Submit(number, number, 3, 5, SamplingParams())
    return RequestRun(Request(submit, account, number, number, 0, 5), 0, 0, b"", bytes(40), b"", True, 1)


def result(*tokens, logprobs=()):
    return StepResult(1, pack(range(len(tokens))), pack(tokens), len(tokens), 1000, list(logprobs))


def test_one_message_a_session(deliveries):
    one, two = Account(1), Account(2)
    runs = [run_of(one, 11), run_of(two, 21), run_of(one, 12)]
    deliveries.landed(result(5, 6, 7), runs, None)
    deliveries.landed(result(8), [runs[0]], None)
    told = dict(deliveries.take(True))
    assert told[1].progress == [
        Progress(11, pack([5])),
        Progress(12, pack([7])),
        Progress(11, pack([8])),
    ]
    assert told[2].progress == [Progress(21, pack([6]))]
    assert (told[1].finished, one.progress, two.progress) == ([], [], [])
    assert deliveries.take(True) == []


def test_only_those_that_live_count(deliveries):
    account = Account(1)
    runs = [run_of(account, 11), run_of(account, 12), run_of(account, 13)]
    deliveries.landed(result(5, 6, 7), runs, [0, 2])
    ((_, tokens),) = deliveries.take(True)
    assert tokens.progress == [Progress(11, pack([5])), Progress(13, pack([7]))]
    deliveries.landed(result(5, 6, 7), runs, [])
    assert deliveries.take(True) == []


def test_log_probabilities_go_with_those_that_asked(deliveries):
    account = Account(1)
    each = TokenLogprobs(-1.0, [6], [-1.0])
    deliveries.landed(
        result(5, 6, logprobs=[None, each]), [run_of(account, 11), run_of(account, 12)], None
    )
    ((_, tokens),) = deliveries.take(True)
    assert tokens.progress == [Progress(11, pack([5])), Progress(12, pack([6]), [each])]


def test_ends_wait_for_the_cache_and_are_told_once(deliveries):
    account = Account(1)
    request = run_of(account, 11).request
    request.keep(2)
    deliveries.ended(request, "error", 7.0, "internal", "it broke")
    assert deliveries.take(False) == []
    deliveries.landed(result(5), [run_of(account, 12)], None)
    ((_, tokens),) = deliveries.take(False)
    assert tokens.finished == []
    ((session, tokens),) = deliveries.take(True)
    (finished,) = tokens.finished
    assert (session, tokens.progress) == (1, [])
    assert (finished.request, finished.reason, finished.ended) == (11, "error", 7.0)
    assert (finished.output, finished.error, finished.message) == (2, "internal", "it broke")
    assert account.finished == []
    assert deliveries.take(True) == []


def test_a_session_that_is_gone_is_told_nothing(deliveries):
    account = Account(1)
    account.closed = True
    run = run_of(account, 11)
    deliveries.landed(result(5), [run], None)
    deliveries.ended(run.request, "stop", 7.0, None, "")
    assert deliveries.take(True) == []
    assert account.finished == []


def test_first_tokens_say_what_was_cached(deliveries):
    account = Account(1)
    runs = [run_of(account, 11), run_of(account, 12)]
    runs[0].request.cached = 2
    deliveries.landed(result(5, 6), runs, None)
    deliveries.landed(result(7, 8), runs, None)
    deliveries.began(runs[0])
    ((_, tokens),) = deliveries.take(True)
    assert [(p.request, p.cached) for p in tokens.progress] == [(11, 2), (12, -1), (11, -1), (12, -1)]
    deliveries.landed(result(9, 9), runs, None)
    ((_, tokens),) = deliveries.take(True)
    assert {p.cached for p in tokens.progress} == {-1}
