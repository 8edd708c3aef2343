"""Budgets and meters by themselves. What is metered of a whole session: test_memory.py."""

from array import array
from typing import Any

import pytest

from ramify.actors.kit import memory as sizes
from ramify.actors.kit.memory import Budget, Held, Holdings, Meter
from ramify.actors.session.branches.segments import InputSegment, Tail
from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded


def budget(most: int = 1000, sessions: int = 2) -> Budget:
    return Budget("these", "wait", most, sessions)


def metered(most: int = 100) -> tuple[Meter, Budget, Budget]:
    owner, process = budget(), budget()
    return Meter(most, owner, process), owner, process


def test_what_limits_on_bytes_mean() -> None:
    """A change of one of these changes what fits into a session of a given size."""
    assert (sizes.SEGMENT, sizes.TOKEN, sizes.MARK, sizes.LOGPROB) == (800, 8, 110, 120)
    assert (sizes.BRANCH, sizes.SESSION) == (1_500, 24_576)


def test_a_budget_has_room_up_to_its_limit() -> None:
    each = budget(most=100)
    each.held = 60
    each.require(40)
    with pytest.raises(
        LimitExceeded, match=r"these hold 60 bytes, and 41 more pass .* 100: wait"
    ) as caught:
        each.require(41)
    assert caught.value.details == {"max": 100, "held": 60}


def test_a_budget_has_room_for_so_many_sessions_if_each_has_its_bytes() -> None:
    each = budget(most=sizes.SESSION)
    each.sessions = 1
    each.require_session()
    each.held = 1
    with pytest.raises(LimitExceeded, match="more pass the limit"):
        each.require_session()
    each.held, each.sessions = 0, 2
    with pytest.raises(LimitExceeded, match="these are 2, the most there may be: wait") as caught:
        each.require_session()
    assert caught.value.details == {"max": 2}


def test_a_session_may_hold_just_what_it_may() -> None:
    meter, owner, process = metered(most=100)
    meter.add(100)
    assert not meter.full
    assert (meter.held, owner.held, process.held) == (100, 100, 100)
    meter.require()
    with pytest.raises(LimitExceeded, match="the session holds 100 bytes, and 1 more") as caught:
        meter.require(1)
    assert caught.value.details == {"max": 100, "held": 100}
    meter.add(1)
    assert meter.full
    with pytest.raises(LimitExceeded):
        meter.require()


@pytest.mark.parametrize("full", [0, 1])
def test_its_credential_and_the_process_need_room_too(full: int) -> None:
    meter, *budgets = metered(most=10_000)
    budgets[full].held = 995
    meter.require(5)
    with pytest.raises(LimitExceeded, match="these hold 995"):
        meter.require(6)


def test_a_closed_meter_counts_for_nobody() -> None:
    meter, owner, process = metered()
    meter.add(70)
    meter.close()
    assert (meter.held, owner.held, process.held) == (0, 0, 0)
    meter.add(-30)
    assert (owner.held, process.held) == (0, 0)


def test_sessions_of_nobody_have_the_process_budget_alone() -> None:
    holdings = Holdings(Limits(client_sessions=1, client_bytes=sizes.SESSION), sessions=3)
    nobody = [holdings.open("") for _ in range(2)]
    holdings.open("me")
    with pytest.raises(LimitExceeded, match="the server's sessions are 3"):
        holdings.open("")
    holdings.close("", nobody[0])
    with pytest.raises(LimitExceeded, match="this client's sessions are 1"):
        holdings.open("me")
    assert holdings.held == 2 * sizes.SESSION
    assert holdings.process.sessions == 2


def test_the_bytes_of_a_credential_bound_it_and_those_of_the_process_all() -> None:
    holdings = Holdings(Limits(client_bytes=3 * sizes.SESSION), most=4 * sizes.SESSION)
    mine = holdings.open("me")
    mine.require(2 * sizes.SESSION)
    with pytest.raises(LimitExceeded, match="this client's sessions hold"):
        mine.require(2 * sizes.SESSION + 1)
    yours = holdings.open("you")
    yours.require(2 * sizes.SESSION)
    nobodys = holdings.open("")
    nobodys.require(sizes.SESSION)
    with pytest.raises(LimitExceeded, match="the server's sessions hold"):
        nobodys.require(sizes.SESSION + 1)


def test_a_credential_is_forgotten_with_its_last_session() -> None:
    holdings = Holdings(Limits(client_sessions=2))
    one, two = holdings.open("me"), holdings.open("me")
    holdings.close("me", one)
    assert set(holdings._owners) == {"me"}
    again = holdings.open("me")
    for meter in (two, again):
        holdings.close("me", meter)
    assert (holdings.held, holdings.process.sessions, holdings._owners) == (0, 0, {})


def test_without_limits_of_its_own_a_process_holds_a_million_sessions_in_a_tebibyte() -> None:
    process = Holdings(Limits()).process
    assert (process.most_sessions, process.most) == (1 << 20, 1 << 40)


class Thing(Held):
    __slots__ = ()


def test_a_shared_object_counts_once_until_it_is_gone() -> None:
    meter, *_ = metered()
    thing: Any = Thing()
    thing.grow(5)  # before it is charged: nothing
    assert (thing.meter, meter.held) == (None, 0)
    thing.charge(meter, 10)
    thing.grow(7)
    assert thing.meter is meter
    other = thing
    del thing
    assert meter.held == 17
    del other
    assert meter.held == 0


def test_what_nobody_meters_costs_nothing() -> None:
    thing = Thing()
    thing.charge(None, 10)
    thing.grow(3)
    assert thing.meter is None
    del thing
    segment = InputSegment(0, array("i", [1, 2]), "ab", tail=Tail.RAW)
    meter, *_ = metered()
    segment.count(meter)
    assert meter.held == 800 + 2 * 8 + 2
