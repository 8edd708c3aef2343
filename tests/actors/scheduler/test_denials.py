"""A request that finds no memory: its session is charged for work, not for waiting.

And it is not tried again, nor anything else, while nothing has changed.
"""

import random

import pytest

BIG = 30  # prompt tokens: more than is left beside session 3


def ident(request, session):
    return session << 32 | request


def test_a_denial_does_not_cost_a_session_its_turn(world):
    """Session 2 had some work done, session 1 none; both wait until session 3 ends."""
    w = world(pages=40, rows=4, lookahead=1)
    w.run(w.submit(1, [9] * 4, max_tokens=1, session=2))
    w.turn(w.submit(1, [3] * 20, max_tokens=6, session=3))
    w.cache_settles()
    w.turn(w.submit(1, [1] * BIG, max_tokens=1, session=1))
    w.cache_settles()
    assert any(a.request == ident(1, 1) for s in w.settles for a in s.acquires)
    assert w.core.waiting == 1  # denied
    w.turn(w.submit(2, [2] * BIG, max_tokens=1, session=2))
    w.run()
    assert w.order[-2:] == [ident(1, 1), ident(2, 2)]
    w.check_idle()


def test_a_generation_without_memory_and_input_ahead_do_not_take_turns_without_end(world):
    """They did: the one was denied, the other granted and retracted for it, and both were tried anew."""
    w = world(pages=32, rows=8, budget=16, lookahead=8)
    w.turn(w.submit(1, [1] * 19, max_tokens=0, session=1, owner="one"))
    w.turn(w.submit(1, [2] * 18, max_tokens=1, session=2, owner="one", priority=1))
    w.turn(w.submit(1, [3] * 9, max_tokens=0, session=3, owner="one"))
    for _ in range(30):
        if w.replies:
            w.settled()
    assert not w.replies
    w.run()
    assert len(w.finished) == 3
    w.check_idle()


@pytest.mark.parametrize("seed", range(60))
def test_where_nothing_changes_nothing_is_asked_again(world, seed):
    """In a pool of 32 slots: a refused request waits for pages, for who runs to end, or for its turn."""
    dice = random.Random(seed)
    w = world(
        pages=32, rows=dice.choice([2, 8, 16]), budget=dice.choice([16, 64]),
        quantum_steps=dice.choice([4, 16, 64]), lookahead=dice.choice([1, 4, 8]),
    )  # fmt: skip
    count, owner = dice.randint(3, 12), dice.choice(["", "one"])
    for session in range(1, count + 1):
        prompt = [session * 7 % 97] * dice.randint(2, 28)
        output, priority = dice.choice([0, 1, 4, 20, 40]), dice.choice([-1, 0, 0, 0, 1])
        w.turn(w.submit(1, prompt, max_tokens=output, session=session, priority=priority, owner=owner))
    while w.replies or w.executor.plans:
        asked = len(w.settles)
        if not w.replies:
            w.result()
        while w.replies:
            w.settled()
            assert len(w.settles) - asked <= count + 2
        asked = len(w.settles)
        w.turn()
        assert len(w.settles) == asked
    assert len(w.finished) == count
    w.check_idle()
