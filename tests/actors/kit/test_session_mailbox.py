import pytest

from ramify.actors.kit.mailbox import CAPACITY, FRAME_BYTES, FRAMES, MailboxFull, SessionMailbox
from ramify.protocol.messages import Detached, Frame


async def test_frames_leave_room_for_what_must_arrive() -> None:
    mailbox: SessionMailbox[object] = SessionMailbox("session")
    for _ in range(FRAMES):
        mailbox.tell(Frame(1, [], 10))
    with pytest.raises(MailboxFull):
        mailbox.tell(Frame(1, [], 10))
    for _ in range(CAPACITY - FRAMES):
        mailbox.tell(Detached(1))
    assert len(await mailbox.drain()) == CAPACITY
    mailbox.tell(Frame(1, [], 10))


async def test_frames_that_wait_are_bounded_in_bytes() -> None:
    """One always fits, however big; the bytes count anew when they were read."""
    mailbox: SessionMailbox[object] = SessionMailbox("session")
    mailbox.tell(Frame(1, [], 2 * FRAME_BYTES))
    with pytest.raises(MailboxFull):
        mailbox.tell(Frame(1, [], 1))
    mailbox.tell(Detached(1))
    assert len(await mailbox.drain()) == 2
    mailbox.tell(Frame(1, [], FRAME_BYTES // 2))
    mailbox.tell(Frame(1, [], FRAME_BYTES // 2))
    with pytest.raises(MailboxFull):
        mailbox.tell(Frame(1, [], 1))
