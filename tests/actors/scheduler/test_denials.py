"""A request that finds no memory: its session is charged for work, not for waiting."""

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
