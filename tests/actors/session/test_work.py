"""No frame makes a session do much in one turn of the loop. Work is counted in lines, not timed."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.kit.turns import TURN, Work
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from tests.actors.session.test_linear import lines_of

BRANCHES = 600
MOST = 25 * TURN  # lines in a turn; a step may be more than what is left of it
NAMES = [f"b{i}" for i in range(BRANCHES)]


def test_the_first_step_of_a_turn_always_has_room() -> None:
    work = Work(100)
    assert work.take(1000)
    assert work.over
    assert not work.take(1)
    work.renew()
    assert work.take(60)
    assert not work.take(60)
    assert work.take(40)
    assert work.over


FRAMES: dict[str, list[w.ClientMessage]] = {
    by: [w.Prune(id=i, from_=NAMES, by=by, keep=True) for i in range(10, 60)]  # type: ignore[arg-type]
    for by in ("number", "vote", "logprob", "first")
} | {
    "rollbacks": [w.Rollback(id=i, turns=400) for i in range(10, 410)],
    "joins": [w.Join(id=i, from_=NAMES, keep=True, role=None, each="{i}") for i in range(10, 60)],
    "names": [w.Fork(id=i, branch="none", as_=[f"n{k}" for k in range(1024)]) for i in range(10, 60)],
    "drops": [w.Drop(id=10, branch=NAMES)],
    "sets": [w.Set(id=i, retain_s=60.0) for i in range(10, 110)],
    "generates": [w.Generate(id=10, branch=NAMES, max_tokens=2)],
    "appends": [w.Append(id=10, branch=NAMES, text="one two three")],
}


@pytest.mark.parametrize("name", FRAMES)
def test_no_turn_is_long(sim: Callable[..., Any], name: str) -> None:
    engine = sim(context=4096, turn=TURN)
    engine.integrity = False
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    core.frame(client.socket, [w.Append(id=i, tokens=[5]) for i in range(1, 4)], engine.now)
    for _ in range(600):  # as a file may bring them
        core.state.extend(
            core.state.branches["main"], [7], "7", tail=core.state.branches["main"].tail, turn=1
        )
    core.frame(client.socket, [w.Fork(id=5, as_=NAMES)], engine.now)
    core.work.renew()
    turns = [lines_of(lambda: core.framed(m.Frame(client.socket, FRAMES[name]), engine.now))]
    while core.unfinished:
        turns.append(lines_of(lambda: core.go_on(engine.now)))
    assert max(turns) < MOST, f"{max(turns)} lines in one of {len(turns)} turns"
    ended = {getattr(each, "id", None) for each in core.subscribers[client.socket].out}
    waits = {task.op.id for task in core.runner.tasks()}
    assert {op.id for op in FRAMES[name]} <= ended | waits  # type: ignore[union-attr]
