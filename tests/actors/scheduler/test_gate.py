"""The gate of admission by itself: who is asked pages for, and what a denial does."""

from math import inf
from types import SimpleNamespace

import pytest

from ramify.actors.scheduler.admission import OVERTAKE, Admission
from ramify.actors.scheduler.request import Account, Request, RequestState
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Denied, Submit
from ramify.protocol.sampling import SamplingParams


class Counted(dict):
    """Runs that count how often they were looked through."""

    looks = 0

    def values(self):
        self.looks += 1
        return super().values()


class Gate:
    """Pages of two slots, four slots asked for ahead, a quantum of eight steps; one row is in use."""

    def __init__(self, available=50, step_tokens=1000):
        self.retracted = []
        self.hurried = []
        self.committed = []
        self.runs = Counted()
        self.planner = SimpleNamespace(
            free_rows=4,
            running=1,
            step=100,
            processed=0,
            lacking=lambda level: 10_000,
            long_prompts=0,
            pace=SimpleNamespace(rate=lambda decodes: 10.0),
            loads=SimpleNamespace(cost=lambda rate: 8),
            prompts=SimpleNamespace(
                enough=64, hurry=lambda run, level: self.hurried.append((run, level))
            ),
        )
        self.settlements = SimpleNamespace(
            outstanding=0, available=available, free=0, owes=lambda number: False
        )
        self.gate = Admission(
            SimpleNamespace(pages=100, page_size=2, step_tokens=step_tokens),
            ScheduleConfig(lookahead=4, quantum_steps=8),
            self.planner,
            self.settlements,
            self.runs,
            self.retract,
        )
        self.count = 0

    def retract(self, run, cause):
        self.retracted.append((run, cause))
        del self.runs[run.request.seq]

    def ask(self, *, priority=0, limit=5, prompt=10, begun=True, account=None, expects=0):
        self.count += 1
        account = account or Account(self.count)
        submit = Submit(
            self.count, self.count, prompt, limit, SamplingParams(), priority=priority, expects=expects
        )
        request = Request(submit, account, self.count, self.count, 0, limit)
        account.requests[self.count] = request
        if begun and not account.active:
            self.gate.active.begin(account)
        self.gate.submitted(request)
        return request

    def held(self, slots, priority=-1):
        """A run of somebody else that has so many slots."""
        number = 1000 + len(self.runs)
        account = Account(number)
        account.rows = account.tenant.rows = 1
        account.tenant.slots = slots
        self.runs[number] = SimpleNamespace(
            level=(True, priority),
            complete=False,
            held=slots,
            loaded=0,
            account=account,
            since=0,
            request=SimpleNamespace(seq=number),
        )
        return self.runs[number]

    def deny(self, request, short):
        self.gate.denied(request, Denied(request.submit.request, "memory", short=short), None)


@pytest.fixture
def gate():
    return Gate()


def test_nobody_is_asked_for_while_an_answer_is_out(gate):
    assert gate.gate.pick() == []
    request = gate.ask()
    gate.settlements.outstanding = 1
    assert gate.gate.pick() == []
    gate.settlements.outstanding = 0
    assert gate.gate.pick() == [request]
    assert (request.state, request.leave) == (RequestState.ACQUIRING, 0)


def test_pages_that_may_suffice_end_a_denial(gate):
    first, second = gate.ask(), gate.ask()
    assert gate.gate.pick() == [first, second]
    gate.deny(first, 5)
    gate.deny(second, 3)
    assert (first.need, second.need) == (55, 53)
    gate.settlements.available = 52
    assert gate.gate.pick() == []
    gate.settlements.available = 53
    gate.planner.step += 8
    assert len(gate.gate.pick()) == 1  # one at a time now
    assert gate.retracted == []


def test_after_a_grant_all_are_tried(gate):
    first, second, third = gate.ask(), gate.ask(), gate.ask()
    gate.planner.free_rows = 1
    assert gate.gate.pick() == [first]
    gate.planner.free_rows = 4
    gate.deny(first, 5)
    gate.gate.unblock()
    (tried,) = gate.gate.pick()
    run = SimpleNamespace(
        held=14, loaded=0, cap=14, slots=14, prompt=10, cached=0, account=tried.account
    )
    gate.gate.granted(tried, run)
    assert (tried.need, tried.charge, tried.account.tenant.slots) == (0, 0, 14)
    assert tried.account.served == 14
    assert set(gate.gate.pick()) == {first, second, third} - {tried}


def test_one_at_a_time_costs_nobody_a_row_while_others_are_free(gate):
    """It did: of two that were tried behind a denial, the second was taken to be without a row."""
    denied = gate.ask()
    gate.gate.pick()
    gate.deny(denied, 5)
    gate.gate.unblock()
    gate.ask()
    for _ in range(2):  # of a tenant with two rows, for long enough
        run = gate.held(4, priority=0)
        run.account.rows = run.account.tenant.rows = 2
    assert len(gate.gate.pick()) == 1
    assert (gate.retracted, gate.planner.free_rows) == ([], 4)


def newcomer(gate, prompt=10):
    """A request that overtook the memory queue, as `MemoryQueue` says."""
    request = gate.ask(begun=False, prompt=prompt)
    gate.gate.queue.discard(request)
    request.ignores_reserve = request.single_answer = request.overtakes = True
    gate.gate.queue.push_before_all(request)
    return request


def granted(gate, request):
    run = SimpleNamespace(
        held=14, loaded=0, cap=14, slots=14, prompt=10, cached=0, account=request.account
    )
    gate.gate.granted(request, run)
    request.state = RequestState.RUNNING


def test_who_has_come_alone_goes_past_who_waits_for_more_pages_than_there_are(gate):
    denied = gate.ask()
    gate.gate.pick()
    gate.deny(denied, 5)
    for _ in range(OVERTAKE):
        new = newcomer(gate)
        assert gate.gate.pick() == [new]
        granted(gate, new)
        assert gate.gate.pick() == []  # the other one still waits, and one at a time is tried
        assert not new.overtakes
    last = newcomer(gate)
    assert gate.gate.pick() == []  # so many between two others
    gate.settlements.available = 55
    assert gate.gate.pick() == [last]
    granted(gate, last)
    assert gate.gate.pick() == [denied]
    granted(gate, denied)
    gate.deny(gate.ask(), 5)
    new = newcomer(gate)
    assert gate.gate.pick() == [new]
    assert gate.retracted == []


def test_who_has_come_alone_and_needs_more_than_there_is_waits(gate):
    denied = gate.ask()
    gate.gate.pick()
    gate.deny(denied, 5)
    newcomer(gate, prompt=98)  # 48 pages are there beside what runs may grow by, and it needs 52
    assert gate.gate.pick() == []


@pytest.mark.parametrize("running", [0, 1])
def test_where_nothing_runs_a_denial_ends(gate, running):
    request = gate.ask()
    gate.gate.pick()
    gate.deny(request, 5)
    gate.planner.running = running
    assert gate.gate.pick() == ([] if running else [request])


def test_a_denial_holds_up_its_level_and_lower_ones(gate):
    request = gate.ask()
    gate.gate.pick()
    gate.deny(request, 5)
    lower, ahead, higher = gate.ask(priority=-1), gate.ask(limit=0), gate.ask(priority=1)
    assert gate.gate.pick() == [higher]
    assert {lower.state, ahead.state} == {RequestState.WAITING}


def test_input_ahead_that_is_denied_holds_up_its_like_only(gate):
    ahead = gate.ask(limit=0)
    gate.gate.pick()
    gate.deny(ahead, 5)
    another, request = gate.ask(limit=0, priority=3), gate.ask()
    assert gate.gate.pick() == [request]
    assert another.state is RequestState.WAITING
    gate.settlements.available = 55
    gate.gate.granted(
        request,
        SimpleNamespace(
            held=0,
            loaded=0,
            cap=0,
            slots=0,
            prompt=10,
            cached=0,
            account=request.account,
        ),
    )
    assert gate.gate.pick() == [another, ahead]


def test_the_least_need_counts_and_the_highest_level(gate):
    low, high = gate.ask(), gate.ask(priority=2)
    assert gate.gate.pick() == [high, low]
    gate.deny(high, 9)
    gate.deny(low, 5)
    between = gate.ask(priority=1)
    assert gate.gate.pick() == []
    gate.settlements.available = 55
    assert gate.gate.pick() == [high]
    assert between.state is RequestState.WAITING


def test_who_must_wait_for_an_end(gate):
    request = gate.ask()
    gate.gate.block(inf, (True, 0))
    gate.settlements.available = 10**6
    assert gate.gate.pick() == []
    gate.gate.unblock()
    assert gate.gate.pick() == [request]


def test_pages_are_made_free_for_a_higher_priority(gate):
    request = gate.ask()
    gate.gate.pick()
    gate.settlements.available = 10
    one, two = gate.held(6), gate.held(6)
    gate.deny(request, 3)  # six slots: the youngest has them
    assert gate.retracted == [(two, "priority")]
    assert request.promised
    gate.settlements.available = 0  # they come with the next answer
    assert gate.gate.pick() == [request]
    assert not request.promised
    assert one in gate.runs.values()


def test_how_many_pages_who_waits_lacks_by_its_last_denial(gate):
    request = gate.ask()
    gate.gate.pick()
    gate.deny(request, 5)
    one, two, three = gate.held(4), gate.held(4), gate.held(4)
    gate.settlements.available = 52  # three pages, six slots are lacking
    gate.planner.step += 8
    assert gate.gate.pick() == [request]
    assert [run for run, _ in gate.retracted] == [three, two]
    assert (request.promised, request.need) == (False, 55)
    assert one in gate.runs.values()


def test_pages_that_are_kept_from_who_could_take_some_cost_nobody_his_run(gate):
    denied = gate.ask()
    gate.gate.pick()
    gate.deny(denied, 5)
    gate.gate.queue.discard(denied)
    other = gate.ask()
    gate.held(2)
    assert gate.gate.pick() == [other]  # eight pages of 50 that are there
    assert gate.retracted == []


def test_what_a_run_could_not_keep_ends_its_session(gate):
    for cause, active in (("fairness", True), ("memory", False)):
        request = gate.ask()
        gate.gate.queue.discard(request)
        gate.gate.retracted(request, cause)
        assert (request.state, request.account.active) == (RequestState.WAITING, active)


def test_pages_of_equals(gate):
    request = gate.ask()
    gate.gate.pick()
    run = gate.held(40, priority=0)
    run.account.tenant.slots = 60
    gate.deny(request, 3)
    assert gate.retracted == [(run, "fairness")]


def test_who_was_refused_a_row_asks_again_after_eight_steps(gate):
    gate.planner.free_rows = 0
    request = gate.ask()
    for step, looks in ((100, 1), (101, 1), (107, 1), (108, 2), (109, 2), (116, 3)):
        gate.planner.step = step
        assert gate.gate.pick() == []
        assert gate.runs.looks == looks, step
    gate.ask()  # somebody came, but not before the first one
    assert gate.gate.pick() == []
    assert gate.runs.looks == 3
    high = gate.ask(priority=1)
    run = gate.held(4)
    assert gate.gate.pick() == [high]
    assert (gate.retracted[0], request.state) == ((run, "priority"), RequestState.WAITING)


def test_input_ahead_asks_for_no_row_and_no_pages(gate):
    gate.held(40, priority=-5)
    gate.planner.free_rows = 0
    ahead = gate.ask(limit=0)
    assert gate.gate.pick() == []
    gate.planner.free_rows = 1
    assert gate.gate.pick() == [ahead]
    gate.deny(ahead, 3)
    assert gate.gate.pick() == []
    assert gate.retracted == []


@pytest.mark.parametrize(("available", "picked"), [(6, 1), (5, 0)])
def test_two_pages_stay_free_for_each_run(gate, available, picked):
    gate.planner.running = 3
    gate.settlements.available = available
    gate.ask()
    assert len(gate.gate.pick()) == picked


def test_a_request_that_another_computes_for_is_parked(gate):
    request = gate.ask(priority=2)
    gate.gate.pick()
    owner = SimpleNamespace(waiters=[], filled=6, kept=6)
    gate.gate.denied(request, Denied(1, "shared", resident=6, on=9), owner)
    assert (request.state, request.resident, request.charge) == (RequestState.PARKED, 6, 0)
    assert (owner.waiters, gate.hurried) == ([request], [(owner, (True, 2))])
    assert request.account.served == 0
    gate.gate.wake(owner)
    assert (owner.waiters, request.state) == ([], RequestState.WAITING)
    gate.gate.wake(owner)
    assert gate.gate.pick() == [request]


def test_who_is_denied_what_a_step_under_way_computes_asks_again_at_once(gate):
    request = gate.ask()
    gate.gate.pick()
    owner = SimpleNamespace(waiters=[], filled=9, kept=6, offered=6)
    gate.settlements.commit = lambda run: gate.committed.append((run, run.offered))
    gate.gate.denied(request, Denied(1, "shared", resident=6, on=9), owner)
    assert gate.committed == [(owner, 9)]
    assert (request.state, owner.waiters) == (RequestState.WAITING, [])
    assert gate.gate.pick() == [request]


@pytest.mark.parametrize("why", ["owes", "gone"])
def test_nobody_is_parked_on_what_is_over(gate, why):
    request = gate.ask()
    gate.gate.pick()
    owner = SimpleNamespace(waiters=[])
    gate.settlements.owes = lambda number: number == 9
    gate.gate.denied(
        request, Denied(1, "shared", on=9 if why == "owes" else 8), owner if why == "owes" else None
    )
    assert (request.state, owner.waiters) == (RequestState.WAITING, [])
    assert gate.gate.pick() == [request]


def test_what_a_newcomer_leaves(gate):
    """Whole pages of what is reserved, and of what those before it are going to need."""
    busy = Account(77)
    gate.gate.active.begin(busy)
    gate.gate.active.announce(busy, 13)
    begun, one, two = gate.ask(), gate.ask(begun=False), gate.ask(begun=False, limit=7)
    assert gate.gate.active.reserved == 13 + 5
    assert gate.gate.pick() == [begun, one, two]
    assert (begun.leave, one.leave, two.leave) == (0, 12, 15)  # of 18 + 5 and 18 + 5 + 7 tokens


def test_a_newcomer_alone_leaves_nothing(gate):
    busy = Account(77)
    gate.gate.active.begin(busy)
    gate.gate.active.announce(busy, 13)
    gate.planner.running = 0
    one, two = gate.ask(begun=False), gate.ask(begun=False)
    assert gate.gate.pick() == [one, two]
    assert (one.leave, two.leave) == (0, 12)


def test_how_much_room_a_newcomer_waits_for(gate):
    busy = Account(77)
    gate.gate.active.begin(busy)
    gate.gate.active.announce(busy, 13)
    request = gate.ask(begun=False)
    assert gate.gate.pick() == [request]
    assert request.leave == 9
    gate.gate.denied(request, Denied(1, "memory", resident=3, short=2), None)
    assert (request.state, request.in_memory_queue) == (RequestState.WAITING, True)
    memory_queue = gate.gate._memory_queue
    assert memory_queue._need == 45  # two more than there are beside the reserve
    assert gate.gate._room == 50 - 7
    gate.gate.queue.discard(request)
    assert len(memory_queue) == 0


def test_a_session_that_has_begun_since_leaves_nothing(gate):
    busy = Account(77)
    gate.gate.active.begin(busy)
    gate.gate.active.announce(busy, 13)
    request = gate.ask(begun=False)
    gate.gate.pick()
    gate.gate.active.begin(request.account)
    gate.deny(request, 2)
    assert (request.in_memory_queue, request.need) == (False, 0)
    assert gate.gate.pick() == [request]
    assert request.leave == 0


def test_what_a_run_holds_and_leaves(gate):
    request = gate.ask(limit=30)
    account = request.account
    gate.gate.pick()
    run = SimpleNamespace(
        held=10,
        loaded=0,
        prompt=10,
        cached=4,
        cap=39,
        slots=14,
        account=account,
        request=request,
        out=[7, 7],
    )
    gate.gate.granted(request, run)
    assert (account.tenant.slots, account.held, request.foreseen) == (10, 10, 25)
    run.held, run.slots = 14, 18
    gate.gate.grown(run, 4)
    assert (account.tenant.slots, account.held, request.foreseen) == (14, 14, 21)
    gate.gate.stopped(run, 16)
    assert (account.tenant.slots, account.held, account.kept, request.foreseen) == (0, 0, 12, 30)
    assert account.given == 2
    gate.gate.ended(request)
    assert (request.foreseen, account.rested) == (0, 0)
    account.requests.clear()
    gate.gate.ended(request)
    assert account.rested == 1
