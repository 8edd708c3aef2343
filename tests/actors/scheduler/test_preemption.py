"""Rows and pages that running requests give to others: for priority, for fairness, and not too often."""

from types import SimpleNamespace

import pytest

from ramify.actors.scheduler.preemption import SOON, TURN, for_growth, for_row, for_slots
from ramify.actors.scheduler.request import Tenant
from ramify.protocol.messages import CancelRequest, CancelSession


def ident(request, session=1):
    return session << 32 | request


def fill(w, session, count, *, first=1, max_tokens=45, **more):
    """`count` generations of a session; their prompts differ."""
    return [
        w.submit(i, [session, i], session=session, max_tokens=max_tokens, seed=i, **more)
        for i in range(first, first + count)
    ]


def steps(w, count):
    for _ in range(count):
        w.cache_settles()
        w.result()
    w.cache_settles()


def steps_to_first_token(w, submit, most=200):
    """Results that come in after `submit` was sent, up to its first token."""
    w.turn(submit)
    w.cache_settles()
    for count in range(1, most):
        w.result()
        w.cache_settles()
        if submit.request in w.output:
            return count
    raise AssertionError("no token")


def crowded(world, *, rows=8, tenants=2, **more):
    """All rows are held by sessions with more generations than they have rows."""
    more.setdefault("quantum_steps", 4)
    w = world(rows=rows, pages=4000, budget=64, **more)
    for session in range(1, tenants + 1):
        w.turn(*fill(w, session, rows))
    steps(w, 20)
    assert w.core.running == rows
    return w


def run_out(w, expected):
    """To the end of everything; every output is what it is without a retraction."""
    w.run(steps=100_000)
    for request, finished in w.finished.items():
        session, number = request >> 32, request & 0xFFFFFFFF
        if finished.reason == "length":
            length = len(w.output[request])
            assert w.output[request] == expected([session, number], number, length)
            assert finished.output == length
    w.check_idle()


# --- priority -----------------------------------------------------------------------------------


def test_a_higher_priority_takes_the_row_of_the_youngest_of_the_lowest(world, expected):
    w = world(rows=4, pages=2000)
    for number, priority in enumerate((0, -8, -8, 3), 1):
        w.turn(w.submit(number, [1, number], seed=number, max_tokens=100, priority=priority))
        w.cache_settles()
    steps(w, 3)
    assert steps_to_first_token(w, w.submit(9, [1, 9], seed=9, priority=8)) <= 3
    assert w.core.lifecycle.retractions == {"priority": 1}
    assert [c.request for s in w.settles for c in s.commits if c.final] == [ident(3)]
    run_out(w, expected)


def test_priority_needs_no_quantum_and_nothing_swings(world, expected):
    """All rows are one session's at -8, and 8 comes: a row for each that comes."""
    w = world(rows=32, pages=4000, budget=128)
    w.turn(*fill(w, 1, 64, max_tokens=30, priority=-8))
    w.cache_settles()
    for number in range(1, 9):
        new = w.submit(number, [2, number], session=2, seed=number, max_tokens=5, priority=8)
        assert steps_to_first_token(w, new) <= 3
    assert w.core.lifecycle.retractions["priority"] <= 8
    run_out(w, expected)


def test_equal_and_lower_priorities_take_nothing(world, expected):
    w = crowded(world, tenants=1)
    w.turn(*fill(w, 1, 3, first=50, max_tokens=5, priority=-1))
    steps(w, 30)
    assert not w.core.lifecycle.retractions
    run_out(w, expected)


def test_a_low_priority_that_computes_the_prefix_of_a_high_one_is_spared(world, expected):
    """Its row would be the first to go; but its prompt is what the high one waits for."""
    prompt = list(range(90)) * 2
    w = world(rows=3, pages=2000, budget=16)
    w.turn(w.submit(1, prompt, max_tokens=20, priority=-8))
    w.turn(w.submit(2, [7, 7], max_tokens=60, priority=-6))
    steps(w, 2)
    w.turn(w.submit(3, prompt, session=2, seed=3, priority=8, max_tokens=2))
    steps(w, 1)
    w.turn(*(w.submit(i, [8, i], session=3, seed=i, priority=8, max_tokens=60) for i in (4, 5)))
    steps(w, 3)
    finals = [c.request for s in w.settles for c in s.commits if c.final]
    assert finals == [ident(2)]
    w.run()
    assert w.output[ident(3, 2)] == expected(prompt, 3, 2)
    assert w.output[ident(1)] == expected(prompt, 0, 20)
    w.check_idle()


def test_a_prefix_is_computed_at_the_priority_of_who_waits_for_it(world, expected):
    prompt, others = list(range(90)) * 2, [[50 + i] * 200 for i in range(4)]
    w = world(rows=8, pages=4000, budget=32)
    w.turn(*(w.submit(i, other, max_tokens=2) for i, other in enumerate(others, 10)))
    w.turn(w.submit(1, prompt, max_tokens=0, session=3))
    w.turn(w.submit(2, prompt, max_tokens=20, session=4, priority=-8))
    steps(w, 2)
    w.turn(w.submit(3, prompt, session=2, seed=3, priority=8, max_tokens=1))
    steps(w, 12)
    assert w.order[0] == ident(3, 2)
    w.run()
    assert w.output[ident(3, 2)] == expected(prompt, 3, 1)
    w.check_idle()


def test_a_higher_priority_takes_pages(world, expected):
    w = world(rows=8, pages=60, budget=64, lookahead=4)
    w.turn(*fill(w, 1, 4, max_tokens=30, priority=-2))
    steps(w, 8)
    high = w.submit(9, [2, 9] * 15, session=2, seed=9, max_tokens=5, priority=2)
    assert steps_to_first_token(w, high) <= 3
    assert w.core.lifecycle.retractions["priority"] >= 1
    w.run()
    assert w.output[ident(9, 2)] == expected([2, 9] * 15, 9, 5)
    for number in range(1, 5):
        assert w.output[ident(number)] == expected([1, number], number, 30)
    w.check_idle()


def test_who_is_denied_does_not_hold_a_higher_priority_up(world):
    w = world(rows=8, pages=40, lookahead=1)
    w.turn(w.submit(1, [1] * 20, max_tokens=12))
    w.cache_settles()
    w.turn(w.submit(2, [2] * 35, max_tokens=1))
    w.cache_settles()
    w.turn(w.submit(3, [3] * 3, max_tokens=2, priority=1))
    w.turn(w.submit(4, [4] * 3, max_tokens=2))
    w.run()
    assert w.order == [ident(3), ident(1), ident(2), ident(4)]
    w.check_idle()


# --- fairness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["", "newcomer"])
def test_a_newcomer_has_its_first_token_in_three_steps(world, expected, owner):
    w = crowded(world, tenants=5, rows=10)
    before = w.core.lifecycle.retractions["fairness"]
    new = w.submit(1, [9, 1], session=9, seed=1, max_tokens=5, owner=owner)
    assert steps_to_first_token(w, new) <= 3
    assert w.core.lifecycle.retractions == {"fairness": before + 1}
    run_out(w, expected)


def test_a_newcomer_does_not_wait_for_a_quantum(world, expected):
    """Five tenants have just taken all rows; it takes one, and no second one within the quantum."""
    w = world(rows=10, pages=4000, budget=64, quantum_steps=32)
    for session in range(1, 6):
        w.turn(*fill(w, session, 10))
    steps(w, SOON)
    assert w.core.running == 10
    first, second = fill(w, 9, 2, max_tokens=20)
    assert steps_to_first_token(w, first) <= SOON + 3
    w.turn(second)
    steps(w, 10)
    assert w.core.lifecycle.retractions == {"fairness": 1}
    assert second.request not in w.output
    run_out(w, expected)


def test_five_sessions_of_one_credential_are_one_tenant(world, expected):
    """A newcomer with many generations gets half of the rows, and no more."""
    w = world(rows=10, pages=4000, budget=64, quantum_steps=3)
    for session in range(1, 6):
        w.turn(*fill(w, session, 4, owner="crowd"))
    steps(w, 15)
    w.turn(*fill(w, 9, 12, owner="new"))
    steps(w, 12)
    rows = {owner: tenant.rows for owner, tenant in w.core.tenants.items()}
    assert rows == {"crowd": 5, "new": 5}
    crowd = [a.rows for s, a in w.core.accounts.items() if s < 6]
    assert crowd == [1] * 5  # and its own sessions share what is left
    run_out(w, expected)


def test_sessions_of_one_credential_share_its_rows(world, expected):
    w = world(rows=12, pages=4000, budget=64, quantum_steps=4)
    w.turn(*fill(w, 1, 12, owner="team"))
    steps(w, 10)
    w.turn(*fill(w, 2, 12, owner="team"))
    steps(w, 20)
    assert [w.core.accounts[session].rows for session in (1, 2)] == [6, 6]
    run_out(w, expected)


def test_rows_come_to_rest(world, expected):
    """Each swap makes two tenants more equal. Only an end, whose row goes to who had the least
    service so far, can make another one worth it."""
    w = crowded(world, rows=12, tenants=3, quantum_steps=2)
    steps(w, 10)
    before = w.core.lifecycle.retractions["fairness"]
    rows = [account.rows for account in w.core.accounts.values()]
    assert max(rows) - min(rows) <= 1
    steps(w, 8)
    assert not w.finished
    assert w.core.lifecycle.retractions["fairness"] == before <= 12
    run_out(w, expected)
    assert w.core.lifecycle.retractions["fairness"] <= 12 + len(w.finished)
    assert w.core.lifecycle.computed_twice <= 2 * w.core.lifecycle.retractions["fairness"]


def test_nobody_loses_a_row_within_its_quantum(world):
    w = world(rows=4, pages=2000, quantum_steps=30)
    w.turn(*fill(w, 1, 8))
    steps(w, 5)
    assert steps_to_first_token(w, w.submit(1, [9], session=9, max_tokens=45)) <= 3  # it had none
    waited = steps_to_first_token(w, w.submit(2, [9, 2], session=9))
    assert 20 <= waited <= 35


def test_more_tenants_than_rows_take_turns(world, expected):
    """Nobody waits for the end of the long ones, and a turn is long enough to be worth it."""
    w = world(rows=3, pages=4000, quantum_steps=2, budget=64)
    for session in range(1, 8):
        w.turn(*fill(w, session, 1, max_tokens=80))
    steps(w, 55)
    assert len(w.output) == 7
    run_out(w, expected)
    tokens = 7 * 80
    assert w.core.lifecycle.retractions["fairness"] <= tokens / 3 / 16 * 3 + 8
    assert w.core.lifecycle.computed_twice <= 2 * w.core.lifecycle.retractions["fairness"]


def test_pages_are_shared_too(world, expected):
    """The generations of one tenant fill the pool; another one's prompt is let in."""
    w = world(rows=16, pages=120, lookahead=4, quantum_steps=4)
    w.turn(*fill(w, 1, 12, max_tokens=60))
    steps(w, 12)
    new = w.submit(1, [9] * 30, session=9, seed=1, max_tokens=4)
    assert steps_to_first_token(w, new) <= 8
    assert w.core.lifecycle.retractions["fairness"] >= 1
    w.run(steps=100_000)
    assert w.output[ident(1, 9)] == expected([9] * 30, 1, 4)
    for number in range(1, 13):
        assert w.output[ident(number)] == expected([1, number], number, 60)
    w.check_idle()


def test_who_holds_no_less_takes_no_pages(world):
    w = world(rows=16, pages=60, lookahead=4, quantum_steps=1)
    w.turn(w.submit(1, [1] * 30, max_tokens=10), w.submit(1, [2] * 20, session=2, max_tokens=20))
    steps(w, 5)
    w.turn(w.submit(2, [3] * 30, session=2, max_tokens=2))
    w.run()
    assert not w.core.lifecycle.retractions["fairness"]
    w.check_idle()


# --- what it costs --------------------------------------------------------------------------------


def test_what_is_computed_twice_is_counted(world, expected):
    """The executor ran so many tokens more than without a retraction, and no page was lost."""
    w = crowded(world, rows=8, tenants=2)
    for number in range(1, 6):
        w.turn(w.submit(number, [9, number], session=9, seed=number, max_tokens=6))
        steps(w, 10)
    run_out(w, expected)
    assert sum(w.core.lifecycle.retractions.values()) >= 1
    outputs = sum(len(output) for output in w.output.values())
    least = sum(f.computed + f.output - 1 for f in w.finished.values())
    assert outputs == 16 * 45 + 5 * 6
    assert w.executor.computed == least + w.core.lifecycle.computed_twice
    assert w.core.lifecycle.computed_twice <= 2 * sum(w.core.lifecycle.retractions.values())


def test_a_prompt_that_is_retracted_counts_its_chunks_in_flight(world, expected):
    prompt = list(range(90)) * 3
    w = world(rows=1, pages=2000, budget=32)
    w.turn(w.submit(1, prompt, max_tokens=3, priority=-1))
    steps(w, 2)
    w.run(w.submit(2, [5, 5], session=2, max_tokens=3))
    assert w.core.lifecycle.computed_twice == 2 * 32
    assert w.executor.computed == 270 + 2 + 2 * 2 + 64
    assert w.output[ident(1)] == expected(prompt, 0, 3)
    w.check_idle()


def test_evicted_tokens_of_a_retracted_run_count_as_computed_twice(world, expected):
    w = world(rows=4, pages=44, lookahead=4)
    w.turn(w.submit(1, [1, 1, 1], max_tokens=30, priority=-1))
    steps(w, 20)
    w.run(w.submit(2, [2] * 30, session=2, max_tokens=10))
    assert w.core.lifecycle.retractions["priority"] == 1
    assert w.executor.computed == 32 + 39 + w.core.lifecycle.computed_twice
    assert w.core.lifecycle.computed_twice > 2
    assert w.output[ident(1)] == expected([1, 1, 1], 0, 30)
    w.check_idle()


def test_service_that_was_not_used_is_given_back(world):
    """A generation was granted slots ahead and did not use them: they are not its service."""
    w = world(rows=4, pages=200, lookahead=8)
    w.turn(w.submit(1, [1, 2, 3], max_tokens=30))
    steps(w, 2)
    w.run(CancelRequest(ident(1)))
    account = w.core.accounts[1]
    assert account.served == account.tenant.served == 3 + 2 - 1


def test_cancelled_and_closed_while_retracted(world, expected):
    w = crowded(world, rows=4, tenants=1)
    w.turn(*fill(w, 9, 2, max_tokens=20))
    steps(w, 3)
    retracted = [r for r in w.core.requests.values() if r.done]
    first, second, *_ = retracted
    done = first.done
    w.turn(CancelRequest(first.submit.request, keep=0))
    assert w.finished[first.submit.request].output == done
    w.turn(CancelSession(1))
    run_out(w, expected)
    assert {request >> 32 for request in w.finished} == {1, 9}
    assert second.submit.request not in w.finished


@pytest.mark.parametrize("priority", [0, 1])
def test_no_more_runs_give_pages_than_are_needed(priority):
    """The youngest has exactly what is asked for."""
    account, taker = SimpleNamespace(tenant=Tenant()), SimpleNamespace(tenant=Tenant())
    account.tenant.slots = 40
    runs = [
        SimpleNamespace(
            level=(True, 0),
            complete=False,
            held=8,
            account=account,
            since=0,
            request=SimpleNamespace(seq=seq),
        )
        for seq in range(5)
    ]
    request = SimpleNamespace(level=(True, priority), account=taker)
    chosen, lower = for_slots(request, 8, runs, 100, 4)
    assert ([run.request.seq for run in chosen], lower) == ([4], priority > 0)
    chosen, lower = for_slots(request, 9, runs, 100, 4)
    assert [run.request.seq for run in chosen] == [4, 3]


def test_what_was_cached_is_not_held_by_the_one_who_found_it(world):
    """What is held decides who gives pages; a long prefix that all share is nobody's."""
    w = world(lookahead=4)
    w.run(w.submit(1, range(30), max_tokens=1))
    w.turn(w.submit(2, [*range(30), 50, 51], max_tokens=20))
    w.cache_settles()
    assert w.core.accounts[1].tenant.slots == 2 + 4
    w.run()
    w.check_idle()


# --- the choices by themselves --------------------------------------------------------------------


def on(account, seq, *, since=0, level=(True, 0), complete=False, held=8, prompt=8):
    """A run of `account`."""
    request = SimpleNamespace(seq=seq)
    return SimpleNamespace(
        account=account, request=request, since=since, level=level, complete=complete, held=held,
        prompt=prompt,
    )  # fmt: skip


def session(rows=0, tenant=None, slots=0):
    """A session whose tenant has its rows, and more if it has others."""
    tenant = tenant or Tenant()
    tenant.rows += rows
    tenant.slots += slots
    return SimpleNamespace(tenant=tenant, rows=rows, began=0)


def asking(account, level=(True, 0)):
    return SimpleNamespace(account=account, level=level)


def test_the_youngest_of_the_lowest_level_gives_its_row():
    other, mine = session(5), session()
    runs = [
        on(other, 1, level=(True, -1)),
        on(other, 2, level=(True, -2)),
        on(other, 4, level=(True, -2)),
        on(other, 3, level=(True, -2)),
        on(other, 9, level=(True, -2), complete=True),
        on(other, 10, level=(True, 2)),
    ]
    assert for_row(asking(mine), runs, 0, 100) == (runs[2], True)
    ahead = on(other, 0, level=(False, 7))
    assert for_row(asking(mine), [*runs, ahead], 0, 100) == (ahead, True)
    assert for_row(asking(mine, (True, -2)), runs[:1], 1000, 4) is None  # nothing of a higher level
    assert for_row(asking(runs[0].account), runs[:2], 0, 100) == (runs[1], True)  # its own too
    assert for_row(asking(mine), [], 1000, 4) is None


@pytest.mark.parametrize(
    ("theirs", "mine", "quantum", "wait"),
    [
        (3, 1, 10, 10),  # two more: after a quantum
        (2, 1, 10, None),  # one more: never
        (2, 2, 10, None),
        (2, 0, 10, 4),  # who has nothing waits for some steps only
        (2, 0, 3, 3),
        (9, 0, 10, 4),
        (1, 0, 10, 80),  # one row for each tenant: they take turns
        (0, 0, 10, None),
    ],
)
def test_how_long_a_run_keeps_its_row(theirs, mine, quantum, wait):
    for tenant in (None, Tenant()):  # of another tenant, or another session of the same one
        run = on(session(theirs, tenant), 1, since=50)
        request = asking(session(mine, tenant))
        if wait is None:
            assert for_row(request, [run], 10_000, quantum) is None
        else:
            assert for_row(request, [run], 50 + wait - 1, quantum) is None
            assert for_row(request, [run], 50 + wait, quantum) == (run, False)


def test_who_gives_a_row_among_equals():
    """The tenant with the most rows, of it the session with the most, of that the youngest run."""
    team = Tenant()
    large, small, alone = session(3, team), session(2, team), session(4)
    runs = [on(small, 9), on(large, 3), on(large, 5), on(large, 4), on(alone, 8)]
    mine = session()
    assert for_row(asking(mine), runs, 100, 1) == (runs[2], False)
    assert for_row(asking(mine), [runs[4], runs[0]], 100, 1) == (runs[0], False)
    assert for_row(asking(large), [runs[2]], 100, 1) is None  # its own
    assert for_row(asking(mine), [on(alone, 1, complete=True)], 100, 1) is None


def test_lower_levels_give_pages_first():
    other, mine = session(slots=16), session()
    old, young = on(other, 1, level=(True, -1)), on(other, 2, level=(True, -1))
    lowest, equal = on(other, 0, level=(True, -2)), on(other, 3)
    nothing = on(other, 8, level=(True, -3), held=0)
    ending = on(other, 9, level=(True, -3), complete=True)
    runs = [old, equal, nothing, young, ending, lowest]
    assert for_slots(asking(mine), 1, runs, 0, 100) == ([lowest], True)
    assert for_slots(asking(mine), 8, runs, 0, 100) == ([lowest], True)
    assert for_slots(asking(mine), 9, runs, 0, 100) == ([lowest, young], True)
    assert for_slots(asking(mine), 24, runs, 0, 100) == ([lowest, young, old], True)
    assert for_slots(asking(mine), 25, runs, 0, 100) == ([], False)  # the equal one has a quantum
    assert for_slots(asking(mine), 25, runs, 100, 100) == ([lowest, young, old, equal], False)


def test_who_gives_pages_has_no_less_afterwards():
    mine = session(slots=10)
    for slots, gives in ((26, True), (25, False)):  # 8 of them go, and 18 are asked for with what it has
        other = session(slots=slots)
        run = on(other, 1, since=40)
        assert for_slots(asking(mine), 8, [run], 50, 10) == (([run], False) if gives else ([], False))
        assert for_slots(asking(mine), 8, [run], 49, 10) == ([], False)


def test_who_has_no_pages_waits_for_a_few_steps_only():
    other, mine = session(slots=40), session()
    run = on(other, 1, since=50)
    assert for_slots(asking(mine), 8, [run], 50 + SOON - 1, 100) == ([], False)
    assert for_slots(asking(mine), 8, [run], 50 + SOON, 100) == ([run], False)
    assert for_slots(asking(mine), 8, [run], 52, 2) == ([run], False)  # a quantum may be less
    mine.tenant.slots = 1
    assert for_slots(asking(mine), 8, [run], 149, 100) == ([], False)
    assert for_slots(asking(mine), 8, [run], 150, 100) == ([run], False)


def test_an_only_run_gives_its_pages_to_who_has_none_when_it_had_its_turn():
    other, mine = session(slots=8), session()
    run = on(other, 1, since=50)
    turn = 50 + TURN * 10
    assert for_slots(asking(mine), 8, [run], turn - 1, 10) == ([], False)
    assert for_slots(asking(mine), 8, [run], turn, 10) == ([run], False)
    assert for_slots(asking(mine), 9, [run], turn, 10) == ([], False)  # more than the other has
    mine.tenant.slots = 1
    assert for_slots(asking(mine), 7, [run], turn, 10) == ([], False)  # it has some
    two = [on(session(slots=8), 1), on(session(slots=8), 2)]
    mine.tenant.slots = 0
    assert for_slots(asking(mine), 8, two, turn, 10) == ([two[1]], False)


def test_a_turn_is_as_long_as_what_has_to_be_computed_anew_up_to_a_bound():
    for prompt, steps in ((79, 80), (200, 200), (700, 640)):
        run = on(session(slots=8), 1, prompt=prompt)
        mine = asking(session())
        assert for_slots(mine, 8, [run], steps - 1, 10) == ([], False)
        assert for_slots(mine, 8, [run], steps, 10) == ([run], False)


def test_each_run_that_gives_pages_leaves_its_tenant_less():
    other, mine = session(slots=40), session()
    runs = [on(other, seq) for seq in range(5)]
    assert for_slots(asking(mine), 16, runs, 30, 4) == ([runs[4], runs[3]], False)
    assert for_slots(asking(mine), 24, runs, 30, 4) == (
        [],
        False,
    )  # 40 - 16 is as much, but not 40 - 24
    assert for_slots(asking(mine), 8, [on(mine, 7), on(other, 1, held=0)], 30, 4) == ([], False)


def test_the_tenant_with_the_most_slots_gives_its_youngest_pages():
    rich, richer, mine = session(slots=50), session(slots=60), session()
    runs = [on(rich, 9), on(richer, 1), on(richer, 2), on(richer, 8, complete=True)]
    runs.append(on(richer, 7, level=(True, 1)))
    assert for_slots(asking(mine), 8, runs, 100, 4) == ([runs[2]], False)
    assert for_slots(asking(mine), 17, runs, 100, 4) == ([runs[2], runs[1], runs[0]], False)


def test_in_which_order_runs_are_retracted():
    """Of sessions that run one thing, the one that began last: it has the least to compute anew."""
    account = session(2, slots=30)
    account.began = 7
    assert for_growth(on(account, 5, level=(True, 3))) == (True, 3, -30, -7, -5)
    early, late = (on(session(1, slots=30), seq) for seq in (5, 4))
    late.account.began = 9
    assert min(early, late, key=for_growth) is late
