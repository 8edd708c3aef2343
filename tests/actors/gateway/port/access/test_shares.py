"""What the sockets of a credential share: counts, rates, and parts of them in several processes."""

import pytest

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.access.shares import BURST_S, FRAMES_PER_OP, Shares
from ramify.protocol.config import Limits
from ramify.protocol.credentials import NOBODY, Credential, CredentialLimits
from ramify.protocol.errors import LimitExceeded

LIMITS = CredentialLimits(sockets=3, ops_per_second=10, bytes_per_second=1000)
ALICE = Credential(name="alice", digest=b"x" * 32, limits=LIMITS)
LOOSE = Limits(ops_per_second=10_000, ops_burst=10_000)


def test_sockets_are_counted_everywhere() -> None:
    shares = Shares()
    share = shares.of(ALICE, 0.0)
    share.enter(0.0)
    shares.told({"alice": 1, "bob": 7}, 0.0)
    share.enter(0.0)
    with pytest.raises(LimitExceeded, match="'alice' has 3 sockets open") as full:
        share.enter(0.0)
    assert full.value.details == {"max": 3}
    assert (share.usage.sockets, shares.elsewhere) == (2, 8)
    share.leave(0.0)
    share.enter(0.0)
    shares.told({}, 0.0)
    share.enter(0.0)
    assert shares.of(ALICE, 0.0) is share


def test_messages_of_all_sockets_together() -> None:
    """The socket at fault may be another one: a refusal is no strike against this one."""
    share = Shares().of(ALICE, 0.0)
    one, two = SocketLimits(LOOSE, 0.0, share), SocketLimits(LOOSE, 0.0, share)
    one.admit(12, 0.0)
    two.admit(8, 0.0)
    for _ in range(20):
        with pytest.raises(LimitExceeded, match="all sockets of 'alice'") as over:
            two.admit(1, 0.0)
    assert over.value.retry_ms == 101
    assert not two.abusive
    assert share.usage.refused_ops == 20
    two.admit(1, 0.101)


def test_bytes_and_frames_of_all_sockets_make_each_wait() -> None:
    share = Shares().of(ALICE, 0.0)
    one, two = SocketLimits(LOOSE, 0.0, share), SocketLimits(LOOSE, 0.0, share)
    one.received(int(1000 * BURST_S), 1, 0.0)
    assert one.wait(0.0) == two.wait(0.0) == 0.0
    one.received(500, 1, 0.0)
    assert one.wait(0.0) == two.wait(0.0) == 0.5
    assert two.wait(0.5) == 0.0
    two.received(0, int(FRAMES_PER_OP * 10 * (BURST_S + 0.5)), 0.5)
    assert one.wait(0.5) == pytest.approx(0.5)
    assert (share.usage.received_bytes, share.usage.frames) == (2500, 102)


def test_a_process_has_its_part_of_the_rates() -> None:
    shares = Shares()
    share = shares.of(ALICE, 0.0)
    share.enter(0.0)
    shares.told({"alice": 3}, 0.0)  # a quarter is here
    share.received(500, 0, 0.0)
    assert share.wait(0.0) == 0.0
    share.received(250, 0, 0.0)
    assert share.wait(0.0) == 1.0
    shares.told({}, 0.0)  # the others have gone: what is owed is paid sooner
    assert share.wait(0.0) == 0.25


def test_other_limits_after_a_reload() -> None:
    shares = Shares()
    share = shares.of(ALICE, 0.0)
    share.enter(0.0)
    shares.configure(Credential(name="alice", digest=b"", limits=CredentialLimits(sockets=1)), 0.0)
    with pytest.raises(LimitExceeded):
        share.enter(0.0)
    shares.configure(Credential(name="unseen", digest=b""), 0.0)
    assert list(shares.usage()) == ["alice"]


def test_nobody_is_counted_and_not_limited() -> None:
    """Without tokens all clients are one credential, and none may use up what the others need."""
    share = Shares().of(NOBODY, 0.0)
    for _ in range(5000):
        share.enter(0.0)
    share.admit(10**6, 0.0)
    share.received(10**12, 10**9, 0.0)
    assert share.wait(0.0) == 0.0
    assert share.usage.sockets == 5000
