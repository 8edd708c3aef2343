"""A pool that is too small for all sessions at once: who begins, who waits, and for how long."""

import random

import pytest

from ramify.protocol.messages import CancelRequest, CancelSession
from ramify.protocol.plan import unpack


def ident(session, request=1):
    return session << 32 | request


class Programs:
    """Sessions of `turns` turns each, one after the other on one branch: `prompt` in, `output` out."""

    def __init__(self, world, count, turns=3, prompt=8, output=4, expects=True):
        self.world, self.turns, self.prompt, self.output = world, turns, prompt, output
        self.expects = expects
        self.turn = dict.fromkeys(range(1, count + 1), 0)
        self.first = {}  # session: the step when its first request had ended
        self.came = {}  # request of somebody new: the step when it came
        self.waited = []  # of these, the steps until they ended

    def ask(self, session):
        w, turn = self.world, self.turn[session]
        self.turn[session] += 1
        new = [(session * 7 + turn * 5 + i) % 97 for i in range(self.prompt)]
        branch = ident(session, 1000)
        w.cache.put(branch, [*w.cache.branches.get(branch, ()), *new])
        rest = self.turns - turn
        expects = rest * self.output + (rest - 1) * self.prompt if self.expects else 0
        return w.submit(
            turn + 1, None, session=session, branch=branch, max_tokens=self.output, expects=expects
        )

    def run(self, every=0):
        """`every` so many steps somebody new asks for two tokens; see `waited`."""
        w = self.world
        w.turn(*(self.ask(session) for session in self.turn))
        seen = set()
        for _ in range(20_000):
            step = w.core.planner.step
            events = []
            unfinished = len(seen) < self.turns * len(self.turn)
            if every and unfinished and step >= every * (len(self.came) + 1):
                session = 1000 + len(self.came)
                events.append(w.submit(1, [session % 97] * 3, session=session, max_tokens=2))
                self.came[ident(session)] = step
            for request in w.finished.keys() - seen:
                seen.add(request)
                session = request >> 32
                if request in self.came:
                    self.waited.append(step - self.came[request])
                    continue
                self.first.setdefault(session, w.core.planner.step)
                if self.turn[session] < self.turns:
                    events.append(self.ask(session))
            if events:
                w.turn(*events)
            elif w.replies:
                w.settled()
            elif w.executor.plans:
                w.result()
            else:
                break
        assert len(w.finished) == self.turns * len(self.turn) + len(self.came)
        assert all(finished.error is None for finished in w.finished.values())


def test_sessions_that_would_overfill_the_pool_begin_later(world):
    """Twenty programs of 36 tokens in a pool of 200: little is computed twice if they say what comes."""
    least = 20 * (3 * 8 + 3 * 4 - 1)  # of an output the last token is not run, until the next turn does
    computed = {}
    for expects in (True, False):
        w = world(pages=200, rows=32, budget=64, quantum_steps=64)
        Programs(w, 20, expects=expects).run()
        computed[expects] = w.executor.computed
        w.check_idle()
    assert computed[True] <= 1.1 * least < 1.2 * least < computed[False]


def test_where_the_pool_suffices_all_begin_at_once(world):
    w = world(pages=600, rows=16, budget=200, quantum_steps=64)
    Programs(w, 12).run()
    assert w.executor.computed <= 12 * (3 * 8 + 3 * 4)
    assert len(w.settles[0].acquires) == 12
    assert max(len(unpack(plan.decodes)) + len(plan.extends) for plan in w.sent) == 12
    w.check_idle()


def test_nobody_waits_for_more_than_his_turn(world):
    """Quanta of 8 steps: the k-th has its first answer after about k of them, whatever others do."""
    w = world(pages=80, rows=16, budget=64, quantum_steps=8)
    programs = Programs(w, 12, turns=6)
    programs.run()
    for place, step in enumerate(sorted(programs.first.values()), 1):
        assert step <= 2 * 8 * place + 40
    w.check_idle()


def test_a_crowd_in_an_overfull_pool_computes_little_twice(world):
    """Thirty sessions of one tenant, of 68 to 204 tokens as they grow: 400 hold two to five of them."""
    w = world(pages=400, rows=32, budget=200, quantum_steps=8)
    ask = w.submit
    w.submit = lambda *args, **more: ask(*args, owner="crowd", **more)
    programs = Programs(w, 30, turns=3, prompt=8, output=60, expects=False)
    programs.run()
    assert w.executor.computed <= 2.3 * 30 * 3 * 68
    w.check_idle()


def test_where_each_session_is_a_tenant_a_newcomer_waits_for_no_crowd(world):
    """The retracted were taken for newcomers: those waited in the queue until the crowd had ended."""
    w = world(pages=400, rows=32, budget=200, quantum_steps=8)
    programs = Programs(w, 30, turns=2, prompt=8, output=60, expects=False)
    programs.run(every=40)
    assert len(programs.waited) > 15
    assert max(programs.waited) <= 12  # it was 1,286
    w.check_idle()


def full(world, count=3, pages=100):
    """A world whose pool is used up by sessions with long answers; others wait in the memory queue."""
    w = world(pages=pages, rows=16, budget=64, quantum_steps=16)
    w.turn(*(w.submit(1, [s] * 10, session=s, max_tokens=40, expects=40) for s in range(1, count + 1)))
    for _ in range(20):
        w.turn(w.replies.popleft() if w.replies else w.executor.run())
    return w


def steps_until(w, request, most=100):
    """How many steps are planned until `request` has a token."""
    begin = w.core.planner.step
    while not w.output.get(request):
        assert w.core.planner.step - begin < most
        w.turn(w.replies.popleft() if w.replies else w.executor.run())
    return w.core.planner.step - begin


def test_a_higher_priority_waits_for_no_room(world):
    w = full(world)
    w.turn(*(w.submit(1, [s] * 8, session=s, max_tokens=40, expects=40) for s in range(10, 20)))
    w.turn(w.submit(1, [50, 51, 52], session=50, max_tokens=2, priority=1))
    assert steps_until(w, ident(50)) <= 6
    w.run()
    w.check_idle()


@pytest.mark.parametrize("close", [False, True])
def test_what_is_cancelled_leaves_the_memory_queue(world, close):
    w = full(world)
    w.turn(*(w.submit(1, [s] * 8, session=s, max_tokens=40, expects=40) for s in range(10, 20)))
    w.cache_settles()
    waiting = [s for s in range(10, 20) if w.core.requests[ident(s)].in_memory_queue]
    assert len(waiting) >= 5
    for session in waiting:
        w.turn(CancelSession(session) if close else CancelRequest(ident(session)))
    assert not len(w.core.lifecycle.admission._memory_queue)
    w.run()
    assert all((ident(s) in w.finished) != close for s in waiting)
    w.check_idle()


def test_input_ahead_of_its_generation_takes_no_reserved_page(world):
    """Neither that of who has not begun, nor that of a session that has."""
    w = full(world, count=2, pages=120)
    w.turn(
        w.submit(2, [90] * 30, session=1, max_tokens=0), w.submit(1, [91] * 30, session=9, max_tokens=0)
    )
    w.cache_settles()
    asked = [a for settle in w.settles for a in settle.acquires]
    leaves = {a.request: a.leave for a in asked}
    assert len([a for a in asked if a.request in (ident(1, 2), ident(9))]) == 2
    reserved = {account.session: account.reserved for account in w.core.accounts.values()}
    assert leaves[ident(9)] == reserved[1] + reserved[2] > leaves[ident(1, 2)] == reserved[2] > 0
    w.run()
    w.check_idle()


def test_the_second_of_a_session_that_begins_leaves_nothing(world):
    """Both are asked for at once: by the time of its denial the session has begun."""
    w = world(pages=30, rows=4, budget=64)
    w.turn(w.submit(1, [1] * 10, max_tokens=12), w.submit(2, [2] * 10, max_tokens=4))
    w.run()
    assert all(finished.error is None for finished in w.finished.values())
    leaves = [a.leave for settle in w.settles for a in settle.acquires if a.request == ident(1, 2)]
    assert leaves[0] > 0
    assert leaves[1] == 0
    w.check_idle()


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_end_and_leave_nothing(world, seed):
    dice = random.Random(seed)
    w = world(
        pages=dice.choice([40, 60, 100]), rows=dice.choice([3, 8]), budget=64,
        quantum_steps=dice.choice([1, 4, 32]), lookahead=dice.choice([1, 4]),
    )  # fmt: skip
    programs = Programs(w, dice.randrange(2, 9), turns=2, prompt=dice.randrange(2, 9), output=5)
    programs.run()
    w.check_idle()
