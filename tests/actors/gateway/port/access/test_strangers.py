"""What clients without a token may cost, by address. Time and work are numbers here."""

import pytest

from ramify.actors.gateway.port.access import strangers as s
from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.protocol.config import Limits

BURST = s.WORK_PER_S * s.BURST_S


def test_sockets_of_an_address_share_an_account() -> None:
    them = s.Strangers(10_000)
    one, two = them.enter("10.0.0.1", 0.0), them.enter("10.0.0.1", 0.0)
    other = them.enter("10.0.0.2", 0.0)
    one.spend(BURST, 0.0)
    assert two.wait(0.0) == pytest.approx(2 * s.CONNECTION_WORK / s.WORK_PER_S)
    assert other.wait(0.0) == 0.0
    assert two.wait(1.0) == 0.0


def test_what_a_known_client_cost_is_given_back() -> None:
    them = s.Strangers(10_000)
    for _ in range(10_000):  # a storm of clients behind one address, each with a token
        assert not them.refuses("10.0.0.1", 0.0)
        guest = them.enter("10.0.0.1", 0.0)
        guest.spend(2000, 0.0)
        guest.leave(0.0, known=True)
    assert them.enter("10.0.0.1", 0.0).wait(0.0) == 0.0


def test_who_only_connects_is_cut_off_and_comes_back_later() -> None:
    them = s.Strangers(10_000)
    count = 0
    while not them.refuses("10.0.0.1", 0.0):
        them.enter("10.0.0.1", 0.0).leave(0.0, known=False)
        count += 1
    work = count * s.CONNECTION_WORK
    assert work <= BURST + s.MOST_DEBT_S * s.WORK_PER_S + s.CONNECTION_WORK
    assert not them.refuses("10.0.0.2", 0.0)
    assert not them.refuses("10.0.0.1", 1.0)  # refused ones cost it nothing


def test_an_address_has_a_part_of_the_sockets() -> None:
    them = s.Strangers(400)
    guests = [them.enter("10.0.0.1", 0.0) for _ in range(99)]
    assert not them.refuses("10.0.0.1", 0.0)
    them.enter("10.0.0.1", 0.0)
    assert them.refuses("10.0.0.1", 0.0)
    guests[0].leave(0.0, known=False)
    assert not them.refuses("10.0.0.1", 0.0)


def test_what_is_remembered_is_bounded() -> None:
    them = s.Strangers(10_000)
    for i in range(3 * s.KEPT):
        them.enter(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 0.0).leave(0.0, known=False)
    assert len(them._idle) == s.KEPT
    assert not them._busy


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::1%eth1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "", True),
    ],
)
def test_what_one_client_can_choose_is_one_account(one: str, other: str, same: bool) -> None:
    assert (s.network_of(one) == s.network_of(other)) == same


def test_a_socket_is_no_stranger_after_it_is_known() -> None:
    them = s.Strangers(10_000)
    guest = them.enter("10.0.0.1", 0.0)
    guard = SocketLimits(Limits(), 0.0, guest=guest)
    for _ in range(1000):
        guard.read(0.0)
        guard.received(10_000, 1, 0.0)
    assert guard.wait(0.0) > 1.0
    guard.known(0.0)
    before = guard.wait(0.0)
    guard.end(0.0)
    assert before < guard.wait(0.0) + 1e-9
    assert them.enter("10.0.0.1", 0.0).wait(0.0) == 0.0


def test_a_proxy_stands_for_many() -> None:
    them = s.Strangers(10_000, ["10.0.0.9", "2001:db8::1"])
    assert them.stands_for_many("10.0.0.9")
    assert them.stands_for_many("::ffff:10.0.0.9")
    assert them.stands_for_many("2001:db8::1")
    assert not them.stands_for_many("10.0.0.8")
