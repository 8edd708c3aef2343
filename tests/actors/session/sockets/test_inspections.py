"""Questions to the cache: each is answered once."""

from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.sockets.view import UNKNOWN, Inspections
from ramify.protocol.config import Limits
from ramify.protocol.messages import Inspect, Inspected


def state_of() -> SessionState:
    return SessionState(7, context=10, vocab=10, limits=Limits(), decode=lambda tokens: "")


def test_an_answer_goes_to_who_asked_and_once() -> None:
    state = state_of()
    branches = [state.root("a"), state.root("b")]
    state.out.cache.clear()
    inspections, heard = Inspections(state), []
    inspections.ask(branches, lambda *told: heard.append(("all", *told)))
    inspections.ask(branches[:1], lambda *told: heard.append(("one", *told)))
    every, one = state.out.cache
    assert isinstance(every, Inspect)
    assert isinstance(one, Inspect)
    assert (every.session, every.branches) == (7, [branch.handle for branch in branches])
    for _ in range(2):
        inspections.answered(Inspected(one.id, [4]))
    assert heard == [("one", [4], [0])]
    inspections.answered(Inspected(every.id, [1, 2], [0, 2]))
    assert heard == [("one", [4], [0]), ("all", [1, 2], [0, 2])]


def test_who_is_answered_when_all_is_given_up_may_ask_again() -> None:
    state = state_of()
    root = state.root("a")
    inspections, heard = Inspections(state), []

    def again(*told: list[int]) -> None:
        heard.append(told)
        inspections.ask([root], lambda *told: heard.append(told))

    inspections.ask([root, root], again)
    inspections.give_up()
    assert UNKNOWN == -1
    assert heard == [([UNKNOWN, UNKNOWN], [0, 0]), ([UNKNOWN], [0])]
