"""Sessions that have not begun, where the pool is too small for all: who is tried, and how soon."""

import random

import pytest

from ramify.actors.scheduler.queue import PAID, MemoryQueue, WaitingQueue
from ramify.actors.scheduler.request import Account, Request, RequestState, Tenant
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams

QUANTUM = 8
START = 100
FULL = -1  # no page is to be had


class Door:
    """A memory queue, and what becomes of those tried: `settle` starts or refuses them."""

    def __init__(self):
        self.waiting = WaitingQueue(1.0, 4, 64)
        self.queue = MemoryQueue(self.waiting, QUANTUM)
        self.step = START
        self.count = 0
        self.computed = 0
        self.missing = lambda request: 0  # tokens
        self.tried = {}  # request: the step

    def ask(self, account=None, priority=0, limit=5, prompt=10):
        self.count += 1
        submit = Submit(self.count, self.count, prompt, limit, SamplingParams(), priority=priority)
        account = account or Account(self.count)
        request = Request(submit, account, self.count, self.count, 0, limit)
        account.requests[self.count] = request
        return request

    def come(self, *args, **more):
        request = self.ask(*args, **more)
        self.queue.add(request, self.step)
        return request

    def advance(self, room=FULL, idle=False):
        """One step; the request that is tried now."""
        self.step += 1
        self.queue.advance(self.step, self.computed, room, self.missing, idle=idle)
        (request, *others) = self.waiting.pick(1, lambda level: 100, lambda r, rowless: not rowless) or [
            None
        ]
        assert not others
        if request is not None:
            self.tried[request] = self.step
            request.state = RequestState.ACQUIRING
        return request

    def refuse(self, request, need=5):
        """As `Admission.denied` does."""
        request.account.hold(-1)
        self.waiting.refund(request.account, request.charge)
        request.state = RequestState.WAITING
        self.queue.denied(request, need, self.step)


@pytest.fixture
def door():
    return Door()


def aged(door, count):
    """So many requests in the queue that are not new any more."""
    requests = [door.come() for _ in range(count)]
    for request in requests:
        request.came = 0
    return requests


def test_the_first_is_tried_after_a_quantum_at_most(door):
    requests = aged(door, 5)
    while len(door.queue):
        door.advance()
    assert [door.tried[r] for r in requests] == [START + 1 + k * QUANTUM for k in range(5)]
    assert all(r.ignores_reserve and not r.single_answer for r in requests)


def test_a_candidate_without_room_is_paid_for(door):
    """What it takes from others is computed again: `PAID` times as much is computed between two."""
    door.missing = lambda request: 50
    door.computed = 1000
    first, second = aged(door, 2)
    assert door.advance() is first
    assert [door.advance() for _ in range(3 * QUANTUM)] == [None] * (3 * QUANTUM)
    door.computed += PAID * 50 - 1
    assert door.advance() is None
    door.computed += 1
    assert door.advance() is second


def test_room_lets_them_begin_one_by_one(door):
    requests = aged(door, 4)
    assert door.advance() is requests[0]  # the first one, at once
    assert door.advance(0) is requests[1]
    door.refuse(requests[1], 70)
    assert door.advance(69) is None
    assert door.advance(70) is requests[1]
    assert not requests[1].ignores_reserve
    assert [door.advance(70), door.advance(71)] == requests[2:]


def test_one_at_a_time_is_tried(door):
    first, second = aged(door, 2)
    door.queue.advance(101, door.computed, 100, door.missing, idle=False)
    assert not first.in_memory_queue
    door.queue.advance(102, door.computed, 100, door.missing, idle=False)  # it has not been decided on
    assert second.in_memory_queue
    first.state = RequestState.PARKED
    door.queue.advance(103, door.computed, 100, door.missing, idle=False)
    assert not second.in_memory_queue


def test_a_candidate_that_lasts_holds_up_nobody_who_runs_nothing(door):
    """A tenant cannot take pages from its own runs: so it may stay a candidate as long as they do."""
    crowd = Tenant()
    crowd.rows = 4
    one, two = (door.come(Account(100 + n, crowd)) for n in range(2))
    door.queue.advance(101, door.computed, FULL, door.missing, idle=False)
    assert not one.in_memory_queue
    one.account.charge(50)
    beside, later = aged(door, 2)
    door.queue.advance(101 + QUANTUM, door.computed, FULL, door.missing, idle=False)
    assert (beside.in_memory_queue, beside.ignores_reserve, two.in_memory_queue) == (False, True, True)
    door.queue.advance(101 + 2 * QUANTUM, door.computed, FULL, door.missing, idle=False)
    assert (two.in_memory_queue, later.in_memory_queue) == (True, True)  # one beside it, not two
    beside.state = RequestState.RUNNING
    door.queue.advance(102 + 2 * QUANTUM, door.computed, FULL, door.missing, idle=False)
    assert (two.in_memory_queue, later.in_memory_queue) == (True, False)


def test_no_candidate_holds_up_who_is_new(door):
    """Not even that of a tenant that runs nothing: it may wait for pages for as long as others run."""
    (old,) = aged(door, 1)
    door.queue.advance(101, door.computed, FULL, door.missing, idle=False)
    new, later = door.come(), door.come()
    door.queue.advance(102, door.computed, FULL, door.missing, idle=False)
    assert (old.in_memory_queue, new.in_memory_queue, new.overtakes) == (False, False, True)
    door.queue.advance(102 + QUANTUM // 2, door.computed, FULL, door.missing, idle=False)
    assert later.in_memory_queue  # one at a time
    assert door.waiting.first() is new
    new.state, new.overtakes = RequestState.RUNNING, False
    door.queue.advance(103 + QUANTUM // 2, door.computed, FULL, door.missing, idle=False)
    assert not later.in_memory_queue


def test_who_had_to_give_its_pages_back_is_not_new(door):
    """It was: retracted requests went past the queue, and newcomers waited in it for minutes."""
    aged(door, 2)
    door.advance()
    back = door.ask()
    back.started = 5.0
    door.queue.add(back, door.step)
    assert door.advance() is None
    new = door.come()
    assert door.advance() is new


def test_where_nothing_runs_nobody_waits(door):
    requests = aged(door, 3)
    assert [door.advance(idle=True) for _ in range(3)] == requests


def test_who_is_new_goes_past_the_queue(door):
    old = aged(door, 20)
    assert door.advance() is old[0]
    new = door.come()
    assert door.advance() is new
    assert (new.ignores_reserve, new.single_answer) == (True, True)
    later = door.come()
    found = [door.advance() for _ in range(QUANTUM // 2)]
    assert found == [None] * (QUANTUM // 2 - 1) + [later]


def test_a_session_with_several_requests_begins_when_it_passes(door):
    aged(door, 3)
    account = Account(1)
    new, sibling = door.come(account), door.come(account)
    assert door.advance() is new
    assert (new.ignores_reserve, new.single_answer) == (True, False)
    door.queue.begin(account)
    assert not sibling.in_memory_queue


def test_nobody_is_new_for_longer_than_a_quantum(door):
    aged(door, 9)
    door.advance()
    for _ in range(3):
        door.come()
    tried = [door.advance() for _ in range(QUANTUM - 1)]
    assert [r is not None for r in tried] == [True, False, False, False, True, False, False]
    assert door.advance().came == 0  # the first of the queue again


def test_a_tenant_that_runs_something_is_not_new(door):
    aged(door, 2)
    door.advance()
    tenant = Tenant()
    tenant.rows = 1
    door.come(Account(77, tenant))
    assert door.advance() is None


def test_when_it_came_is_noted_once(door):
    request = door.come()
    assert door.advance(0) is request
    door.step += 3
    door.refuse(request)
    assert request.came == START
    assert [entry[2] for entry in door.queue.newcomers] in ([], [request])


def test_who_came_first_does_not_wait_for_who_comes_later(door):
    """Newcomers without any service do not push those back who have had a little."""
    old = aged(door, 1)[0]
    door.advance()
    account = Account(500)
    account.charge(10)
    back = door.come(account)
    back.came = 0
    door.waiting.virtual = 20
    new = door.come()
    new.came = 0
    assert old not in (back, new)
    while len(door.queue):
        door.advance()
    assert door.tried[back] < door.tried[new]


def test_priority_goes_first_in_the_queue(door):
    low, high = aged(door, 1)[0], door.come(priority=1)
    high.came = 0
    assert door.advance() is high
    assert low.in_memory_queue


def test_what_ends_leaves_the_queue(door):
    first, second = aged(door, 2)
    door.waiting.discard(first)
    assert (first.in_memory_queue, len(door.queue)) == (False, 1)
    assert door.advance() is second
    assert door.advance() is None


@pytest.mark.parametrize("seed", range(20))
def test_bounded_waits(seed):
    """Whatever room there is: of tenants with the same service, the k-th is tried within k quanta."""
    dice, door = random.Random(seed), Door()
    due = {}
    while door.step < 600 or len(door.queue):
        if door.step < 600 and dice.random() < 0.06:
            request = door.come()
            due[request] = door.step + 1 + len(door.queue) * QUANTUM
        tried = door.advance(dice.choice([FULL, FULL, FULL, 30]))
        if tried is not None and not tried.ignores_reserve and dice.random() < 0.5:
            door.refuse(tried, 31)
    for request, step in door.tried.items():
        assert step <= due[request], request.submit.request


@pytest.mark.parametrize("seed", range(20))
def test_a_tenant_with_many_sessions_holds_nobody_up(seed):
    """Another tenant waits two turns at most: until the crowd's turn is over, and its own."""
    dice, door = random.Random(seed), Door()
    crowd = Tenant()
    crowd.rows = 1
    for number in range(40):
        door.come(Account(1000 + number, crowd))
    others = {}
    while len(door.queue):
        if dice.random() < 0.05 and door.step < 400 and not any(r.in_memory_queue for r in others):
            others[door.come()] = door.step
        door.advance(FULL)
    for request, came in others.items():
        assert door.tried[request] - came <= 2 * QUANTUM


def test_input_ahead_waits_for_room(door):
    door.queue.advance(START, door.computed, 0, door.missing, idle=False)
    ahead = door.come(limit=0)
    assert door.advance(0) is ahead
    door.refuse(ahead, 40)
    assert [door.advance(39) for _ in range(3 * QUANTUM)] == [None] * (3 * QUANTUM)
    assert door.advance(40) is ahead
    assert not ahead.ignores_reserve
    last = door.come(limit=0)
    assert door.advance(0, idle=True) is last


def test_from_the_first_step_on_nobody_waits_for_a_quantum():
    for room in (FULL, 0):
        door = Door()
        door.step = -1
        (request,) = aged(door, 1)
        request.came = -QUANTUM
        assert door.advance(room) is request
        assert request.ignores_reserve
    door = Door()
    door.step = 0
    new = door.come()
    door.queue.advance(0, door.computed, FULL, door.missing, idle=False)
    assert (new.in_memory_queue, new.single_answer) == (False, True)


def test_nothing_is_needed_before_somebody_was_refused():
    door = Door()
    door.step = 0
    ahead = door.come(limit=0)
    assert door.advance(0) is ahead
    assert not ahead.ignores_reserve


def test_who_was_refused_is_not_tried_again_in_that_step(door):
    first, second = aged(door, 2)
    assert door.advance() is first
    assert door.advance(5) is second
    door.refuse(second, 5)
    door.queue.advance(door.step, door.computed, 5, door.missing, idle=False)
    assert second.in_memory_queue
    assert door.advance(5) is second


def test_who_was_refused_goes_before_its_equals(door):
    requests = aged(door, 3)
    assert door.advance() is requests[0]
    door.refuse(requests[0], 9)
    assert [door.advance(9) for _ in range(3)] == requests


def test_a_refusal_does_not_start_the_quantum_anew(door):
    first, second, third = aged(door, 3)
    assert door.advance() is first
    assert door.advance(0) is second
    door.refuse(second, 50)
    tried = [door.advance() for _ in range(QUANTUM)]
    assert tried == [None] * (QUANTUM - 2) + [second, None]
    assert second.ignores_reserve
    assert third.in_memory_queue


def test_the_line_counts_who_waits_in_it(door):
    first, second = aged(door, 2)
    assert (len(door.queue), first.in_memory_queue) == (2, True)
    door.waiting.discard(second)
    assert (len(door.queue), second.in_memory_queue) == (1, False)
    door.queue.begin(first.account)
    assert (len(door.queue), len(door.waiting), first.in_memory_queue) == (0, 1, False)


def test_an_empty_queue_forgets_who_was_new(door):
    new = door.come()
    assert [entry[2] for entry in door.queue.newcomers] == [new]
    door.waiting.discard(new)
    door.advance()
    assert not door.queue.newcomers


def test_the_shortest_of_those_who_are_new_is_first(door):
    """It does not wait for the pages of a longer one either."""
    aged(door, 2)
    door.advance()

    def look(step):
        door.queue.advance(step, door.computed, FULL, door.missing, idle=False)

    long, short, shorter = (door.come(prompt=prompt) for prompt in (900, 90, 80))
    look(102)
    assert [r.in_memory_queue for r in (long, short, shorter)] == [True, True, False]
    look(102 + QUANTUM // 2)
    assert [r.in_memory_queue for r in (long, short)] == [True, True]  # one at a time waits for pages
    less = door.come(prompt=10)
    look(103 + QUANTUM // 2)
    assert (less.in_memory_queue, short.in_memory_queue) == (False, True)


def test_who_has_just_had_an_answer_is_not_new(door):
    """It was: each turn of each tenant went past the line, and those who came waited behind them."""
    aged(door, 2)
    door.advance()
    account = Account(500)
    account.charge(600)
    door.come(account)
    assert door.advance() is None
    door.waiting.virtual = 600  # the others have had as much since
    later = Account(501)
    later.charge(600)
    owed = door.come(later)
    assert door.advance() is owed


def test_newcomers_that_have_left_are_forgotten(door):
    stays = door.come(prompt=1)
    for _ in range(1000):
        door.waiting.discard(door.come(prompt=50))
    assert stays.in_memory_queue
    assert len(door.queue.newcomers) <= 70
