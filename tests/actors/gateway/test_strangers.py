"""What clients without a token may cost, by address. Time and work are numbers here."""

import pytest

from ramify.actors.gateway import strangers as s
from ramify.actors.gateway.limits import SocketLimits
from ramify.protocol.config import Limits

BURST = s.WORK_PER_S * s.BURST_S


def test_sockets_of_an_address_share_an_account() -> None:
    them = s.Strangers(10_000)
    one, two = them.enter("10.0.0.1", 0.0), them.enter("10.0.0.1", 0.0)
    other = them.enter("10.0.0.2", 0.0)
    assert one
    assert two
    assert other
    one.spend(BURST, 0.0)
    assert two.wait(0.0) == pytest.approx(2 * s.CONNECTION_WORK / s.WORK_PER_S)
    assert other.wait(0.0) == 0.0
    assert two.wait(1.0) == 0.0


def test_what_a_known_client_cost_is_given_back() -> None:
    them = s.Strangers(10_000)
    for _ in range(10_000):  # a storm of clients behind one proxy, each with a token
        guest = them.enter("10.0.0.1", 0.0)
        assert guest
        guest.spend(2000, 0.0)
        guest.leave(0.0, known=True)
    assert (last := them.enter("10.0.0.1", 0.0))
    assert last.wait(0.0) == 0.0


def test_who_only_connects_is_cut_off_and_comes_back_later() -> None:
    them = s.Strangers(10_000)
    count = 0
    while (guest := them.enter("10.0.0.1", 0.0)) is not None:
        guest.leave(0.0, known=False)
        count += 1
    work = count * s.CONNECTION_WORK
    assert work <= BURST + s.MOST_DEBT_S * s.WORK_PER_S + s.CONNECTION_WORK
    assert them.enter("10.0.0.2", 0.0)
    assert them.enter("10.0.0.1", 1.0)  # refused ones cost it nothing


def test_an_address_has_a_part_of_the_sockets() -> None:
    them = s.Strangers(400)
    guests = [them.enter("10.0.0.1", 0.0) for _ in range(100)]
    assert all(guests)
    assert them.enter("10.0.0.1", 0.0) is None
    guests[0].leave(0.0, known=False)  # type: ignore[union-attr]
    assert them.enter("10.0.0.1", 0.0)


def test_what_is_remembered_is_bounded() -> None:
    them = s.Strangers(10_000)
    for i in range(3 * s.KEPT):
        guest = them.enter(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 0.0)
        assert guest
        guest.leave(0.0, known=False)
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
    assert (again := them.enter("10.0.0.1", 0.0))
    assert again.wait(0.0) == 0.0
