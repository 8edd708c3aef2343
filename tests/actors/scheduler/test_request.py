"""What is known of a request and of its runs: limits, levels, the final commit, usage."""

from array import array
from types import SimpleNamespace

import pytest

from ramify.actors.scheduler.request import Account, Request, RequestRun, Tenant, output_limit
from ramify.actors.scheduler.targets import Targets
from ramify.protocol.messages import Commit, Submit
from ramify.protocol.plan import pack
from ramify.protocol.sampling import SamplingParams


def request_of(*, limit=5, prompt=10, priority=0, places=None, **more):
    submit = Submit(7, 70, prompt, limit, SamplingParams(), priority=priority, **more)
    targets = Targets(array("i", places), array("i", places)) if places is not None else None
    return Request(submit, Account(1), 3, 4, 100, limit, targets)


def run_of(request, *, cached=0, pages=3, size=4, since=0):
    return RequestRun(request, 2, cached, b"tt", bytes(4 * pages), b"hh", True, size, since)


def test_a_new_tenant_and_account():
    tenant = Tenant()
    assert (tenant.served, tenant.virtual, tenant.requests, tenant.rows, tenant.slots) == (0, 0, 0, 0, 0)
    assert (tenant.reserved, tenant.prefilling, tenant.lacking) == (0, 0, 0)
    account = Account(5, tenant)
    assert (account.session, account.tenant, account.requests) == (5, tenant, {})
    assert (account.served, account.rows, account.due, account.prefilling) == (0, 0, 0, 0)
    assert (account.kept, account.held, account.foreseen, account.goal, account.reserved) == (0,) * 5
    assert (account.active, account.behind, account.closed, account.rested) == (False, False, False, 0)
    assert Account(5).tenant is not tenant


def test_service_and_rows_count_for_both():
    account = Account(1)
    account.charge(10)
    account.charge(-3)
    account.hold(1)
    account.hold(1)
    account.hold(-1)
    assert (account.served, account.tenant.served) == (7, 7)
    assert (account.rows, account.tenant.rows) == (1, 1)
    account.tenant.requests = 4
    assert account.tenant.waiting == 3


def test_a_new_request():
    request = request_of(stop_token_ids=[5, 6])
    assert (request.seq, request.batch, request.mark, request.limit) == (3, 4, 100, 5)
    assert (request.stops, request.came, request.in_memory_queue) == ({5, 6}, -1, False)
    assert (request.resident, request.done, request.ticket, request.charge) == (0, 0, 0, 0)
    assert (request.cached, request.computed, request.reached, request.lacking) == (0, 0, 0, 0)
    assert (request.need, request.foreseen, request.leave) == (0, 0, 0)
    assert (request.promised, request.repeated) == (False, False)
    assert (request.ignores_reserve, request.single_answer) == (False, False)
    assert (request.started, request.first_token) == (0.0, 0.0)


def test_what_a_request_has_left():
    request = request_of(limit=5)
    assert (request.prompt, request.remaining, request.extra(9), request.extra(2)) == (10, 5, 4, 2)
    request.keep(4)
    assert (request.prompt, request.remaining, request.extra(9)) == (14, 1, 0)
    assert request_of(limit=0).extra(9) == 0


def test_who_waits_for_its_output():
    assert request_of(priority=3).level == (True, 3)
    assert request_of(limit=0, priority=3).level == (False, 3)
    assert request_of(limit=0, places=[1]).level == (True, 0)


def test_how_it_is_told_that_it_ended():
    request = request_of(places=[3], arrived=1.5)
    request.targets.scores.append(-2.0)
    request.done, request.cached, request.computed = 2, 6, 4
    finished = request.finish("error", 9.0, "internal", "broken")
    assert (finished.request, finished.reason, finished.output, finished.prompt) == (7, "error", 2, 10)
    assert (finished.cached, finished.computed) == (6, 4)
    assert (finished.arrived, finished.started, finished.ended) == (1.5, 9.0, 9.0)  # it never started
    assert (finished.error, finished.message, len(finished.scores)) == ("internal", "broken", 4)
    request.started, request.first_token = 2.5, 3.5
    finished = request.finish("stop", 9.0, None, "")
    assert (finished.started, finished.first_token) == (2.5, 3.5)
    assert request_of().finish("stop", 9.0, None, "").scores == b""


def test_a_new_run():
    run = run_of(request_of(priority=2), cached=6, since=9)
    assert (run.ident, run.row, run.since, run.priority, run.prompt, run.limit) == (7, 2, 9, 2, 10, 5)
    assert (run.cached, run.computed, run.filled, run.slots, run.held, run.cap) == (6, 6, 6, 12, 6, 14)
    assert (run.planned, run.offset, run.stop_at, run.due, run.place, run.turn, run.lot) == (0,) * 7
    assert (run.live, run.bad, run.opened, run.decoding, run.growing) == (True, *(False,) * 4)
    assert (run.target, len(run.out), run.waiters, run.level) == (0, 0, [], (True, 2))
    assert run_of(request_of(limit=0)).level == (False, 0)
    assert run_of(request_of(limit=0)).cap == 10
    assert run_of(request_of(limit=1)).cap == 10


def test_a_run_goes_on_where_the_last_one_ended():
    request = request_of(limit=5, places=[1, 2, 3])
    request.keep(2)
    request.targets.scores.extend([-1.0, -1.0])
    run = run_of(request)
    assert (run.prompt, run.limit, run.cap, run.target) == (12, 3, 14, 2)


def test_when_all_is_planned():
    run = run_of(request_of(limit=2))
    for filled, planned, decoding, complete in (
        (10, 2, False, True),
        (10, 3, False, True),
        (10, 1, False, False),
        (9, 2, False, False),
        (10, 2, True, False),
    ):
        run.filled, run.planned, run.decoding = filled, planned, decoding
        assert run.complete == complete


@pytest.mark.parametrize(
    ("limit", "places", "computed", "seen"),
    [(5, None, 10, True), (5, None, 9, False), (1, None, 10, True), (0, None, 10, False),
     (0, [9], 10, True), (0, [9], 9, False), (0, [8], 10, False)],
)  # fmt: skip
def test_whether_finite_logits_were_seen(limit, places, computed, seen):
    run = run_of(request_of(limit=limit, places=places))
    run.computed = computed
    assert run.seen == seen
    finite = True if seen and not limit else None
    assert run.final(None) == (Commit(7, computed, b"", True, finite), 0)


@pytest.mark.parametrize(
    ("keep", "computed", "kept"),
    [(None, 12, 3), (3, 12, 3), (9, 12, 3), (2, 12, 2), (1, 11, 1), (0, 10, 0), (-1, 10, 0)],
)
def test_how_much_of_an_output_is_committed(keep, computed, kept):
    """The last token that was sampled has no KV."""
    run = run_of(request_of())
    run.computed = 10
    run.out.extend([4, 5, 6])
    commit = Commit(7, computed, pack([4, 5, 6][:kept]), True, True)
    assert run.final(keep) == (commit, kept)


def test_of_a_run_that_is_not_finite_nothing_is_committed():
    run = run_of(request_of())
    run.bad = True
    run.out.append(4)
    assert run.final(None) == (Commit(7, 0, b"", True, False), 0)


@pytest.mark.parametrize(
    ("asked", "prompt", "most"),
    [(5, 10, 5), (50, 10, 30), (50, 29, 11), (50, 40, 0), (50, 45, 0), (0, 10, 0)],
)
def test_the_longest_output(asked, prompt, most):
    """A context of 40 tokens; the pool holds more."""
    submit = Submit(1, 1, prompt, asked, SamplingParams())
    assert output_limit(submit, SimpleNamespace(pages=25, page_size=2, context=40)) == most


def test_the_last_output_token_needs_no_slot():
    submit = Submit(1, 1, 10, 50, SamplingParams())
    assert output_limit(submit, SimpleNamespace(pages=8, page_size=2, context=40)) == 7
    submit = Submit(1, 1, 17, 50, SamplingParams())
    assert output_limit(submit, SimpleNamespace(pages=8, page_size=2, context=40)) == 0
