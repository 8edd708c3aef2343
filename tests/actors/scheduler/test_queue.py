"""The order of waiting requests."""

import random

import pytest

from ramify.actors.scheduler.queue import QueueMember, ServiceHeap, WaitingQueue
from ramify.actors.scheduler.request import Account, Request, Tenant
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams

MANY = 10**9


@pytest.fixture
def make():
    count = 0

    def make(account, *, prompt=10, resident=0, mark=0, priority=0, batch=None, max_tokens=1):
        nonlocal count
        count += 1
        submit = Submit(count, count, prompt, max_tokens, SamplingParams(), priority=priority)
        request = Request(submit, account, count, count if batch is None else batch, mark, max_tokens)
        request.resident = resident
        return request

    return make


def pick(queue, rows=MANY, tokens=MANY, ahead=0, admit=lambda request, rowless: not rowless):
    return queue.pick(rows, lambda level: tokens if level[0] else ahead, admit)


def drain(queue):
    return [r.submit.request for r in pick(queue)]


def queue_of(ageing=1.0):
    return WaitingQueue(ageing, 4, 1 << 20)


def test_priority_comes_first(make):
    queue = queue_of()
    for priority in (0, 5, -3, 5):
        queue.push(make(Account(priority + 10), priority=priority))
    assert drain(queue) == [2, 4, 1, 3]
    assert len(queue) == 0


def test_within_a_session_the_longest_cached_prefix_goes_first(make):
    queue, account = queue_of(), Account(1)
    for resident in (0, 7, 3):
        queue.push(make(account, resident=resident))
    assert drain(queue) == [2, 3, 1]


def test_ageing_outweighs_a_cached_prefix(make):
    queue, account = queue_of(0.5), Account(1)
    queue.push(make(account, mark=0))
    queue.push(make(account, mark=100, resident=49))  # 100 tokens of waiting are worth 50
    queue.push(make(account, mark=100, resident=51))
    assert drain(queue) == [3, 1, 2]


def test_sessions_alternate_by_service(make):
    queue = queue_of()
    one, two = Account(1), Account(2)
    for _ in range(4):
        queue.push(make(one))
    for _ in range(2):
        queue.push(make(two))
    assert drain(queue) == [1, 5, 2, 6, 3, 4]
    assert (one.served, two.served) == (40, 20)


def test_a_cheap_session_goes_more_often(make):
    queue = queue_of()
    heavy, light = Account(1), Account(2)
    for _ in range(3):
        queue.push(make(heavy, prompt=40))
    for _ in range(6):
        queue.push(make(light, prompt=10))
    assert drain(queue) == [1, 4, 5, 6, 7, 2, 8, 9, 3]


def test_a_newcomer_starts_at_the_virtual_time(make):
    queue = queue_of()
    old = Account(1)
    old.charge(1000)
    queue.push(make(old))
    queue.push(make(old))
    assert [r.submit.request for r in pick(queue, 1)] == [1]
    late = Account(2)
    queue.push(make(late))
    assert late.tenant.served == 1000  # nothing was saved up while it was away
    assert drain(queue) == [3, 2]


def test_requests_submitted_together_stay_together(make):
    queue = queue_of()
    one, two = Account(1), Account(2)
    for _ in range(3):
        queue.push(make(one, batch=1))
    queue.push(make(two, batch=1))
    assert drain(queue) == [1, 2, 3, 4]


def test_rows_and_tokens_bound_a_pick(make):
    queue = queue_of()
    account = Account(1)
    for _ in range(6):
        queue.push(make(account, prompt=10))
    assert len(pick(queue, 2)) == 2
    assert len(pick(queue, tokens=15)) == 2
    account.tenant.prefilling = 1
    assert len(pick(queue, tokens=0)) == 0
    assert len(queue) == 2


def test_input_computed_ahead_holds_no_generation_up(make):
    queue = queue_of()
    busy = Account(1)
    busy.charge(1000)
    queue.push(make(Account(2), priority=5, max_tokens=0))
    queue.push(make(busy))
    queue.push(make(Account(3), max_tokens=0))
    assert [r.submit.request for r in pick(queue)] == [2]
    assert [r.submit.request for r in pick(queue, ahead=MANY)] == [1, 3]
    assert len(queue) == 0


def test_input_of_one_frame_is_not_all_taken_at_once(make):
    """As a batch it would take every row for what may not be asked for soon."""
    queue, account = queue_of(), Account(1)
    for _ in range(8):
        queue.push(make(account, prompt=10, batch=1, max_tokens=0))
    assert len(pick(queue, ahead=25)) == 3
    assert len(queue) == 5


def test_refund_restores_the_place(make):
    queue = queue_of()
    one, two = Account(1), Account(2)
    queue.push(make(one))
    queue.push(make(one))
    queue.push(make(two))
    two.charge(5)
    (first,) = pick(queue, 1)
    queue.refund(one, first.charge)
    queue.push(first)
    assert one.served == one.tenant.served == 0
    assert drain(queue) == [1, 3, 2]


def test_a_refund_moves_who_waits_forward(make):
    """The queue has noted what the session and its tenant were charged before."""
    queue, tenant = queue_of(), Tenant()
    one, two, other = Account(1, tenant), Account(2, tenant), Account(3)
    for account in (one, other):
        account.charge(500)
    two.served = 100
    for account in (two, one, other, one):
        queue.push(make(account))
    queue.refund(one, 450)
    assert drain(queue) == [2, 4, 1, 3]


def test_sessions_of_one_tenant_share_its_turn(make):
    """Five sessions of one credential are one tenant."""
    queue, crowd = queue_of(), Tenant()
    sessions = [Account(i, crowd) for i in range(5)]
    for account in sessions * 2:
        queue.push(make(account))
    alone = Account(9)
    for _ in range(3):
        queue.push(make(alone))
    order = drain(queue)
    assert [i for i, name in enumerate(order) if name > 10] == [1, 3, 5]
    crowd_order = [(name - 1) % 5 for name in order if name <= 10]
    assert sorted(crowd_order[:5]) == sorted(crowd_order[5:]) == [0, 1, 2, 3, 4]


def test_a_new_session_of_a_busy_tenant_starts_at_its_sessions_time(make):
    queue, tenant = queue_of(), Tenant()
    old, new = Account(1, tenant), Account(2, tenant)
    old.served = 1000
    for _ in range(2):
        queue.push(make(old))
    pick(queue, 1)
    queue.push(make(new))
    assert new.served == 1000
    assert drain(queue) == [3, 2]


def test_who_has_no_prompt_in_work_gets_one_in_whatever_the_room_is(make):
    """The long prompts of one tenant fill all steps: they do not keep another one out."""
    queue, busy, new = queue_of(), Account(1), Account(2)
    busy.tenant.prefilling = 1
    new.charge(50)
    for account in (new, new, busy):
        queue.push(make(account))
    queue.push(make(Account(3), max_tokens=0))
    assert pick(queue, tokens=0) == []  # the busy one is first
    busy.charge(100)
    assert [r.submit.request for r in pick(queue, tokens=0)] == [1]


def test_without_a_row_the_first_of_each_level_asks_for_one(make):
    queue = queue_of()
    for priority in (0, 5, 5):
        queue.push(make(Account(priority), priority=priority))
    asked = []

    def admit(request, rowless):
        asked.append((request.submit.request, rowless))
        return len(asked) == 1

    assert [r.submit.request for r in pick(queue, 0, admit=admit)] == [2]
    assert asked == [(2, True), (3, True)]  # nobody behind gets what the best one did not
    assert len(queue) == 2


def test_a_level_that_is_short_of_pages_holds_up_itself_and_no_other(make):
    queue = queue_of()
    for priority in (5, 5, 0):
        queue.push(make(Account(priority), priority=priority))
    picked = pick(queue, admit=lambda request, rowless: not request.submit.priority)
    assert [r.submit.request for r in picked] == [3]


def test_who_is_picked_holds_a_row(make):
    queue, tenant = queue_of(), Tenant()
    one, two = Account(1, tenant), Account(2, tenant)
    for account in (one, one, two):
        queue.push(make(account))
    pick(queue)
    assert (one.rows, two.rows, tenant.rows) == (2, 1, 3)
    assert tenant.shares == one.shares == {}


def test_discarded_requests_do_not_come_up_and_do_not_pile_up(make):
    queue, account = queue_of(), Account(1)
    keep = make(account)
    queue.push(keep)
    for _ in range(1000):
        request = make(account)
        queue.push(request)
        queue.discard(request)
    (share,) = account.shares.values()
    assert len(share.heap) < 100
    for _ in range(1000):
        other = make(Account(2))
        queue.push(other)
        queue.discard(other)
    assert max(len(ring.notes) for ring in queue._levels.values()) < 200
    assert drain(queue) == [1]


def test_against_a_naive_model(make):
    """One request a pick: the same order as sorting everything each time."""
    rng = random.Random(5)
    queue = queue_of(0.3)
    accounts = [Account(i) for i in range(6)]
    waiting = []
    served = dict.fromkeys(range(6), 0)
    virtual = 0
    for turn in range(800):
        if rng.random() < 0.55 or not waiting:
            request = make(
                accounts[rng.randrange(6)],
                prompt=rng.randrange(1, 60),
                resident=rng.randrange(0, 20),
                mark=turn,
                priority=rng.choice([0, 0, 1]),
            )
            session, priority = request.account.session, request.submit.priority
            if not any((r.account.session, r.submit.priority) == (session, priority) for r in waiting):
                served[session] = max(served[session], virtual)
            waiting.append(request)
            queue.push(request)
        elif rng.random() < 0.2:
            request = waiting.pop(rng.randrange(len(waiting)))
            queue.discard(request)
        else:
            top = max(r.submit.priority for r in waiting)
            level = [r for r in waiting if r.submit.priority == top]
            least = min(served[r.account.session] for r in level)
            allowed = [r for r in level if served[r.account.session] == least]
            (got,) = pick(queue, 1)
            assert got in allowed
            same = [r for r in allowed if r.account is got.account]
            assert got is min(same, key=lambda r: (0.3 * r.mark - r.resident, r.seq))
            virtual = max(virtual, least)
            served[got.account.session] += max(1, got.prompt - got.resident)
            waiting.remove(got)
        assert len(queue) == len(waiting)
        assert {a.session: a.tenant.served for a in accounts} == served


def test_one_token_of_room_is_room(make):
    queue = queue_of()
    for _ in range(2):
        queue.push(make(Account(1), max_tokens=0))
    assert len(pick(queue, ahead=1)) == 1
    queue, account = queue_of(), Account(2)
    account.tenant.prefilling = 1
    for _ in range(2):
        queue.push(make(account))
    assert len(pick(queue, tokens=1)) == 1
    assert pick(queue, tokens=0) == []


def test_what_a_pick_charges(make):
    """What is to be computed, and the slots that are granted ahead of the output."""
    queue, account = queue_of(), Account(1)
    request = make(account, prompt=10, resident=3, max_tokens=9)
    queue.push(request)
    assert pick(queue) == [request]
    assert (request.charge, account.served, account.tenant.served) == (11, 11, 11)
    assert (request.ticket, account.rows) == (0, 1)


def member(served, live=1):
    who = Tenant()
    who.served = served
    made = QueueMember(who)
    made.live = live
    return made


def test_a_ring_goes_by_service_and_then_by_who_came_first():
    ring = ServiceHeap()
    late, early, second = member(5), member(3), member(3)
    for each in (late, early, second):
        ring.post(each)
    assert ring.best() is early
    third = member(3)
    ring.post(third, first=True)
    assert ring.best() is third
    fourth = member(3)
    ring.post(fourth, first=True)
    assert ring.best() is fourth
    for gone, best in ((fourth, third), (third, early), (early, second), (second, late)):
        gone.live = 0
        assert ring.best() is best
    late.live = 0
    assert ring.best() is None
    assert ring.notes == []


def test_a_member_has_one_valid_note():
    ring = ServiceHeap()
    one = member(5)
    ring.post(one)
    ring.post(one)
    assert (len(ring.notes), one.posted) == (1, 5)
    one.who.served = 8  # more service: put right when it comes up
    ring.post(one)
    assert (len(ring.notes), one.posted) == (1, 5)
    one.who.served = 2
    ring.post(one)
    assert (len(ring.notes), one.posted) == (2, 2)
    assert ring.best() is one


def test_who_had_more_service_meanwhile_goes_behind_its_equals():
    ring = ServiceHeap()
    one, other = member(1), member(4)
    ring.post(one)
    ring.post(other)
    one.who.served = 4
    assert ring.best() is other
    assert one.posted == 4
    other.who.served = 5
    assert ring.best() is one
    assert len(ring.notes) == 2


def test_a_ring_forgets_who_is_gone():
    ring = ServiceHeap()
    for number in range(64):
        ring.post(member(100 - number, live=number % 8 == 0))
    assert len(ring.notes) == 64
    ring.post(member(50))
    assert (len(ring.notes), ring._limit) == (9, 64 + 2 * 9)
    served = []
    while (best := ring.best()) is not None:
        served.append(best.who.served)
        best.live = 0
    assert served == [44, 50, 52, 60, 68, 76, 84, 92, 100]


def test_a_share_forgets_requests_that_left(make):
    queue, account = queue_of(), Account(1)
    requests = [make(account, resident=number) for number in range(40)]
    for request in requests:
        queue.push(request)
    (share,) = account.shares.values()
    for request in requests[:20]:
        queue.discard(request)
    assert (len(share.heap), share.live) == (40, 20)
    queue.discard(requests[20])
    assert (len(share.heap), share.live) == (19, 19)
    assert share.top() is requests[39]
    for request in requests[21:38]:
        queue.discard(request)
    assert len(share.heap) == 19  # so few are not worth it
    assert drain(queue) == [40, 39]


@pytest.mark.parametrize(("count", "left"), [(32, 32), (33, 16)])
def test_how_many_entries_are_worth_a_look(make, count, left):
    queue, account = queue_of(), Account(1)
    requests = [make(account) for _ in range(count)]
    for request in requests:
        queue.push(request)
    (share,) = account.shares.values()
    for request in requests[: count - 16]:
        queue.discard(request)
    assert len(share.heap) == left


def test_who_goes_first_of_all(make):
    queue = queue_of()
    with pytest.raises(LookupError, match="nobody waits"):
        queue.first()
    low, high = make(Account(1)), make(Account(2), priority=3)
    queue.push(low)
    assert (queue.first(), queue.pushes) == (low, 1)
    queue.push(high)
    assert (queue.first(), queue.pushes, len(queue)) == (high, 2, 2)
    queue.discard(high)
    assert (queue.first(), queue.pushes, len(queue)) == (low, 2, 1)
    assert high.account.shares == high.account.tenant.shares == {}


def test_before_its_equals(make):
    queue = queue_of()
    one, two = make(Account(1)), make(Account(2))
    queue.push(one)
    queue.push(two, first=True)
    assert drain(queue) == [2, 1]


def test_before_all_others(make):
    queue = queue_of()
    early, busy = Account(1), Account(2)
    busy.charge(50)
    queue.virtual = 40
    queue.push(make(early))
    queue.push(make(busy))
    queue.virtual = 100
    low, new = make(Account(3), priority=-1), make(Account(4))
    queue.push_before_all(low)
    queue.push_before_all(new)
    assert new.account.tenant.served == early.tenant.served == 40
    assert drain(queue) == [4, 1, 2, 3]


def test_of_each_prompt_a_part_counts_in_the_room(make):
    """Long ones do not keep short ones out: of each 64 tokens count."""
    queue = WaitingQueue(1.0, 4, 64)
    account = Account(1)
    for _ in range(4):
        queue.push(make(account, prompt=1000))
    assert len(pick(queue, tokens=128)) == 2
    account.tenant.prefilling = 1
    assert len(pick(queue, tokens=65)) == 2


def test_room_that_was_spent_at_a_higher_level_is_gone(make):
    queue = queue_of()
    for account in (Account(1), Account(2)):
        account.tenant.prefilling = 1
        queue.push(make(account, prompt=30, priority=account.session))
    ahead = make(Account(3), prompt=30, max_tokens=0)
    queue.push(ahead)
    assert [r.submit.request for r in pick(queue, tokens=30, ahead=1)] == [2, 3]
    assert [r.submit.request for r in pick(queue, tokens=31)] == [1]


def test_a_prompt_that_is_resident_takes_a_token_of_room(make):
    queue, account = queue_of(), Account(1)
    account.tenant.prefilling = 1
    for _ in range(5):
        queue.push(make(account, prompt=10, resident=10))
    assert len(pick(queue, tokens=3)) == 3
    assert account.served == 3


def test_who_runs_nothing_is_tried_before_a_refused_tenant_that_runs_something(make):
    queue, accounts = queue_of(), [Account(i) for i in range(4)]
    for account, served, rows in zip(accounts, (10, 20, 900, 800), (2, 1, 0, 0), strict=True):
        queue.push(make(account))
        account.tenant.served = served
        account.hold(rows)
    tried = []

    def admit(request, rowless):
        tried.append(request.submit.request)
        return request.submit.request == 4

    assert [r.submit.request for r in pick(queue, admit=admit)] == [4]
    assert tried == [1, 4, 1, 3]
    assert pick(queue, admit=admit) == []
    assert tried[4:] == [3]  # it is the first now, and holds up who runs something
