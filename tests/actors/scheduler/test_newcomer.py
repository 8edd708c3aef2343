"""One tenant fills the pool and has had little service so far; another one comes, with nothing."""

import pytest


def ident(session, request=1):
    return session << 32 | request


def steps_until_token(w, request, most):
    """How many steps are planned until `request` has a token; `most` at most."""
    begin = w.core.planner.step
    while not w.output.get(request) and w.core.planner.step - begin < most:
        w.turn(w.replies.popleft() if w.replies else w.executor.run())
    return w.core.planner.step - begin


@pytest.mark.parametrize("scarce", ["pages", "rows"])
@pytest.mark.parametrize("when", [60, 80, 100])
def test_who_runs_nothing_does_not_wait_behind_a_crowd_that_cannot_be_served(world, scarce, when):
    """All pages (or rows) are the crowd's own, so nobody can give it more.

    The newcomer has a token within a quantum, for which a run keeps what it has, and a few steps.
    """
    pages, rows = (1500, 64) if scarce == "pages" else (40_000, 8)
    w = world(pages=pages, rows=rows, budget=64, quantum_steps=32, context=3000)
    w.turn(*(w.submit(1, [s] * 10, session=s, owner="crowd", max_tokens=1000) for s in range(1, 61)))
    while w.core.planner.step < when:
        w.turn(w.replies.popleft() if w.replies else w.executor.run())
    crowd = w.core.tenants["crowd"]
    queue = w.core.lifecycle.admission.queue
    queue.virtual = crowd.served + 4000  # as others leave it that were served more
    w.turn(w.submit(1, [1, 2, 3] * 4, session=1000, owner="newcomer", max_tokens=5))
    assert steps_until_token(w, ident(1000), 900) <= 32 + 8  # it was 495 (rows) and more than 900
    assert crowd.rows > 1


@pytest.mark.parametrize("when", [40, 150])
def test_an_only_run_that_holds_the_whole_pool_gives_way_after_its_turn(world, expected, when):
    """It would run for 280 steps and more. The newcomer waits for 8 quanta of it at most."""
    w = world(pages=300, rows=8, budget=64, quantum_steps=8, context=300)
    w.turn(w.submit(1, [7] * 10, owner="one", max_tokens=280))
    while w.core.planner.step < when:
        w.turn(w.replies.popleft() if w.replies else w.executor.run())
    w.turn(w.submit(1, [1, 2, 3] * 70, session=2, seed=3, owner="newcomer", max_tokens=5))
    assert steps_until_token(w, ident(2), 400) <= max(0, 8 * 8 - when) + 8 + 12
    w.run()
    assert w.output[ident(1)] == expected([7] * 10, 0, 280)
    assert w.output[ident(2)] == expected([1, 2, 3] * 70, 3, 5)
    w.check_idle()
