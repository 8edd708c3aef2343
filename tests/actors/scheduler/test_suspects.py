"""Who may be why executors die: counted, tried alone, cleared, refused."""

from types import SimpleNamespace
from typing import Any

from ramify.actors.scheduler.request import RequestState
from ramify.actors.scheduler.suspects import MOST, Suspects


class FakeRequest:
    def __init__(self) -> None:
        self.done = self.losses = self.deaths = 0
        self.died_at = -1
        self.state = RequestState.WAITING
        self.run: Any = None


def request() -> Any:
    return FakeRequest()


def test_one_death_makes_nobody_run_alone() -> None:
    suspects = Suspects()
    assert suspects.died([request(), request()]) == []
    assert not suspects
    assert suspects.take() is None


def test_a_token_between_two_deaths_clears() -> None:
    suspects, one, other = Suspects(), request(), request()
    suspects.died([one, other])
    one.done += 1
    assert suspects.died([one, other]) == []
    assert suspects.take() is other
    other.state = RequestState.RUNNING
    assert suspects.take() is None
    other.run = SimpleNamespace(out=[])
    assert suspects.cleared() is None
    other.run.out.append(5)
    assert suspects.cleared() is other
    assert not suspects


def test_who_dies_twice_alone_is_refused() -> None:
    suspects, one = Suspects(), request()
    assert suspects.died([one]) == []
    assert suspects.died([one]) == [one]


def test_who_has_been_there_too_often_is_refused() -> None:
    suspects, one, other = Suspects(), request(), request()
    for _ in range(MOST - 1):
        one.done += 1
        assert suspects.died([one, other]) == []
    one.done += 1
    other.losses = 0
    assert suspects.died([one, other]) == [one]


def test_one_that_ends_while_it_waits_is_forgotten() -> None:
    suspects, one, other = Suspects(), request(), request()
    for _ in range(2):
        suspects.died([one, other])
    one.state = RequestState.ENDED
    assert suspects.take() is other
    other.state = RequestState.ENDED
    assert not suspects


def test_one_that_finds_no_pages_waits_like_the_others() -> None:
    suspects, one, other = Suspects(), request(), request()
    for _ in range(2):
        suspects.died([one, other])
    tried = suspects.take()
    assert tried is one
    one.state = RequestState.ACQUIRING
    assert suspects
    one.state = RequestState.WAITING
    assert suspects.take() is other
