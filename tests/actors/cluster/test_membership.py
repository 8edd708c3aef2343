"""The table of replicas' states; who leaves when is in `test_cluster.py`."""

from typing import Any, get_args

import pytest

from ramify.actors.cluster.bindings import Bindings
from ramify.actors.cluster.membership import TRANSITIONS, Event, Membership, ReplicaMember, State
from ramify.actors.kit.report import Report
from ramify.actors.routing.session_router import SessionRouter


@pytest.fixture
def members() -> Membership:
    """Without sessions."""
    router = SessionRouter(lambda: 0.0)
    bindings = Bindings(router, *[lambda *message: None] * 3)
    return Membership(bindings, router, lambda sessions, quietly: None, lambda member, now: None, 30.0)


def joined(members: Membership, count: int) -> list[ReplicaMember]:
    added = [ReplicaMember(number, lambda: None) for number in range(count)]
    for member in added:
        members.add(member)
        members.up(member, 0.0)
    return added


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("event", get_args(Event))
def test_what_the_table_does_not_have_cannot_happen(
    members: Membership, state: State, event: Event
) -> None:
    (member,) = joined(members, 1)
    member.state = state
    if event in TRANSITIONS[state]:
        members.become(member, event)
        assert member.state == TRANSITIONS[state][event]
    else:
        with pytest.raises(KeyError):
            members.become(member, event)
        assert member.state == state


def test_every_state_is_reached_and_all_but_the_last_end() -> None:
    reached = {to for events in TRANSITIONS.values() for to in events.values()}
    assert reached | {"starting"} == set(get_args(State)) == set(TRANSITIONS)
    assert all(events.get("ends") == "gone" for state, events in TRANSITIONS.items() if state != "gone")


def test_one_that_ends_is_gone_once_and_its_number_is_free(members: Membership) -> None:
    first, second = joined(members, 2)
    assert members.ended(first) == "ready"
    assert members.ended(first) == "gone"
    assert (len(members), next(members.free())) == (1, 0)
    again = ReplicaMember(0, lambda: None)
    members.add(again)
    assert members.ended(first) == "gone"  # it does not take its successor along
    assert members.those("starting", "ready") == [second, again]
    assert members.ended(again) == "starting"


def test_a_fault_is_one_of_all(members: Membership) -> None:
    assert members.fault == "no replica is ready"
    first, second = joined(members, 2)
    first.hears(Report(fault="no result"), 1.0)
    assert members.fault is None
    second.hears(Report(fault="nothing"), 1.0)
    assert members.fault == "no result"


def test_who_drains_is_dismissed_once(members: Membership) -> None:
    first, _ = joined(members, 2)
    members.leave(0, 0.0)
    members.leave(0, 0.0)
    told: list[Any] = [members.look(0.0), members.look(99.0)]
    assert told == [[first], []]
