"""Notices reach a session whose mailbox is full, in the end and in order."""

from ramify.actors.gateway.port.notices import Notices
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol.messages import Detached, Drained, SessionMessage, Throttled


def test_owed_notices_collapse_and_arrive() -> None:
    router: Router[SessionMessage] = Router("sessions")
    mailbox: Mailbox[SessionMessage] = Mailbox("session", 1)
    router.add(1, mailbox)
    notices = Notices(router)
    notices.tell(1, Throttled(5))
    notices.tell(1, Drained(5))
    notices.tell(1, Throttled(6))
    assert notices.owed == 2
    notices.tell(1, Detached(5))
    assert mailbox.drain_nowait() == [Throttled(5)]
    notices.tell(1, Detached(6))  # not past the one that is owed
    assert not mailbox.drain_nowait()
    notices.retry()
    assert mailbox.drain_nowait() == [Detached(5)]
    notices.retry()
    assert mailbox.drain_nowait() == [Detached(6)]
    assert notices.owed == 0


def test_a_session_that_is_gone_is_owed_nothing() -> None:
    router: Router[SessionMessage] = Router("sessions")
    mailbox: Mailbox[SessionMessage] = Mailbox("session", 0)
    router.add(1, mailbox)
    notices = Notices(router)
    notices.tell(1, Detached(5))
    notices.tell(2, Detached(5))
    assert notices.owed == 1
    router.remove(1)
    notices.retry()
    assert notices.owed == 0
