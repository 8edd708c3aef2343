"""The session's shell: what reaches it from elsewhere than its clients."""

from typing import Any

import pytest

from ramify.actors.kit.clock import ManualClock
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.session.actor import SessionActor
from ramify.protocol.messages import Lost


async def test_a_lost_message_ends_the_session(sim: Any) -> None:
    """As a crash does, whose guard (the directory) gives back what it held."""
    engine = sim()
    engine.session()
    mailboxes: list[Mailbox[Any]] = [Mailbox(name, 100) for name in ("cache", "scheduler", "gateway")]
    cache, scheduler, gateway = mailboxes
    mailbox: Mailbox[Any] = Mailbox("session", 100)
    actor = SessionActor(
        mailbox, engine.cores[1], cache=cache, scheduler=scheduler, gateway=gateway, clock=ManualClock()
    )
    mailbox.tell(Lost("a Tokens cannot be encoded"))
    with pytest.raises(RuntimeError, match="a Tokens cannot be encoded"):
        await actor.run()
