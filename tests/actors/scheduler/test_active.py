"""What is kept for sessions that have begun: counters, against a sum over all of them."""

import random

import pytest

from ramify.actors.scheduler.active import BETWEEN, FORESEEN, SHARE, STAY, ActiveSessions
from ramify.actors.scheduler.request import Account, Request, Tenant
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams

QUANTUM = 4


@pytest.fixture
def active():
    return ActiveSessions(8000, QUANTUM)


@pytest.fixture
def ask():
    count = 0

    def ask(account, limit=10, priority=0):
        nonlocal count
        count += 1
        submit = Submit(count, count, 10, limit, SamplingParams(), priority=priority)
        account.requests[count] = Request(submit, account, count, count, 0, limit)
        return account.requests[count]

    return ask


def test_who_has_not_begun_reserves_nothing(active, ask):
    account = Account(1)
    active.foresee(ask(account), 10)
    active.announce(account, 100)
    account.hold(1)
    active.take(account, 30)
    assert (active.reserved, active.needs(account)) == (0, 70)
    active.begin(account)
    assert active.reserved == 70


def test_an_output_counts_for_a_few_tokens_only(active, ask):
    account = Account(1)
    active.begin(account)
    request = ask(account)
    for slots, counted in ((5, 5), (FORESEEN, FORESEEN), (FORESEEN + 1, FORESEEN), (-3, 0)):
        active.foresee(request, slots)
        assert (account.foreseen, active.reserved) == (counted, counted)


def test_what_a_session_left_is_reserved_while_it_runs_nothing(active, ask):
    account = Account(1)
    active.begin(account)
    request = ask(account)
    active.granted(request)
    account.hold(1)
    active.take(account, 50)
    assert active.reserved == 0  # held: nobody else can have it
    account.hold(-1)
    active.stopped(request, 50, 40)
    assert (active.reserved, account.kept, account.held) == (40, 40, 0)
    active.end(account)
    assert (active.reserved, account.kept) == (0, 0)


def test_what_is_announced_shrinks_as_it_comes(active):
    account = Account(1)
    active.begin(account)
    account.hold(1)
    active.announce(account, 100)
    active.take(account, 30)
    assert active.reserved == 70
    active.take(account, 90)
    assert active.reserved == 0
    active.announce(account, 5)  # anew
    assert active.reserved == 5


def test_a_tenant_reserves_a_part_of_the_pool_at_most(active):
    tenant = Tenant()
    for session in (1, 2, 3):
        account = Account(session, tenant)
        active.begin(account)
        active.announce(account, 1500)
    assert (active.reserved, tenant.reserved) == (8000 // SHARE, 4500)
    active.announce(account, 10**9)
    assert active.needs(account) == 8000 // SHARE
    other = Account(4)
    active.begin(other)
    active.announce(other, 7)
    assert active.reserved == 8000 // SHARE + 7


def test_a_quantum_after_its_last_request_a_session_is_not_active(active, ask):
    account = Account(1)
    active.begin(account)
    active.announce(account, 20)
    active.foresee(ask(account), 20)
    active.announce(account, 20)
    active.foresee(account.requests.pop(1), 0)
    active.rest(account, 10)
    assert active.reserved == 0  # nothing more comes
    active.expire(10 + QUANTUM - 1)
    assert account.active
    active.expire(10 + QUANTUM)
    assert not account.active


def test_a_session_whose_ops_wait_stays_active_for_longer(active, ask):
    account = Account(1)
    active.begin(account)
    active.foresee(ask(account), 20)
    active.announce(account, 21)
    active.foresee(account.requests.pop(1), 0)
    active.rest(account, 10)
    assert active.reserved == 21
    active.expire(10 + BETWEEN * QUANTUM - 1)
    assert account.active
    active.expire(10 + BETWEEN * QUANTUM)
    assert (account.active, active.reserved) == (False, 0)


def test_who_comes_back_in_time_stays_active(active, ask):
    account = Account(1)
    active.begin(account)
    active.rest(account, 10)
    ask(account)
    active.expire(10 + QUANTUM)
    assert account.active
    account.requests.clear()
    active.rest(account, 13)
    active.expire(13 + QUANTUM - 1)
    assert account.active
    active.expire(13 + QUANTUM)
    assert not account.active


def test_what_a_visit_left_is_not_reserved(active, ask):
    account = Account(1)
    request = ask(account)
    active.granted(request)
    active.take(account, 50)
    active.stopped(request, 50, 40)
    active.rest(account, 1)
    active.announce(account, 30)
    active.begin(account)
    assert (account.kept, active.reserved) == (0, 30)


def test_a_higher_priority_than_all_that_run(active, ask):
    low, high = ask(Account(1), priority=-1), ask(Account(2), priority=3)
    assert not active.outranks(high)  # nothing runs
    active.granted(low)
    assert active.outranks(high)
    assert not active.outranks(low)
    active.granted(high)
    assert not active.outranks(ask(Account(3), priority=3))
    assert active.outranks(ask(Account(3), priority=4))
    active.stopped(high, 0, 0)
    assert active.outranks(ask(Account(3), priority=0))


def test_the_counters_are_the_sums(active, ask):
    dice = random.Random(1)
    tenants = [Tenant(), Tenant()]
    accounts = [Account(n, dice.choice([Tenant(), *tenants])) for n in range(12)]
    requests = [ask(account) for account in accounts]
    step = 0
    for _ in range(3000):
        account = dice.choice(accounts)
        request = requests[account.session]
        match dice.randrange(8):
            case 0:
                active.begin(account)
            case 1:
                active.announce(account, dice.randrange(3000))
            case 2:
                active.foresee(request, dice.randrange(200))
            case 3:
                active.take(account, dice.randrange(100))
            case 4 if account.held:
                active.granted(request)
                active.stopped(request, account.held, dice.randrange(account.held + 1))
            case 5:
                active.rest(account, step)
            case 6:
                account.requests.clear()
            case 7:
                step += dice.randrange(9)
                active.expire(step)
        sums, reserved = {}, active.reserved
        for each in accounts:
            own = active.needs(each) + (0 if each.rows else each.kept) if each.active else 0
            assert each.reserved == own
            sums[each.tenant] = sums.get(each.tenant, 0) + own
        assert reserved == sum(min(8000 // SHARE, tokens) for tokens in sums.values())


def test_how_much_counts_and_for_how_long(active, ask):
    """64 tokens of an output, a quarter of the pool, eight quanta."""
    account = Account(1)
    active.begin(account)
    active.foresee(ask(account), 1000)
    assert account.foreseen == 64
    active.announce(account, 8000)
    assert active.needs(account) == active.reserved == 2000
    account.requests.clear()
    active.rest(account, 10)
    active.expire(10 + 8 * QUANTUM - 1)
    assert account.active
    active.expire(10 + 8 * QUANTUM)
    assert not account.active


def test_an_output_counts_until_it_is_as_long_as_they_usually_are(active, ask):
    account = Account(1)
    for done in (300, 140):
        request = ask(account)
        request.keep(done)
        active.learn(request)
    assert account.tenant.output == 290  # the first, and a sixteenth of the difference
    request = ask(account, limit=1000)
    for slots, counted in ((1000, 290), (900, 190), (750, FORESEEN), (20, 20), (0, 0)):
        active.foresee(request, slots)
        assert account.foreseen == counted


def test_all_that_a_tenant_reserves_is_kept_from_its_own_new_sessions(active):
    tenant, other = Tenant(), Tenant()
    for session in (1, 2, 3):
        account = Account(session, tenant)
        active.begin(account)
        active.announce(account, 1500)
    assert (active.reserved_from(tenant), active.reserved_from(other)) == (4500, 8000 // SHARE)


def test_who_has_not_begun_does_not_rest(active):
    account = Account(1)
    account.goal = 9
    active.rest(account, 1)
    assert (account.rested, account.goal, len(active._resting)) == (0, 9, 0)


def test_each_rest_has_a_number_of_its_own(active):
    """One that comes back and rests again is ended by the later rest only."""
    one, two = Account(1), Account(2)
    for account in (one, two):
        active.begin(account)
        active.rest(account, 1)
    active.rest(one, 3)
    assert one.rested != two.rested
    active.expire(1 + QUANTUM)
    assert (one.active, two.active) == (True, False)
    active.expire(3 + QUANTUM)
    assert not one.active


def test_several_end_at_once(active):
    accounts = [Account(number) for number in range(4)]
    for number, account in enumerate(accounts):
        active.begin(account)
        account.behind = number % 2 == 0
        active.rest(account, number)
    active.expire(100)
    assert [account.active for account in accounts] == [False] * 4


def test_what_was_held_when_it_began_counts_towards_its_goal(active, ask):
    account = Account(1)
    request = ask(account)
    active.granted(request)
    account.hold(1)
    active.take(account, 30)
    active.stopped(request, 0, 20)  # a visit before left 20
    active.announce(account, 100)
    assert (account.kept, account.held, account.goal) == (50, 30, 150)
    active.begin(account)
    assert (account.kept, account.held, account.goal, active.needs(account)) == (30, 30, 130, 100)
    assert active.reserved == 100


def test_whether_ops_wait_behind_what_is_foreseen(active, ask):
    account = Account(1)
    active.begin(account)
    active.foresee(ask(account), 20)
    for tokens, behind in ((19, False), (20, False), (21, True), (0, False)):
        active.announce(account, tokens)
        assert account.behind == behind


def test_ending_takes_the_goal_too(active):
    account = Account(1)
    active.begin(account)
    active.announce(account, 50)
    active.end(account)
    active.begin(account)
    assert (account.goal, active.reserved) == (0, 0)


def test_a_priority_counts_as_long_as_one_of_it_runs(active, ask):
    one, two = ask(Account(1), priority=3), ask(Account(2), priority=3)
    active.granted(one)
    active.granted(two)
    active.stopped(one, 0, 0)
    assert not active.outranks(ask(Account(3), priority=2))
    active.stopped(two, 0, 0)
    assert dict(active._rows) == {}


def test_a_stay_is_over_when_it_has_given_as_much_as_coming_back_costs(active, ask):
    account = Account(1)
    request = ask(account)  # of 10 tokens
    assert not active.over(request, 0)  # it has not begun
    active.begin(account)
    account.given = 9
    assert not active.over(request, 0)
    account.given = 10
    assert active.over(request, 0)
    active.announce(account, 100)
    assert not active.over(request, 0)  # a program is in its middle
    active.announce(account, 0)
    ask(account)
    assert not active.over(request, 0)  # another request of it runs


def test_no_stay_lasts_for_ever(active, ask):
    account = Account(1)
    request = ask(account)
    active.begin(account)
    account.began = 7
    assert not active.over(request, 6 + STAY * QUANTUM)
    assert active.over(request, 7 + STAY * QUANTUM)
